"""What ``job.json`` says of a run's metrics, so that readers need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import LOSS, MetricInfo
from .classification import ACCURACY

__all__ = ["described_metrics", "read_metrics", "read_translation_metrics"]


def described_metrics(infos: Sequence[MetricInfo]) -> list[dict[str, str]]:
    """Return metrics as ``job.json`` lists them, the headline first; the loss, which every run has, is left out."""
    return [{"name": info.name, "label": info.label, "better": info.better} for info in infos if info != LOSS]


def read_metrics(job: Mapping[str, Any]) -> tuple[MetricInfo, ...]:
    """Return the metrics of a run from its ``job.json``, the headline first and the loss last. Older runs have the accuracy alone."""
    listed = job.get("metrics")
    if listed is None:
        return ACCURACY.info, LOSS
    return (*(MetricInfo(one["name"], one["label"], one["better"]) for one in listed), LOSS)


def read_translation_metrics(job: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of those metrics of a run that come from translations; none where nothing is translated.

    ``job.json`` of older runs does not list them: there they are BLEU, chrF and the share of exact matches.
    """
    listed = job.get("translation_metrics")
    if listed is None and job.get("translation_signatures"):
        from .language import NAMES  # with numpy, which a list of runs does without

        listed = NAMES
    return frozenset(listed or ()) & {info.name for info in read_metrics(job)}
