"""When a run ends, evaluates and saves: the number of updates in all, and the updates after which something is due."""

from __future__ import annotations

from ..core.job import DEFAULT_EPOCHS, Job
from ..core.units import Cadence
from .epochs import EpochIndex

__all__ = ["Triggers", "total_steps"]


class Triggers:
    """How many updates a run may take in all (those before it was resumed included), and when evaluations and checkpoints are due."""

    def __init__(self, job: Job, calendar: EpochIndex) -> None:
        self.calendar = calendar
        self.total = total_steps(job, calendar)
        self.evaluations = Cadence.parse(job.eval_every)
        self.checkpoints = Cadence.parse(job.saved_every or "end")

    def next_stop(self, step: int) -> int:
        """Return the first step after `step` at which a plan has to end: an evaluation, a checkpoint, or the last step."""
        due = (_next(cadence, self.calendar, step) for cadence in (self.evaluations, self.checkpoints))
        return min(self.total, *(found for found in due if found is not None), self.total)

    def evaluation_due(self, step: int) -> bool:
        """Return whether an evaluation belongs after `step` updates (by epochs or steps, or at the end)."""
        return step >= self.total or _due(self.evaluations, self.calendar, step)

    def checkpoint_due(self, step: int) -> bool:
        """Return whether a checkpoint belongs after `step` updates (by epochs or steps; the one at the end is another matter)."""
        return _due(self.checkpoints, self.calendar, step)


def total_steps(job: Job, calendar: EpochIndex) -> int:
    """Return after how many updates in all a job ends, unless something ends it before."""
    if job.steps is not None:
        return job.steps
    return calendar.first_step_of(job.epochs or DEFAULT_EPOCHS) if job.examples is None else calendar.steps_until(job.examples)


def _next(cadence: Cadence, calendar: EpochIndex, step: int) -> int | None:
    """Return the first step after `step` that a cadence by epochs or steps names; None for cadences by time and ``end``."""
    every = int(cadence.amount)
    if cadence.unit == "steps":
        return (step // every + 1) * every
    if cadence.unit == "epochs":
        return calendar.first_step_of((calendar.place(step).epoch // every + 1) * every)
    return None


def _due(cadence: Cadence, calendar: EpochIndex, step: int) -> bool:
    if step == 0:
        return False
    if cadence.unit == "steps":
        return step % int(cadence.amount) == 0
    if cadence.unit == "epochs":
        cursor = calendar.cursor(step)
        return cursor.examples == 0 and cursor.epoch % int(cadence.amount) == 0
    return False
