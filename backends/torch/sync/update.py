"""One update of a sync rank: from its examples to new parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import cast

import torch

from ....core.job import Job
from ..data import ColumnTensors
from ..model import Context, MicroBatch, Model, apart
from ..optimizers import Rule, clipped
from ..precision import LossScale

__all__ = ["Updater"]


class Updater:
    """Computes the gradients of a model and applies them by a rule. `distributed` is the model in DDP, None for a single process.

    `scale`, wherever it is a parameter, is ranks / (weight of the global batch).
    """

    def __init__(
        self,
        job: Job,
        model: Model,
        rule: Rule,
        loss_scale: LossScale | None,
        distributed: torch.nn.parallel.DistributedDataParallel | None,
    ) -> None:
        self._model, self._rule, self._loss_scale, self._distributed = model, rule, loss_scale, distributed
        self._clip_norm = job.clip_norm

    def update(self, x: ColumnTensors, y: ColumnTensors, scale: float, lr: float, context: Context, *, alone: bool = False) -> torch.Tensor:
        """Apply one update and return the loss: the batch's mean, or the slice's sum times `scale` among several ranks.

        `alone`: with this rank's gradients as they are, to calibrate.
        """
        loss: torch.Tensor
        gradients: Sequence[torch.Tensor]
        if self._distributed is None or alone:
            single, model = self._distributed is None, self._model
            loss = model.mean_loss(x, y, context, scale) if single else model.summed_loss(x, y, context) * scale
            gradients = model.gradients(self._scaled(loss))
        else:
            leaves = self._model.leaves
            for leaf in leaves:
                leaf.grad = None
            loss = self._distributed(x, y, scale, context)
            self._scaled(loss).backward()
            gradients = [leaf.grad for leaf in leaves]
        if context.updated:
            self._model.keep_updated(context)
        self._apply(gradients, lr)
        return loss.detach()

    def accumulate(self, micro_batches: Iterable[MicroBatch], count: int, scale: float, lr: float, *, alone: bool = False) -> torch.Tensor:
        """Do the same from `count` micro-batches, computed one after another; ranks exchange their sums once, with the last.

        Beside the sum of the gradients there are those of one micro-batch at a time.
        """
        losses: list[torch.Tensor] = []
        summed = self._summed_alone if self._distributed is None or alone else self._summed_by_all
        self._apply(summed(micro_batches, count, scale, losses), lr)
        return torch.stack(losses).sum()

    def _summed_alone(
        self, micro_batches: Iterable[MicroBatch], _count: int, scale: float, losses: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the sums of this process's own gradients."""
        total: list[torch.Tensor] = []
        for x, y, context in micro_batches:
            loss = self._model.summed_loss(x, y, context) * scale
            gradients = self._model.gradients(self._scaled(loss))
            if total:
                torch._foreach_add_(total, gradients)
            else:
                total = gradients
            self._keep(loss, context, losses)
        return total

    def _summed_by_all(
        self, micro_batches: Iterable[MicroBatch], count: int, scale: float, losses: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the sums over all ranks: DDP adds up what one rank has in ``grad`` before it exchanges that."""
        distributed = cast(torch.nn.parallel.DistributedDataParallel, self._distributed)
        leaves = self._model.leaves
        for leaf in leaves:
            leaf.grad = None
        for number, (x, y, context) in enumerate(micro_batches, 1):
            with nullcontext() if number == count else distributed.no_sync():
                loss = distributed(x, y, scale, context)
                self._scaled(loss).backward()
            if number == 1 < count:  # what follows is added to these, in place
                for leaf, gradient in zip(leaves, apart([leaf.grad for leaf in leaves]), strict=True):
                    leaf.grad = gradient
            self._keep(loss, context, losses)
        return [leaf.grad for leaf in leaves]

    def _keep(self, loss: torch.Tensor, context: Context, losses: list[torch.Tensor]) -> None:
        if context.updated:
            self._model.keep_updated(context)
        losses.append(loss.detach())

    def _apply(self, gradients: Sequence[torch.Tensor], lr: float) -> None:
        if self._loss_scale is not None and not self._loss_scale.unscale(gradients):
            self._rule.updates += 1  # an update that changes nothing: the cursor of the run counts it
            return
        self._rule.step(clipped(gradients, self._clip_norm) if self._clip_norm else gradients, lr)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._loss_scale is None else loss * self._loss_scale.scale
