"""Learning-rate schedules.

The name, formula, description and settings of each are one `Schedule` in `SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # numpy takes long to import, and the job needs the names alone
    import numpy as np
    from numpy.typing import NDArray


class _Job(Protocol):
    """The fields of a `core.job.Job` that schedules read.

    The job imports this module for their names.
    """

    @property
    def schedule_step_epochs(self) -> float: ...
    @property
    def schedule_gamma(self) -> float: ...
    @property
    def schedule_coefficient(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates whose learning rates are requested; arrays are float64 [count]."""

    numbers: NDArray[np.float64]  # from 1
    positions: NDArray[np.float64]  # in the training, in updates
    epochs: NDArray[np.float64]  # positions in epochs
    total_steps: float  # planned updates
    width: int | None  # of the model


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning-rate schedule: its formula, its description and its settings."""

    factors: Callable[[_Job, Updates], NDArray[np.float64] | float]  # multipliers of the base rate: a number, or float64 [count]
    describe: Callable[[_Job, str, int | None], str]  # from job, base rate and planned updates (None: unknown)
    settings: tuple[str, ...] = ()  # fields of the job that only this schedule reads
    has_warmup: bool = False  # its formula includes the warm-up
    needs_width: bool = False  # of the model
    ends_with_training: bool = False  # its rates depend on the planned number of updates


def _step_factors(job: _Job, updates: Updates) -> NDArray[np.float64]:
    import numpy as np

    return np.asarray(job.schedule_gamma ** np.floor(updates.epochs / job.schedule_step_epochs))


def _describe_step(job: _Job, base: str, _total_steps: int | None) -> str:
    every = "epoch" if job.schedule_step_epochs == 1 else f"{job.schedule_step_epochs:g} epochs"
    return f"step decay (--schedule step) from {base}, times {job.schedule_gamma:g} every {every}"


def _cosine_factors(_job: _Job, updates: Updates) -> NDArray[np.float64]:
    import numpy as np

    return np.asarray((1.0 + np.cos(np.pi * np.minimum(updates.positions / updates.total_steps, 1.0))) / 2.0)


def _describe_cosine(_job: _Job, base: str, total_steps: int | None) -> str:
    until = "the planned last update" if total_steps is None else f"the planned last update, {total_steps:,}"
    return f"cosine decay (--schedule cosine) from {base} to 0 at {until}"


def _noam_factors(job: _Job, updates: Updates) -> NDArray[np.float64]:
    import numpy as np

    if updates.width is None:
        raise ValueError("schedule noam: the width of the model is needed")
    factors: NDArray[np.float64] = np.minimum(updates.numbers**-0.5, updates.numbers * job.warmup_steps**-1.5)
    factors *= job.schedule_coefficient * updates.width**-0.5
    return factors


def _describe_noam(job: _Job, base: str, _total_steps: int | None) -> str:
    return (
        f"linear warm-up over the first {job.warmup_steps:,} updates (--schedule noam, --warmup-steps), then inverse-square-root decay; "
        f"{base} is multiplied by {job.schedule_coefficient:g} and divided by the square root of the model's width"
    )


SCHEDULES: Mapping[str, Schedule] = {
    "constant": Schedule(lambda job, updates: 1.0, lambda job, base, total_steps: f"constant {base}"),
    "step": Schedule(_step_factors, _describe_step, ("schedule_step_epochs", "schedule_gamma")),
    "cosine": Schedule(_cosine_factors, _describe_cosine, ends_with_training=True),
    "noam": Schedule(_noam_factors, _describe_noam, ("schedule_coefficient",), has_warmup=True, needs_width=True),
}
"""By name; the docstring of `core.update_rules.learning_rates` has the formulas and their sources."""


def schedules_with(setting: str) -> tuple[str, ...]:
    """Return the names of the schedules that read a field of the job."""
    return tuple(name for name, schedule in SCHEDULES.items() if setting in schedule.settings)
