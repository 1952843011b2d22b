"""Metrics of classifiers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .base import Metric

__all__ = ["ACCURACY"]


def _accuracy(sums: Mapping[str, float]) -> float:
    return sums["correct"] / sums["examples"] if math.isfinite(sums["loss_sum"]) else math.nan


ACCURACY = Metric("accuracy", "accuracy", "higher", _accuracy, bounds=(0.0, 1.0))
"""The share of examples whose largest logit is that of their label. Of logits that are not finite none is known to be the largest: NaN."""
