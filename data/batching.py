"""How an epoch's order is cut into steps.

A rule cuts the examples that are left of an epoch into consecutive batches and drops none. How many there are may differ from epoch to
epoch, where batches are filled by the weight of their examples; epochs, not steps, then say where a training stands.

A rule with `BatchRule.buckets` puts examples of like length together first (`bucketing`). What the order of an epoch is follows then from
its seed and from `Arranged`: after how many examples of it which buckets came into force. A run that goes on within an epoch in
other batches leaves what was consumed as it was, and arranges the rest of the order that it had until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import split_evenly
from ..core.job import Job

__all__ = ["Arranged", "BatchRule", "Bounds", "BucketedTokens", "FixedCount", "Indices", "TokenBudget", "batch_rule"]

Indices = NDArray[np.int32]
Bounds = NDArray[np.int64]
"""Where each step begins, in examples of the epoch, and at last where the epoch ends: strictly rising, int64 [steps + 1]."""


Arranged = tuple[tuple[int, int, int], ...]
"""Of an epoch's order: after how many of its examples which budget came into force, (examples, tokens, batches), in that order.

The budget (0, 0) leaves the order that there is. Empty where the order is the epoch's permutation.
"""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """What a step of a bucket is filled with: `batches` batches, each of at most `tokens` tokens, padding included.

    They are all that are computed at once: of each worker of the step as many as it has micro-batches.
    """

    tokens: int
    batches: int


class BatchRule(Protocol):
    """What a step's examples are: in sync mode those of all workers together, in async mode those of one worker."""

    @property
    def mode(self) -> Literal["sync", "async"]:
        """Whether the workers share a step, or each takes one."""
        ...

    @property
    def by_count(self) -> bool:
        """Whether only the number of examples matters, so that every epoch is cut alike."""
        ...

    @property
    def buckets(self) -> TokenBudget | None:
        """With what steps of examples of like length are filled; None where the order stays as it is, and `cut` cuts it."""
        ...

    def cut(self, order: Indices, skip: int) -> Bounds:
        """Return the bounds of the steps of an epoch in this order, of which the first `skip` examples are done: from `skip` to the end.

        With `by_count`, the order's length alone may be looked at.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedCount:
    """The same number of examples in each step but the last.

    `global_batch` is that of all workers together; in async mode each worker's part of it is a step.
    """

    global_batch: int
    workers: int
    mode: Literal["sync", "async"]

    @property
    def by_count(self) -> bool:
        """Only the number of examples matters."""
        return True

    @property
    def buckets(self) -> TokenBudget | None:
        """The order stays as it is."""
        return None

    def cut(self, order: Indices, skip: int) -> Bounds:
        """Return the bounds of the steps; see `BatchRule.cut`."""
        size = len(order)
        starts = np.arange(skip, size, self.global_batch, dtype=np.int64)
        if self.mode == "async":
            within = np.array([start for start, stop in split_evenly(self.global_batch, self.workers) if stop > start], dtype=np.int64)
            starts = (starts[:, None] + within[None, :]).ravel()
            starts = starts[starts < size]
        return np.append(starts, size)


@dataclass(frozen=True, slots=True)
class BucketedTokens:
    """Steps of examples of like length, with about as many tokens in each.

    `tokens` is what a worker computes at once at most, unless a single example has more. Its batch of a step is `micro_batches` of that,
    of one bucket, so that `Batches.in_micro_batches` cuts them by their number and each keeps to the budget. In sync mode a step has the
    batches of all `workers`, in async mode that of one.
    """

    tokens: int
    workers: int
    mode: Literal["sync", "async"]
    micro_batches: int = 1

    @property
    def by_count(self) -> bool:
        """Lengths matter."""
        return False

    @property
    def buckets(self) -> TokenBudget | None:
        """See `BatchRule.buckets`."""
        return TokenBudget(self.tokens, self.micro_batches * (self.workers if self.mode == "sync" else 1))

    def cut(self, order: Indices, skip: int) -> Bounds:
        """Raise ValueError: the steps follow from the buckets."""
        raise ValueError("batches by tokens are cut as they are arranged")


def batch_rule(job: Job) -> BatchRule:
    """Return how a job's epochs are cut into steps."""
    if job.batch_tokens is not None:
        return BucketedTokens(job.batch_tokens, job.workers, job.mode, job.accumulate)
    return FixedCount(job.global_batch, job.workers, job.mode)
