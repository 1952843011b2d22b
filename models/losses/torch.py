"""Standard losses on torch, and what evaluations count besides.

Shapes: outputs [batch, classes] or [batch, …] like the target; y_b labels [batch].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...metrics.counts import BINS, ERROR_SUMS, LABEL_COUNTS, MAX_CLASSES, TOP
from ..objectives import CLASS_WEIGHTS, StandardLoss
from . import BINARY, MULTI_LABEL, SCORE_SCALE, TALLY


def weighted_cross_entropy(loss: StandardLoss, logits_bk: torch.Tensor, y_b: torch.Tensor, context: Any) -> torch.Tensor:
    """Return cross entropy with smoothed labels and weights of classes, by torch's formula."""
    weights_k = logits_bk.new_tensor(loss.class_weights) if loss.class_weights else None
    return functional.cross_entropy(logits_bk, y_b, weights_k, reduction="none", label_smoothing=loss.smoothing)


def binary_cross_entropy(loss: StandardLoss, logits: torch.Tensor, y_b: torch.Tensor, context: Any) -> torch.Tensor:
    """Return −log σ(logit) of class 1, −log(1 − σ(logit)) of class 0."""
    return functional.binary_cross_entropy_with_logits(logits.reshape(y_b.shape), y_b.to(logits.dtype), reduction="none")


def multi_label(loss: StandardLoss, logits: torch.Tensor, y: torch.Tensor, context: Any) -> torch.Tensor:
    """Return the mean over classes of the binary cross entropy of each."""
    labels_bk = functional.one_hot(y, loss.classes) if loss.classes else _flat(loss, y)
    logits_bk = logits.reshape(labels_bk.shape)
    return functional.binary_cross_entropy_with_logits(logits_bk, labels_bk.to(logits_bk.dtype), reduction="none").mean(1)


def mse(loss: StandardLoss, outputs: torch.Tensor, target: torch.Tensor, context: Any) -> torch.Tensor:
    """Return the mean over outputs of (ŷ − y)²."""
    return functional.mse_loss(_flat(loss, outputs), _flat(loss, target), reduction="none").mean(1)


def mae(loss: StandardLoss, outputs: torch.Tensor, target: torch.Tensor, context: Any) -> torch.Tensor:
    """Return the mean over outputs of |ŷ − y|."""
    return functional.l1_loss(_flat(loss, outputs), _flat(loss, target), reduction="none").mean(1)


def huber(loss: StandardLoss, outputs: torch.Tensor, target: torch.Tensor, context: Any) -> torch.Tensor:
    """Return the mean over outputs of e² / 2 for |e| ≤ δ, else δ (|e| − δ/2), of e = ŷ − y."""
    return functional.huber_loss(_flat(loss, outputs), _flat(loss, target), reduction="none", delta=loss.delta).mean(1)


def _flat(loss: StandardLoss, x: torch.Tensor) -> torch.Tensor:
    """Return x as [batch, outputs]."""
    return x.reshape(-1, loss.outputs)


def example_sums(loss: StandardLoss, outputs: torch.Tensor, target: torch.Tensor, context: Any) -> dict[str, torch.Tensor]:
    """Return further parts of an objective's sums: [batch] each, and the tally's vector."""
    if loss.classes:
        return _of_labels(loss, outputs, target)
    counted = _of_label_sets if loss.name == MULTI_LABEL else _of_numbers
    return counted(_flat(loss, outputs), _flat(loss, target))


def _of_label_sets(logits_bk: torch.Tensor, target_bk: torch.Tensor) -> dict[str, torch.Tensor]:
    predicted_bk, actual_bk = logits_bk > 0, target_bk > 0
    right_bk = predicted_bk == actual_bk
    counted = (predicted_bk & actual_bk, predicted_bk, actual_bk, right_bk, torch.ones_like(right_bk))
    return {name: labels_bk.sum(1) for name, labels_bk in zip(LABEL_COUNTS, counted, strict=True)}


def _of_numbers(outputs_bk: torch.Tensor, target_bk: torch.Tensor) -> dict[str, torch.Tensor]:
    actual_bk = target_bk.double()
    errors_bk = outputs_bk.double() - actual_bk
    parts = dict(zip(ERROR_SUMS, (errors_bk.square().mean(1), errors_bk.abs().mean(1)), strict=True))
    return {**parts, TALLY: torch.cat((errors_bk.square().sum(0), actual_bk.sum(0), actual_bk.square().sum(0)))}


def _of_labels(loss: StandardLoss, outputs: torch.Tensor, y_b: torch.Tensor) -> dict[str, torch.Tensor]:
    margins_b = outputs.reshape(y_b.shape) if loss.name == BINARY else None
    predicted_b = outputs.argmax(1) if margins_b is None else (margins_b > 0).to(y_b.dtype)
    parts, tallies = {"correct": predicted_b == y_b}, []
    if loss.class_weights:
        parts[CLASS_WEIGHTS] = torch.tensor(loss.class_weights, dtype=torch.float64, device=y_b.device)[y_b]
    if loss.classes > TOP:
        parts["in_top"] = _ranks(outputs, y_b) < TOP
    if loss.classes <= MAX_CLASSES:
        unmatched = torch.where(predicted_b == y_b, y_b, 3 * loss.classes)
        tallies.append(_counts(torch.cat((unmatched, loss.classes + predicted_b, 2 * loss.classes + y_b)), 3 * loss.classes))
    if loss.classes == 2:
        margins_b = outputs[:, 1] - outputs[:, 0] if margins_b is None else margins_b
        places_b = torch.nan_to_num(margins_b / (SCORE_SCALE + margins_b.abs()))
        bins_b = ((places_b + 1.0) * (BINS / 2)).long().clamp(0, BINS - 1)
        tallies.append(_counts(y_b * BINS + bins_b, 2 * BINS))
    return {**parts, TALLY: torch.cat(tallies)} if tallies else parts


def _ranks(logits_bk: torch.Tensor, y_b: torch.Tensor) -> torch.Tensor:
    """Return how many classes come before the right one; of equal logits the first leads."""
    right_b1 = logits_bk.gather(1, y_b[:, None])
    earlier_bk = torch.arange(logits_bk.shape[1], device=y_b.device) < y_b[:, None]
    ranks_b: torch.Tensor = ((logits_bk > right_b1) | ((logits_bk == right_b1) & earlier_bk)).sum(1)
    return ranks_b


def _counts(numbers_n: torch.Tensor, size: int) -> torch.Tensor:
    """Return how often each number below `size` occurs, float64 [size]."""
    counts: torch.Tensor = torch.bincount(numbers_n, minlength=size)[:size].double()
    return counts
