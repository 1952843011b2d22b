"""A state in memory that is kept: a copy into it stalls training for a fraction of what fresh memory would cost.

The copy of AlexNet's 488 MB (parameters and momentum) takes 1.2 s into fresh memory, which the system has to provide page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.update_rules import EMA
from ...models.base import Array, ModelSpec, ParameterSpec
from ..base import State

__all__ = ["StateMemory", "cut", "each_value"]

Values = Mapping[str, Array]


def cut(flat: NDArray[np.float32], specs: Sequence[ParameterSpec]) -> dict[str, Array]:
    """Return a flat vector's pieces by name, in canonical shapes on the same memory."""
    pieces: dict[str, Array] = {}
    start = 0
    for spec in specs:
        pieces[spec.name] = flat[start : start + spec.size].reshape(spec.shape)
        start += spec.size
    return pieces


def each_value(spec: ModelSpec, slots: Sequence[str], state: State) -> Iterator[Array | None]:
    """Yield the state's values: of parameters, then of each slot, then of buffers, in the order of the spec; None where a slot is absent.

    A moving average of the weights that is absent begins as the weights.

    Raises ValueError, naming it, where a value is missing or has another shape than the model's.
    """
    yield from _values(spec, spec.parameters, state.parameters, "parameter")
    for slot in slots:
        if slot in state.slots:
            yield from _values(spec, spec.parameters, state.slots[slot], slot)
        elif slot == EMA:
            yield from _values(spec, spec.parameters, state.parameters, "parameter")
        else:
            yield from (None for _ in spec.parameters)
    yield from _values(spec, spec.buffers, state.buffers, "buffer")


def _values(spec: ModelSpec, wanted: Sequence[ParameterSpec], values: Values, what: str) -> Iterator[Array]:
    for one in wanted:
        found = values[one.name].shape if one.name in values else "nothing"
        if found != one.shape:
            raise ValueError(f"{what} {one.name!r} of model {spec.name!r} has shape {one.shape}; the given state has {found}")
        yield np.asarray(values[one.name], dtype=np.float32)


class StateMemory:
    """Room for one copy of the state: a vector of parameters, one for each slot, and one of buffers.

    `arrays` are the values in the order of `each_value`, each in its canonical shape.
    """

    def __init__(self, spec: ModelSpec, slots: Sequence[str], allocate: Callable[[int], Array] | None = None) -> None:
        """Take the memory, and touch it. `allocate` gives a flat vector of so many float32, in plain memory unless it is given."""
        self._spec, self._slots = spec, tuple(slots)
        make = allocate or (lambda size: np.empty(size, np.float32))
        self.vectors = [make(spec.size) for _ in range(1 + len(self._slots))]
        self.buffers = make(spec.buffers_size)
        for vector in (*self.vectors, self.buffers):
            vector.fill(0.0)  # fresh memory may be one page that the system lends many times
        shaped = [piece for vector in self.vectors for piece in cut(vector, spec.parameters).values()]
        self.arrays = [*shaped, *cut(self.buffers, spec.buffers).values()]

    def fill(self, state: State) -> None:
        """Copy a state; slots that are absent become zeros. Raises ValueError where it does not fit the model."""
        for kept, value in zip(self.arrays, each_value(self._spec, self._slots, state), strict=True):
            np.copyto(kept, 0.0 if value is None else value)

    def shard(self, start: int, stop: int) -> list[Array]:
        """Return the pieces that belong to elements start … stop − 1 of the vector of all parameters and buffers, none of them empty."""
        size = self._spec.size
        pieces = [vector[start : min(stop, size)] for vector in self.vectors if start < min(stop, size)]
        tail = self.buffers[max(start, size) - size : max(stop, size) - size]
        return pieces + ([tail] if len(tail) else [])

    def state(self, updates: int, scalars: Mapping[str, float] | None = None) -> State:
        """Return the copy as a state, on this memory."""
        first, *slots = (cut(vector, self._spec.parameters) for vector in self.vectors)
        buffers = cut(self.buffers, self._spec.buffers)
        return State(first, dict(zip(self._slots, slots, strict=True)), updates, buffers, dict(scalars or {}))
