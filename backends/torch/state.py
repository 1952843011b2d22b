"""A model's state as tensors: pieces of a flat vector, and room for a copy that a GPU writes to by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...models.base import Array, ModelSpec, ParameterSpec
from ..base import State
from ..vectors import state_memory
from .data import share

__all__ = ["StateMemory", "cut", "each_value"]


def cut(flat: torch.Tensor, specs: Sequence[ParameterSpec]) -> list[torch.Tensor]:
    """Return a flat vector's pieces, one a parameter, in canonical shapes on the same memory."""
    pieces = flat.split([spec.size for spec in specs])
    return [piece.view(spec.shape) for piece, spec in zip(pieces, specs, strict=True)]


def each_value(spec: ModelSpec, slots: Sequence[str], state: State) -> Iterator[torch.Tensor | None]:
    """Yield the state's values as tensors on the arrays' own memory; see `vectors.state_memory.each_value`."""
    for value in state_memory.each_value(spec, slots, state):
        yield None if value is None else share(value)


class StateMemory(state_memory.StateMemory):
    """The room of `vectors.state_memory`, to which a device's tensors are copied."""

    def __init__(self, spec: ModelSpec, slots: Sequence[str], *, pinned: bool = False) -> None:
        """Take the memory, and touch it. `pinned`: so that a GPU can write to it by itself."""
        held: list[torch.Tensor] = []

        def allocate(size: int) -> Array:
            held.append(torch.empty(size, pin_memory=pinned))
            memory: Array = held[-1].numpy()
            return memory

        super().__init__(spec, slots, allocate)
        *vectors, buffers = held
        self._tensors = [piece for vector in vectors for piece in cut(vector, spec.parameters)] + cut(buffers, spec.buffers)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the state's tensors, in the order of `each_value`; returns when the copies are whole."""
        for kept, tensor in zip(self._tensors, tensors, strict=True):
            kept.copy_(tensor, non_blocking=True)
        if any(tensor.device.type == "cuda" for tensor in tensors[:1]):
            torch.cuda.synchronize()
