"""The Transformer on torch.

Shapes: logits_btv [batch, target time, pieces]; targets_bt [batch, time].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...data.columns import LENGTHS
from ..base import ForwardContext
from ..layers.torch import SequenceLayers
from . import TARGET, empty_cache, forward_functions

__all__ = ["decode_step", "empty_cache", "encode", "example_sums", "forward", "translation_loss"]
Tensors = Mapping[str, torch.Tensor]
Context = ForwardContext[torch.Tensor]
forward, encode, decode_step = forward_functions(SequenceLayers)


def translation_loss(logits_btv: torch.Tensor, targets: Tensors, context: Context) -> torch.Tensor:
    """Return Σ over the target's tokens of −log softmax, with smoothed labels: [batch]."""
    return _sum_losses(logits_btv, targets, context.settings.smoothing)


def example_sums(logits_btv: torch.Tensor, targets: Tensors, context: Context) -> dict[str, torch.Tensor]:
    """Return each example's part of the sums except the loss: [batch] each."""
    right_bt = (logits_btv.argmax(2) == targets[TARGET]) & _inside(targets)
    return {"nll_sum": _sum_losses(logits_btv, targets, 0.0), "correct_tokens": right_bt.sum(1)}


def _sum_losses(logits_btv: torch.Tensor, targets: Tensors, smoothing: float) -> torch.Tensor:
    losses_n = _SmoothedCrossEntropy.apply(logits_btv.flatten(0, 1), targets[TARGET].flatten(), smoothing)
    return (losses_n.view(logits_btv.shape[:2]) * _inside(targets)).sum(1)


class _SmoothedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy with smoothed labels, [n], in fewer passes over [n, pieces] than torch's."""

    @staticmethod
    def forward(ctx: Any, logits_nv: torch.Tensor, targets_n: torch.Tensor, smoothing: float) -> torch.Tensor:
        log_shares_nv = torch.log_softmax(logits_nv, 1)
        ctx.save_for_backward(log_shares_nv, targets_n)
        ctx.smoothing = smoothing
        own_n = log_shares_nv.gather(1, targets_n[:, None])[:, 0]
        return -own_n if not smoothing else (smoothing - 1.0) * own_n - smoothing * log_shares_nv.mean(1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slopes_n: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (log_shares_nv, targets_n), smoothing = ctx.saved_tensors, ctx.smoothing
        slopes_n1 = slopes_n[:, None]
        slopes_nv = torch.exp(log_shares_nv).sub_(smoothing / log_shares_nv.shape[1]).mul_(slopes_n1)
        slopes_nv.scatter_add_(1, targets_n[:, None], (smoothing - 1.0) * slopes_n1)
        return slopes_nv, None, None


def _inside(targets: Tensors) -> torch.Tensor:
    """Return the mask of the targets without padding, boolean [batch, time]."""
    tokens_bt = targets[TARGET]
    return torch.arange(tokens_bt.shape[1], device=tokens_bt.device) < targets[TARGET + LENGTHS][:, None]
