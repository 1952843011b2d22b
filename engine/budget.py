"""How much a run may train, and where on the way it evaluates."""

from __future__ import annotations

from ..core.job import DEFAULT_EPOCHS, Job
from ..core.units import Cadence

__all__ = ["Budget"]


class Budget:
    """How many updates a run may take, and where within them an evaluation is due."""

    def __init__(self, job: Job, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.total = job.steps if job.steps is not None else (job.epochs or DEFAULT_EPOCHS) * steps_per_epoch
        self.cadence = Cadence.parse(job.eval_every)

    def next_evaluation(self, step: int) -> int:
        """Return the first step after `step` at which a cadence by epochs or steps asks for an evaluation, or the last step."""
        if self.cadence.unit == "epochs":
            every = int(self.cadence.amount) * self.steps_per_epoch
        elif self.cadence.unit == "steps":
            every = int(self.cadence.amount)
        else:
            return self.total
        return min((step // every + 1) * every, self.total)
