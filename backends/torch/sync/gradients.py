"""Where the gradients of an update come from: this rank alone, or DistributedDataParallel.

`scale`, wherever it is a parameter, is what the examples' losses are multiplied by: a source's `factor` / (weight of the global batch).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from ..data import ColumnTensors
from ..model import Context, MicroBatch, Model, apart
from ..precision import LossScale

__all__ = ["Computed", "DataParallel", "GradientSource", "OneRank"]

Computed = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""The loss, and its gradients in the order of the model's leaves."""


class GradientSource(Protocol):
    """Gives the gradients of whole batches, summed over the ranks that it asks."""

    @property
    def factor(self) -> float:
        """1, or the number of ranks where it takes the mean over them."""
        ...

    def of_batch(self, x: ColumnTensors, y: ColumnTensors, scale: float, context: Context) -> Computed:
        """Compute a batch: its mean loss, or what this rank's slice contributes to it, times the factor."""
        ...

    def of_micro_batches(self, micro_batches: Iterable[MicroBatch], count: int, scale: float) -> Computed:
        """Compute the same of a batch's `count` micro-batches, one after another; ranks exchange their sums once, with the last.

        Beside the sum of the gradients there are those of one micro-batch at a time.
        """
        ...


class OneRank:
    """Gradients of one rank as they are: those of a single process, or, with `slices`, of one rank's slice, which may be empty."""

    factor = 1.0

    def __init__(self, model: Model, loss_scale: LossScale | None, *, slices: bool) -> None:
        self._model, self._loss_scale, self._slices = model, loss_scale, slices

    def of_batch(self, x: ColumnTensors, y: ColumnTensors, scale: float, context: Context) -> Computed:
        """Compute; see `GradientSource`."""
        model = self._model
        loss = model.summed_loss(x, y, context) * scale if self._slices else model.mean_loss(x, y, context, scale)
        gradients = model.gradients(_scaled(loss, self._loss_scale))
        model.keep_updated(context)
        return loss.detach(), gradients

    def of_micro_batches(self, micro_batches: Iterable[MicroBatch], _count: int, scale: float) -> Computed:
        """Compute; see `GradientSource`."""
        total: list[torch.Tensor] = []
        losses = []
        for x, y, context in micro_batches:
            loss = self._model.summed_loss(x, y, context) * scale
            gradients = self._model.gradients(_scaled(loss, self._loss_scale))
            if total:
                torch._foreach_add_(total, gradients)
            else:
                total = gradients
            self._model.keep_updated(context)
            losses.append(loss.detach())
        return torch.stack(losses).sum(), total


class DataParallel:
    """The mean over all ranks, by DistributedDataParallel."""

    def __init__(
        self, model: Model, loss_scale: LossScale | None, distributed: torch.nn.parallel.DistributedDataParallel, ranks: int
    ) -> None:
        self._model, self._loss_scale, self._distributed, self.factor = model, loss_scale, distributed, float(ranks)

    def of_batch(self, x: ColumnTensors, y: ColumnTensors, scale: float, context: Context) -> Computed:
        """Compute; see `GradientSource`."""
        self._forget()
        loss = self._backward(x, y, scale, context)
        return loss, [leaf.grad for leaf in self._model.leaves]

    def of_micro_batches(self, micro_batches: Iterable[MicroBatch], count: int, scale: float) -> Computed:
        """Compute; see `GradientSource`: DDP adds up what one rank has in ``grad`` before it exchanges that."""
        leaves, losses = self._model.leaves, []
        self._forget()
        for number, (x, y, context) in enumerate(micro_batches, 1):
            with nullcontext() if number == count else self._distributed.no_sync():
                losses.append(self._backward(x, y, scale, context))
            if number == 1 < count:  # what follows is added to these, in place
                for leaf, gradient in zip(leaves, apart([leaf.grad for leaf in leaves]), strict=True):
                    leaf.grad = gradient
        return torch.stack(losses).sum(), [leaf.grad for leaf in leaves]

    def _forget(self) -> None:
        for leaf in self._model.leaves:
            leaf.grad = None

    def _backward(self, x: ColumnTensors, y: ColumnTensors, scale: float, context: Context) -> torch.Tensor:
        loss = self._distributed(x, y, scale, context)
        _scaled(loss, self._loss_scale).backward()
        self._model.keep_updated(context)
        found: torch.Tensor = loss.detach()
        return found


def _scaled(loss: torch.Tensor, loss_scale: LossScale | None) -> torch.Tensor:
    return loss if loss_scale is None else loss * loss_scale.scale
