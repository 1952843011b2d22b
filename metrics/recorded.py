"""What ``job.json`` says of a run's metrics, so that readers need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import LOSS, MetricInfo
from .classification import ACCURACY

__all__ = ["described_metrics", "read_metrics"]


def described_metrics(infos: Sequence[MetricInfo]) -> list[dict[str, str]]:
    """Return metrics as ``job.json`` lists them, the headline first; the loss, which every run has, is left out."""
    return [{"name": info.name, "label": info.label, "better": info.better} for info in infos if info != LOSS]


def read_metrics(job: Mapping[str, Any]) -> tuple[MetricInfo, ...]:
    """Return the metrics of a run from its ``job.json``, the headline first and the loss last. Older runs have the accuracy alone."""
    listed = job.get("metrics")
    if listed is None:
        return ACCURACY.info, LOSS
    return (*(MetricInfo(one["name"], one["label"], one["better"]) for one in listed), LOSS)
