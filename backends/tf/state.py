"""A state in memory that is kept: a copy into it stalls training for a fraction of what fresh memory would cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ...core.update_rules import EMA
from ...models.base import Array, ModelSpec, ParameterSpec
from ..base import State

__all__ = ["StateMemory", "check_fits", "copy_all", "cut", "slot_values"]

COPY_THREADS = 2
"""Threads that copy a state: one does not use all that memory can give."""

PIECE_ELEMENTS = 1 << 22
"""Floats that are copied at once, so that threads share a model whose numbers are mostly in one parameter."""


PERMUTED_ELEMENTS = 1 << 18
"""The same where the elements lie in another order, which takes longer."""


class StateMemory:
    """Room for one copy of the state: a vector of parameters, one for each slot, and one of buffers, each in the order of the spec."""

    def __init__(self, spec: ModelSpec, slots: Sequence[str]) -> None:
        """Take the memory, and touch it: fresh zeros may be one page that the system lends many times."""
        self._spec = spec
        self.parameters = _touched(spec.size)
        self.slots = {slot: _touched(spec.size) for slot in slots}
        self.buffers = _touched(spec.buffers_size)

    def rows(self) -> list[tuple[NDArray[np.float32], tuple[ParameterSpec, ...]]]:
        """Return each vector with the specs of what lies in it: parameters, slots, buffers."""
        vectors = (self.parameters, *self.slots.values())
        return [*((vector, self._spec.parameters) for vector in vectors), (self.buffers, self._spec.buffers)]

    def state(self, updates: int, scalars: Mapping[str, float] | None = None) -> State:
        """Return the copy as a state, on this memory."""
        slots = {slot: cut(vector, self._spec.parameters) for slot, vector in self.slots.items()}
        parameters, buffers = cut(self.parameters, self._spec.parameters), cut(self.buffers, self._spec.buffers)
        return State(parameters, slots, updates, buffers, dict(scalars or {}))


def cut(flat: NDArray[np.float32], specs: Sequence[ParameterSpec]) -> dict[str, Array]:
    """Return a flat vector's pieces by name, on the same memory."""
    ends = np.cumsum([spec.size for spec in specs], dtype=np.int64)
    return {spec.name: flat[end - spec.size : end].reshape(spec.shape) for spec, end in zip(specs, ends, strict=True)}


def copy_all(pairs: Iterable[tuple[NDArray[np.float32], NDArray[np.float32]]]) -> None:
    """Copy each second array into the first, by several threads. Targets are contiguous; a source may be a view in another order."""
    pieces = [piece for target, source in pairs for piece in _pieces(target, source)]
    with ThreadPoolExecutor(COPY_THREADS) as threads:
        for _ in threads.map(lambda pair: np.copyto(*pair), pieces):
            pass  # a failed copy raises here


def _pieces(target: NDArray[np.float32], source: NDArray[np.float32]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Cut both alike. A source whose elements lie in another order is cut along its first axis only, as a flat view of it is a copy."""
    if source.flags.c_contiguous:
        target, source, step = target.reshape(-1), source.reshape(-1), PIECE_ELEMENTS
    else:
        target = target.reshape(source.shape)
        step = max(1, PERMUTED_ELEMENTS * len(source) // source.size)
    for first in range(0, len(source), step):
        yield target[first : first + step], source[first : first + step]


def slot_values(state: State, slot: str, parameter: ParameterSpec) -> Array:
    """Return what a state has of a parameter's slot; where it has none, what the slot is before the first update."""
    if slot in state.slots:
        return state.slots[slot][parameter.name]
    return state.parameters[parameter.name] if slot == EMA else np.zeros(parameter.shape, np.float32)


def check_fits(spec: ModelSpec, slots: Sequence[str], state: State) -> None:
    """Raise ValueError, naming the value, where a state does not fit the model or the optimiser. Slots may be absent."""
    strangers = sorted(set(state.slots) - set(slots))
    if strangers:
        raise ValueError(f"the given state has slots {', '.join(strangers)}; this optimiser has {', '.join(slots) or 'none'}")
    _check(spec, spec.parameters, state.parameters, "parameter")
    for slot, values in state.slots.items():
        _check(spec, spec.parameters, values, slot)
    _check(spec, spec.buffers, state.buffers, "buffer")


def _check(spec: ModelSpec, wanted: Sequence[ParameterSpec], values: Mapping[str, Array], what: str) -> None:
    for one in wanted:
        found = values[one.name].shape if one.name in values else "nothing"
        if found != one.shape:
            raise ValueError(f"{what} {one.name!r} of model {spec.name!r} has shape {one.shape}; the given state has {found}")


def _touched(size: int) -> NDArray[np.float32]:
    vector = np.empty(size, np.float32)
    vector.fill(0.0)
    return vector
