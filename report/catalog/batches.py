"""The size of a batch: in words, where batches are filled by tokens a mean number of sentences; and as updates really have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...records.text.numbers import UNKNOWN, count_text

__all__ = ["batch_text", "examples_of", "real_batch", "train_size"]


def train_size(job: Mapping[str, Any]) -> int | None:
    """Return how many training examples a run has, as its ``job.json`` says; None where it does not."""
    size = ((job.get("dataset") or {}).get("sizes") or {}).get("train")
    return size if isinstance(size, int) and size > 0 else None


def real_batch(job: Mapping[str, Any], batch: int) -> int:
    """Return how many examples the largest update of a batch has: all training examples, where the batch is of more."""
    return min(batch, train_size(job) or batch)


def examples_of(job: Mapping[str, Any], steps: int, batch: int) -> int:
    """Return how many examples so many updates of a batch have: the last one of an epoch has what is left of it."""
    size = train_size(job)
    if size is None or job.get("batch_tokens") is not None:
        return steps * batch
    epochs, rest = divmod(steps, math.ceil(size / batch))
    return epochs * size + rest * batch


def batch_text(count: float | None, tokens: int | None) -> str:
    """Return a batch of so many examples as text; ``about 71 sentences`` where a budget of `tokens` says how many these are."""
    if count is None or tokens is None:
        return UNKNOWN if count is None else count_text(count)
    return f"about {count_text(count)} sentence{'' if round(count) == 1 else 's'}"
