"""A model's parameters as tensors, its forward function from the (model, backend) table, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...core.job import Job
from ...core.plugins import forward_plugin, load
from ...models.base import ModelSpec
from .data import ResidentSplit

__all__ = ["EVAL_BATCH", "DistributedLoss", "Model"]

EVAL_BATCH = 1024
"""Examples per forward pass of an evaluation."""

Forward = Callable[..., torch.Tensor]
LOSSES: Mapping[str, Callable[..., torch.Tensor]] = {"cross_entropy": torch.nn.functional.cross_entropy}


class Model:
    """Trainable tensors by canonical name, and what is computed from them.

    `leaves` require gradients; `values` are the same memory without, for the optimiser to write to.
    """

    def __init__(self, job: Job, spec: ModelSpec, leaves: Sequence[torch.Tensor]) -> None:
        self.spec = spec
        self.leaves = list(leaves)
        self.values = [leaf.detach() for leaf in self.leaves]
        self.named = dict(zip((parameter.name for parameter in spec.parameters), self.leaves, strict=True))
        self._forward: Forward = load(forward_plugin(job.model, "torch"), "forward").forward
        self._loss = LOSSES[spec.loss]

    @classmethod
    def initial(cls, job: Job, spec: ModelSpec, device: torch.device) -> Model:
        """Make a model with parameters of its own, at their initial values."""
        values = spec.initial(job.seed)
        return cls(job, spec, [torch.nn.Parameter(torch.from_numpy(values[parameter.name]).to(device)) for parameter in spec.parameters])

    @classmethod
    def on(cls, job: Job, spec: ModelSpec, flat: torch.Tensor) -> Model:
        """Make a model whose parameters lie in a given flat float32 vector, one after another in the order of the spec."""
        pieces = flat.split([parameter.size for parameter in spec.parameters])
        shaped = zip(pieces, spec.parameters, strict=True)
        return cls(job, spec, [piece.view(parameter.shape).requires_grad_() for piece, parameter in shaped])

    def mean_loss(self, x_bchw: torch.Tensor, y_b: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a whole (not empty) batch."""
        return self._loss(self._forward(self.named, x_bchw, training=True), y_b)

    def summed_loss(self, x_bchw: torch.Tensor, y_b: torch.Tensor) -> torch.Tensor:
        """Return the sum of the examples' losses; 0, with zero gradients, for an empty slice."""
        return self._loss(self._forward(self.named, x_bchw, training=True), y_b, reduction="sum")

    def sums(self, data: ResidentSplit, start: int, stop: int) -> tuple[float, int, int]:
        """Return (sum of losses, correct predictions, examples) over the examples start … stop − 1."""
        loss_sum, correct, examples = 0.0, 0, 0
        with torch.inference_mode():
            for first in range(start, stop, EVAL_BATCH):
                x, y = data.span(first, min(first + EVAL_BATCH, stop))
                logits_bk = self._forward(self.named, x, training=False)
                loss_sum += float(self._loss(logits_bk, y, reduction="none").sum(dtype=torch.float64))
                correct += int((logits_bk.argmax(1) == y).sum())
                examples += len(y)
        return loss_sum, correct, examples


class DistributedLoss(torch.nn.Module):  # type: ignore[misc]
    """The model as the module that DistributedDataParallel wants: batch in, scaled sum of losses out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.leaves = torch.nn.ParameterList(model.leaves)
        self._model = model

    def forward(self, x_bchw: torch.Tensor, y_b: torch.Tensor, scale: float) -> torch.Tensor:
        """Return scale · Σ losses of the slice."""
        return self._model.summed_loss(x_bchw, y_b) * scale
