"""A state in memory that is kept: a copy into it stalls training for a fraction of what fresh memory would cost.

The copy of AlexNet's 488 MB (parameters and momentum) takes 1.2 s into fresh memory, which the system has to provide page by page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ...core.update_rules import EMA
from ...models.base import Array, ModelSpec, ParameterSpec
from ..base import State
from .data import share

__all__ = ["StateMemory", "cut", "each_value"]

Values = Mapping[str, Array]


def cut(flat: torch.Tensor, specs: Sequence[ParameterSpec]) -> list[torch.Tensor]:
    """Return a flat vector's pieces, one a parameter, in canonical shapes on the same memory."""
    pieces = flat.split([spec.size for spec in specs])
    return [piece.view(spec.shape) for piece, spec in zip(pieces, specs, strict=True)]


def each_value(spec: ModelSpec, slots: Sequence[str], state: State) -> Iterator[torch.Tensor | None]:
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


def _values(spec: ModelSpec, wanted: Sequence[ParameterSpec], values: Values, what: str) -> Iterator[torch.Tensor]:
    for one in wanted:
        found = values[one.name].shape if one.name in values else "nothing"
        if found != one.shape:
            raise ValueError(f"{what} {one.name!r} of model {spec.name!r} has shape {one.shape}; the given state has {found}")
        yield share(np.asarray(values[one.name], dtype=np.float32))


class StateMemory:
    """Room for one copy of the state: a vector of parameters, one for each slot, and one of buffers."""

    def __init__(self, spec: ModelSpec, slots: Sequence[str], *, pinned: bool = False) -> None:
        """Take the memory, and touch it. `pinned`: so that a GPU can write to it by itself."""
        self._spec, self._slots = spec, tuple(slots)
        self.vectors = [torch.zeros(spec.size, pin_memory=pinned) for _ in range(1 + len(self._slots))]
        self.buffers = torch.zeros(spec.buffers_size, pin_memory=pinned)
        for vector in (*self.vectors, self.buffers):
            vector.fill_(0.0)  # fresh zeros may be one page that the system lends many times
        shaped = [piece for vector in self.vectors for piece in cut(vector, spec.parameters)]
        self._tensors = shaped + cut(self.buffers, spec.buffers)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the state's tensors, in the order of `each_value`; returns when the copies are whole."""
        for kept, tensor in zip(self._tensors, tensors, strict=True):
            kept.copy_(tensor, non_blocking=True)
        if any(tensor.device.type == "cuda" for tensor in tensors[:1]):
            torch.cuda.synchronize()

    def fill(self, state: State) -> None:
        """Copy a state; slots that are absent become zeros. Raises ValueError where it does not fit the model."""
        for kept, value in zip(self._tensors, each_value(self._spec, self._slots, state), strict=True):
            kept.zero_() if value is None else kept.copy_(value)

    def shard(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the pieces that belong to elements start … stop − 1 of the vector of all parameters and buffers, none of them empty."""
        size = self._spec.size
        pieces = [vector[start : min(stop, size)] for vector in self.vectors if start < min(stop, size)]
        tail = self.buffers[max(start, size) - size : max(stop, size) - size]
        return pieces + ([tail] if len(tail) else [])

    def state(self, updates: int, scalars: Mapping[str, float] | None = None) -> State:
        """Return the copy as a state, on this memory."""
        names = [parameter.name for parameter in self._spec.parameters]
        arrays = [tensor.numpy() for tensor in self._tensors]
        count = len(names)
        groups = [dict(zip(names, arrays[first : first + count], strict=True)) for first in range(0, count * len(self.vectors), count)]
        buffers = dict(zip((buffer.name for buffer in self._spec.buffers), arrays[count * len(self.vectors) :], strict=True))
        return State(groups[0], dict(zip(self._slots, groups[1:], strict=True)), updates, buffers, dict(scalars or {}))
