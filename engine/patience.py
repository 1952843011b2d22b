"""Ends a run that does not get better: ``--patience N`` evaluations in a row without a better value of its figure.

The figure is that of ``--keep-best``, or the model's first metric. A run that is resumed counts on from its records.
"""

from __future__ import annotations

from ..core.job import Job
from ..metrics.ranking import Improvements
from ..models.objectives import Objective
from ..records.schema import EvalRecord
from .loop_interfaces import Recorder, ResumePoint
from .progress.base import Progress

__all__ = ["Patience"]


class Patience:
    """Counts a run's evaluations, tells when they were too many, and records why that ended it."""

    def __init__(self, job: Job, objective: Objective, start: ResumePoint, recorder: Recorder, progress: Progress) -> None:
        self._limit, self._recorder, self._progress = job.patience, recorder, progress
        info = objective.info(job.keep_best) if job.keep_best else objective.infos[0]
        self._found = Improvements(info, ((record.step, record.figure(info.name)) for record in start.evaluations))

    @property
    def limited(self) -> bool:
        """Whether an evaluation may end the run."""
        return self._limit > 0

    def evaluated(self, record: EvalRecord) -> bool:
        """Take an evaluation; return whether it is the one that ends the run."""
        found, info = self._found, self._found.info
        found.add(record.step, record.figure(info.name))
        if not self.limited or found.since < self._limit:
            return False
        detail = {"best": found.best, "best_step": found.best_step, "evaluations": found.since}
        self._recorder.event("patience_exhausted", metric=info.name, step=record.step, **detail)
        so_many = "1 evaluation" if found.since == 1 else f"{found.since} evaluations in a row"
        self._progress.message(f"stopping: {so_many} without a better {info.label} (--patience {self._limit})")
        return True
