"""Plans that the leading tasks are carrying out, and which of their updates are still to be reported; any other report is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Plan, StepResult
from ..core.job import Job
from .loop_interfaces import ImpossibleAnswerError

__all__ = ["OutstandingPlans"]

MOST_COUNT = 2**53
"""Of updates, as records count them."""


@dataclass
class _Pending:
    """A plan on its way: which of its updates have not been reported yet."""

    plan: Plan
    missing: NDArray[np.bool_]


class OutstandingPlans:
    """Keeps each plan of a job until all of its updates have been reported, in any order."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pending: dict[int, _Pending] = {}

    def add(self, plan: Plan) -> None:
        """A plan is being sent."""
        self._pending[plan.first_step] = _Pending(plan, np.ones(plan.count, np.bool_))

    def reported_before(self, step: int) -> bool:
        """Return whether every update before `step` that was sent has been reported."""
        return min(self._pending, default=step) >= step

    def take(self, result: StepResult) -> Plan:
        """Return the plan that a result belongs to; its updates are reported by that.

        Raises ImpossibleAnswerError for what no worker of this run can have done.
        """
        self._expect_sense(result)
        for first, pending in self._pending.items():
            if first <= result.first_step < first + pending.plan.count:
                reported = pending.missing[result.first_step - first : result.first_step - first + result.count]
                if len(reported) != result.count or not reported.all():
                    break
                reported[:] = False
                if not pending.missing.any():
                    del self._pending[first]
                return pending.plan
        raise ImpossibleAnswerError(f"{result.count} steps from step {result.first_step} on, which are not outstanding")

    def _expect_sense(self, result: StepResult) -> None:
        """Raise ImpossibleAnswerError for a result that has no steps, more examples than its batches, or not what its mode has."""
        job = self._job
        sync = job.mode == "sync"
        batch = job.global_batch if sync else job.per_worker_batch
        if not 1 <= result.count <= result.examples <= result.count * batch:
            raise ImpossibleAnswerError(f"{result.examples} examples in {result.count} steps, with batches of {batch}")
        if (result.worker is None) != sync or (result.staleness is None) != sync:
            raise ImpossibleAnswerError(f"steps with a worker or staleness, or without, in {job.mode} mode")
        if result.worker is not None and result.worker >= job.workers:
            raise ImpossibleAnswerError(f"steps of worker {result.worker}, of {job.workers}")
        if result.staleness is not None and (
            len(result.staleness) != result.count or result.staleness.min() < 0 or result.staleness.max() > MOST_COUNT
        ):
            raise ImpossibleAnswerError(f"{result.count} steps whose staleness is not a count for each")
