"""The learning rate of each update: a function of epochs (examples seen), after a warm-up over updates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from ..core.job import Job
from ..core.learning_rate import base_learning_rate, warms_up_itself

__all__ = ["base_learning_rate", "learning_rates", "refuse_without_width"]


def refuse_without_width(job: Job, width: int | None) -> None:
    """Raise UsageError where a job's schedule needs the width of its model, which has none."""
    if job.schedule == "noam" and width is None:
        raise UsageError(
            f"schedule: got 'noam', whose rate depends on the width of the model, and {job.model!r} has none; "
            "allowed there: constant, step, cosine. A model says its width in ModelSpec.width."
        )


def learning_rates(
    job: Job,
    first_step: int,
    count: int,
    steps_per_epoch: int,
    total_steps: float,
    positions: NDArray[np.float64] | None = None,
    width: int | None = None,
) -> NDArray[np.float64]:
    """Return the learning rates of updates first_step … first_step + count − 1, float64 [count].

    - constant: r
    - step: r · γ^⌊epoch / E⌋
    - cosine: r · (1 + cos(π · t / T)) / 2, with T the planned number of updates
      (Loshchilov and Hutter 2017, one cycle without restart)

    - noam: r · c · d^−½ · min(s^−½, s · w^−³ᐟ²), by updates s = t + 1 from the start of the run, with c `schedule_coefficient`, d the
      model's `width` and w `warmup_steps` (Vaswani et al. 2017, "Attention Is All You Need", section 5.3)

    where r is the scaled rate and epoch = t / steps per epoch. During the first `warmup_steps` updates the value of the other schedules is
    multiplied by (t + 1) / warmup_steps.

    `positions` float64 [count] are the updates' places t in the training where those are not their numbers: in a run that was resumed
    with another batch size (`EpochIndex.positions`). `total_steps` is counted as they are. The warm-up always counts updates.
    """
    steps = np.arange(first_step, first_step + count, dtype=np.float64)
    places = steps if positions is None else positions
    rates = np.full(count, base_learning_rate(job))
    if job.schedule == "step":
        rates *= job.schedule_gamma ** np.floor(places / steps_per_epoch / job.schedule_step_epochs)
    elif job.schedule == "cosine":
        rates *= (1.0 + np.cos(np.pi * np.minimum(places / total_steps, 1.0))) / 2.0
    elif job.schedule == "noam":
        if width is None:
            raise ValueError("schedule noam: the width of the model is needed")
        updates = steps + 1.0
        rates *= job.schedule_coefficient * width**-0.5
        rates *= np.minimum(updates**-0.5, updates * job.warmup_steps**-1.5)
    if job.warmup_steps and not warms_up_itself(job.schedule):
        rates *= np.minimum((steps + 1.0) / job.warmup_steps, 1.0)
    return rates
