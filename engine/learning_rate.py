"""The learning rate of each update: a function of epochs (examples seen), after a warm-up over updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from ..core.job import Job
from ..core.learning_rate import base_learning_rate, warms_up_itself

__all__ = ["SCHEDULES", "base_learning_rate", "learning_rates", "refuse_without_width"]


def refuse_without_width(job: Job, width: int | None) -> None:
    """Raise UsageError where a job's schedule needs the width of its model, which has none."""
    if job.schedule == "noam" and width is None:
        raise UsageError(
            f"schedule: got 'noam', whose rate depends on the width of the model, and {job.model!r} has none; "
            f"allowed there: {', '.join(name for name in SCHEDULES if name != 'noam')}. A model says its width in ModelSpec.width."
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
    rates *= SCHEDULES[job.schedule](job, _Course(steps + 1.0, places, places / steps_per_epoch, total_steps, width))
    if job.warmup_steps and not warms_up_itself(job.schedule):
        rates *= np.minimum((steps + 1.0) / job.warmup_steps, 1.0)
    return rates


@dataclass(frozen=True, slots=True)
class _Course:
    """What a schedule's factors follow from: of each update its number from 1, its place in the training in updates and in epochs."""

    updates: NDArray[np.float64]
    places: NDArray[np.float64]
    epochs: NDArray[np.float64]
    total_steps: float
    width: int | None


def _constant(_job: Job, course: _Course) -> NDArray[np.float64]:
    return np.ones_like(course.updates)


def _step(job: Job, course: _Course) -> NDArray[np.float64]:
    factors: NDArray[np.float64] = job.schedule_gamma ** np.floor(course.epochs / job.schedule_step_epochs)
    return factors


def _cosine(_job: Job, course: _Course) -> NDArray[np.float64]:
    factors: NDArray[np.float64] = (1.0 + np.cos(np.pi * np.minimum(course.places / course.total_steps, 1.0))) / 2.0
    return factors


def _noam(job: Job, course: _Course) -> NDArray[np.float64]:
    if course.width is None:
        raise ValueError("schedule noam: the width of the model is needed")
    factors: NDArray[np.float64] = np.minimum(course.updates**-0.5, course.updates * job.warmup_steps**-1.5)
    factors *= job.schedule_coefficient * course.width**-0.5
    return factors


SCHEDULES: Mapping[str, Callable[[Job, _Course], NDArray[np.float64]]] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "noam": _noam,
}
"""From a schedule to what its updates' rates are multiplied by, float64 [count]; `learning_rates` has the formulas."""
