"""The learning rate of each update: a function of epochs (examples seen), after a warm-up over updates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from ..core.learning_rate import base_learning_rate

__all__ = ["base_learning_rate", "learning_rates"]


def learning_rates(
    job: Job,
    first_step: int,
    count: int,
    steps_per_epoch: int,
    total_steps: float,
    positions: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return the learning rates of updates first_step … first_step + count − 1, float64 [count].

    - constant: r
    - step: r · γ^⌊epoch / E⌋
    - cosine: r · (1 + cos(π · t / T)) / 2, with T the planned number of updates
      (Loshchilov and Hutter 2017, one cycle without restart)

    where r is the scaled rate and epoch = t / steps per epoch. During the first `warmup_steps` updates the value is multiplied by
    (t + 1) / warmup_steps.

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
    if job.warmup_steps:
        rates *= np.minimum((steps + 1.0) / job.warmup_steps, 1.0)
    return rates
