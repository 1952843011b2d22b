"""How sums of an evaluation become metrics, and which of two values is better."""

from .base import LOSS, Better, Metric, MetricInfo

__all__ = ["LOSS", "Better", "Metric", "MetricInfo"]
