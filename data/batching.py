"""How an epoch's order is cut into steps.

A rule cuts the examples that are left of an epoch into consecutive batches and drops none. How many there are may differ from epoch to
epoch, where batches are filled by the weight of their examples; epochs, not steps, then say where a training stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import split_evenly
from ..core.job import Job

__all__ = ["BatchRule", "Bounds", "FixedCount", "Indices", "batch_rule"]

Indices = NDArray[np.int32]
Bounds = NDArray[np.int64]
"""Where each step begins, in examples of the epoch, and at last where the epoch ends: strictly rising, int64 [steps + 1]."""


class BatchRule(Protocol):
    """What a step's examples are: in sync mode those of all workers together, in async mode those of one worker."""

    @property
    def by_count(self) -> bool:
        """Whether only the number of examples matters, so that every epoch is cut alike."""
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

    def cut(self, order: Indices, skip: int) -> Bounds:
        """Return the bounds of the steps; see `BatchRule.cut`."""
        size = len(order)
        starts = np.arange(skip, size, self.global_batch, dtype=np.int64)
        if self.mode == "async":
            within = np.array([start for start, stop in split_evenly(self.global_batch, self.workers) if stop > start], dtype=np.int64)
            starts = (starts[:, None] + within[None, :]).ravel()
            starts = starts[starts < size]
        return np.append(starts, size)


def batch_rule(job: Job) -> BatchRule:
    """Return how a job's epochs are cut into steps."""
    return FixedCount(job.global_batch, job.workers, job.mode)
