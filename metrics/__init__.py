"""How do the sums of an evaluation become figures, and which of two figures is the better one?"""

from .base import LOSS, Better, Metric, MetricInfo

__all__ = ["LOSS", "Better", "Metric", "MetricInfo"]
