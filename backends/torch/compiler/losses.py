"""The loss of a batch, compiled: of batches of the sizes that almost all batches have. Its backward pass is compiled with it.

What is compiled is a function of tensors alone. Masks of dropout come from generators outside of it, and are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ....models.base import ForwardContext
from ..data import ColumnTensors
from ..forward_context import Dropout

__all__ = ["CompiledLoss", "GivenUpError"]

Context = ForwardContext[torch.Tensor]
Compute = Callable[[Mapping[str, torch.Tensor], ColumnTensors, ColumnTensors, Context], torch.Tensor]
"""From parameters by name, inputs, target and context to the sum of the examples' losses."""

Mask = tuple[torch.Tensor, float, int]
"""A tensor like the one that elements are dropped of, rate and layer."""


class GivenUpError(Exception):
    """Compiling has been given up meanwhile."""


class CompiledLoss:
    """The compiled function, for batches of `sizes` examples."""

    def __init__(self, compute: Compute, sizes: frozenset[int]) -> None:
        self._compute, self._sizes = compute, sizes
        self._masks: dict[int, list[Mask]] = {}
        self._given_up = False
        self._function = torch.compile(self._on_tensors, dynamic=False, backend=self._backend)

    def takes(self, y: ColumnTensors) -> bool:
        """Whether a batch is of a size that is compiled."""
        return isinstance(y, torch.Tensor) and len(y) in self._sizes

    def give_up(self) -> None:
        """Have what is being compiled end in GivenUpError as soon as it asks."""
        self._given_up = True

    def __call__(
        self, named: Mapping[str, torch.Tensor], x: ColumnTensors, y: torch.Tensor, context: Context, *, apart: bool = False
    ) -> torch.Tensor:
        """Return the sum of the examples' losses; `context` takes new values of buffers.

        `apart`: nothing that training uses is changed, not even a generator of masks.
        """
        masks = {layer: self._factors(context, like, rate, layer, apart=apart) for like, rate, layer in self._drawn(named, x, y, context)}
        loss, updated = self._function(dict(named), dict(context.buffers), x, y, masks, context.compute, context.settings)
        if not apart:
            context.updated.update(updated)
        found: torch.Tensor = loss
        return found

    def _on_tensors(
        self,
        named: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        x: ColumnTensors,
        y: torch.Tensor,
        masks: Mapping[int, torch.Tensor],
        low: torch.dtype | None,
        settings: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        context: Context = ForwardContext(training=True, buffers=buffers, compute=low, settings=settings)
        context.dropout = lambda x, rate, layer: x * masks[layer]
        return self._compute(named, x, y, context), context.updated

    def _backend(self, graph: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if self._given_up:
            raise GivenUpError("compiling was given up")
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    @staticmethod
    def _factors(context: Context, like: torch.Tensor, rate: float, layer: int, *, apart: bool) -> torch.Tensor:
        if apart or not isinstance(context.dropout, Dropout):
            return torch.ones_like(like)
        return context.dropout.factors(like, rate, layer)

    def _drawn(self, named: Mapping[str, torch.Tensor], x: ColumnTensors, y: torch.Tensor, outer: Context) -> list[Mask]:
        """Return the masks that a pass over such a batch draws; found by one that is not compiled."""
        if not isinstance(outer.dropout, Dropout):
            return []
        if len(y) not in self._masks:
            found: list[Mask] = []

            def note(x: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
                found.append((torch.empty_like(x), rate, layer))
                return x

            context: Context = ForwardContext(training=True, buffers=outer.buffers, compute=outer.compute, settings=outer.settings)
            context.dropout = note
            with torch.no_grad():
                self._compute(named, x, y, context)
            self._masks[len(y)] = found
        return self._masks[len(y)]
