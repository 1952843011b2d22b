"""One update of a sync rank: from its examples to new parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ....core.job import Job
from ..data import ColumnTensors
from ..model import Context, MicroBatch
from ..optimizers import Rule, clipped
from ..precision import LossScale
from .gradients import GradientSource

__all__ = ["Updater"]


class Updater:
    """Applies the gradients of a source by a rule."""

    def __init__(self, job: Job, rule: Rule, loss_scale: LossScale | None, source: GradientSource) -> None:
        self._rule, self._loss_scale, self._source = rule, loss_scale, source
        self._clip_norm = job.clip_norm

    def update(self, x: ColumnTensors, y: ColumnTensors, scale: float, lr: float, context: Context) -> torch.Tensor:
        """Apply one update and return the loss, as the source gives it."""
        loss, gradients = self._source.of_batch(x, y, scale, context)
        self._apply(gradients, lr)
        return loss

    def accumulate(self, micro_batches: Iterable[MicroBatch], count: int, scale: float, lr: float) -> torch.Tensor:
        """Do the same from `count` micro-batches, computed one after another."""
        loss, gradients = self._source.of_micro_batches(micro_batches, count, scale)
        self._apply(gradients, lr)
        return loss

    def _apply(self, gradients: Sequence[torch.Tensor], lr: float) -> None:
        if self._loss_scale is not None and not self._loss_scale.unscale(gradients):
            self._rule.updates += 1  # an update that changes nothing: the cursor of the run counts it
            return
        self._rule.step(clipped(gradients, self._clip_norm) if self._clip_norm else gradients, lr)
