"""Metrics of classifiers."""

from __future__ import annotations

from .base import Metric

__all__ = ["ACCURACY"]

ACCURACY = Metric("accuracy", "accuracy", "higher", lambda sums: sums["correct"] / sums["examples"], bounds=(0.0, 1.0))
"""The share of examples whose largest logit is that of their label."""
