"""Metrics of classifiers and regressions, from counts and sums over examples.

A metric of non-finite outputs, of which the loss is not finite either, is NaN, and so is one that the examples leave undefined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from .base import Metric

Sums = Mapping[str, float]
TOP = 5
MAX_CLASSES = 300  # of a macro-averaged F1, and outputs of an R²: three sums each
BINS = 480  # of scores per class, for the area under the ROC curve


def class_counts(classes: int) -> tuple[str, ...]:
    """Return the sums of `macro_f1`: for each class right, predicted and actual examples."""
    return tuple(f"{what}_{number}" for what in ("right", "predicted", "actual") for number in range(classes))


SCORE_COUNTS = tuple(f"{what}_scores_{number}" for what in ("negative", "positive") for number in range(BINS))
"""The sums of `AUC`: examples of either class by bin of their score, ascending."""

LABEL_COUNTS = ("right_positives", "predicted_positives", "actual_positives", "right_labels", "labels")
"""The sums of `MULTI_LABEL`."""

ERROR_SUMS = ("squared_error", "absolute_error")
"""The sums of `RMSE` and `MAE`: each example's mean over its outputs."""


def output_sums(outputs: int) -> tuple[str, ...]:
    """Return the sums of `r_squared`: for each output Σ(ŷ − y)², Σy and Σy²."""
    return tuple(f"{what}_{number}" for what in ("residual", "target", "target_square") for number in range(outputs))


def _finite(value: Callable[[Sums], float]) -> Callable[[Sums], float]:
    return lambda sums: value(sums) if math.isfinite(sums["loss_sum"]) else math.nan


def _share(part: str, whole: str, sums: Sums) -> float:
    return sums[part] / sums[whole]


def _f1(right: float, predicted: float, actual: float) -> float:
    return 2.0 * right / (predicted + actual) if predicted + actual else math.nan


def _macro_f1(classes: int, sums: Sums) -> float:
    scores = [_f1(*(sums[f"{what}_{number}"] for what in ("right", "predicted", "actual"))) for number in range(classes)]
    known = [score for score in scores if not math.isnan(score)]
    return math.fsum(known) / len(known) if known else math.nan


def _auc(sums: Sums) -> float:
    below = wins = 0.0
    for number in range(BINS):
        negatives, positives = sums[f"negative_scores_{number}"], sums[f"positive_scores_{number}"]
        wins += positives * (below + negatives / 2)
        below += negatives
    pairs = below * math.fsum(sums[f"positive_scores_{number}"] for number in range(BINS))
    return wins / pairs if pairs else math.nan


def _r_squared(outputs: int, sums: Sums) -> float:
    count, shares = sums["examples"], []
    for number in range(outputs):
        residual, total, squares = (sums[f"{what}_{number}"] for what in ("residual", "target", "target_square"))
        spread = squares - total * total / count
        shares.append(1.0 - residual / spread if spread > 0 else math.nan)
    return math.fsum(shares) / outputs


def _metric(name: str, label: str, value: Callable[[Sums], float], *, higher: bool, bounds: tuple[float, float]) -> Metric:
    return Metric(name, label, "higher" if higher else "lower", _finite(value), bounds)


def macro_f1(classes: int) -> Metric:
    """Return the mean over classes of F1 = 2 · right / (predicted + actual), of `class_counts`.

    Classes without any example or prediction are left out, as by scikit-learn.
    """
    return _metric("f1", "F1", partial(_macro_f1, classes), higher=True, bounds=(0.0, 1.0))


def r_squared(outputs: int) -> Metric:
    """Return the mean over outputs of R² = 1 − Σ(ŷ − y)² / Σ(y − ȳ)², of `output_sums`."""
    return _metric("r2", "R²", partial(_r_squared, outputs), higher=True, bounds=(-math.inf, 1.0))


TOP_ACCURACY = _metric(f"top{TOP}_accuracy", f"top-{TOP} accuracy", partial(_share, "in_top", "examples"), higher=True, bounds=(0.0, 1.0))
AUC = _metric("auc", "AUC", _auc, higher=True, bounds=(0.0, 1.0))
"""Area under the ROC curve: the share of pairs of a positive and a negative in which the positive has the higher score.

Pairs within a bin count half, so the value is wrong by at most half the share of the pairs whose scores share a bin.
"""
MULTI_LABEL = (
    _metric("f1", "F1", lambda sums: _f1(*(sums[name] for name in LABEL_COUNTS[:3])), higher=True, bounds=(0.0, 1.0)),
    _metric("label_accuracy", "label accuracy", partial(_share, "right_labels", "labels"), higher=True, bounds=(0.0, 1.0)),
)
"""F1 over all labels of all examples (micro), and the share of labels that are right."""
RMSE = _metric("rmse", "RMSE", lambda sums: math.sqrt(sums["squared_error"] / sums["examples"]), higher=False, bounds=(0.0, math.inf))
MAE = _metric("mae", "MAE", partial(_share, "absolute_error", "examples"), higher=False, bounds=(0.0, math.inf))
