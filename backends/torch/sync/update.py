"""One update of a sync rank: from its examples to new parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..data import ColumnTensors
from ..model import Context, Model
from ..optimizers import Rule
from ..precision import LossScale

__all__ = ["Updater"]


class Updater:
    """Computes the gradients of a model and applies them by a rule. `distributed` is the model in DDP, None for a single process."""

    def __init__(self, model: Model, rule: Rule, loss_scale: LossScale | None, distributed: torch.nn.Module | None) -> None:
        self._model, self._rule, self._loss_scale, self._distributed = model, rule, loss_scale, distributed

    def update(self, x: ColumnTensors, y: ColumnTensors, scale: float, lr: float, context: Context, *, alone: bool = False) -> torch.Tensor:
        """Apply one update and return the loss: the batch's mean, or the slice's sum times `scale` among several ranks.

        `scale` is ranks / (weight of the global batch). `alone`: with this rank's gradients as they are, to calibrate.
        """
        leaves = self._model.leaves
        loss: torch.Tensor
        gradients: Sequence[torch.Tensor]
        if self._distributed is None or alone:
            single, model = self._distributed is None, self._model
            loss = model.mean_loss(x, y, context, scale) if single else model.summed_loss(x, y, context) * scale
            gradients = torch.autograd.grad(self._scaled(loss), leaves)
        else:
            for leaf in leaves:
                leaf.grad = None
            loss = self._distributed(x, y, scale, context)
            self._scaled(loss).backward()
            gradients = [leaf.grad for leaf in leaves]
        if context.updated:
            self._model.keep_updated(context)
        if self._loss_scale is None or self._loss_scale.unscale(gradients):
            self._rule.step(gradients, lr)
        else:
            self._rule.updates += 1  # an update that changes nothing: the cursor of the run counts it
        return loss.detach()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._loss_scale is None else loss * self._loss_scale.scale
