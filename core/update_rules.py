"""Which vectors does an update rule keep beside each parameter? Their names are the same in every backend, and in checkpoints."""

from __future__ import annotations

from .job import Job

__all__ = ["FIRST_MOMENT", "MOMENTUM", "SECOND_MOMENT", "slot_names"]

MOMENTUM = "momentum"
"""SGD: the accumulated gradient."""

FIRST_MOMENT, SECOND_MOMENT = "first_moment", "second_moment"
"""Adam and AdamW: the running means of the gradient and of its square."""


def slot_names(job: Job) -> tuple[str, ...]:
    """Return the names of the slots that the job's update rule keeps for each parameter; they start at zero."""
    if job.optimizer == "sgd":
        return (MOMENTUM,) if job.momentum else ()
    return (FIRST_MOMENT, SECOND_MOMENT)
