"""What TensorBoard and MLflow get to draw and compare: curves of fewer points than the records, and a run's settings and final figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ...core.job import Job
from ..schema import StepRecord

__all__ = ["END_FIGURES", "NOT_SETTINGS", "Spacing", "TrainingCurve", "end_figures", "settings"]

POINTS_PER_SPACING = 1000
"""After this many points their distance in time doubles: a run of any length stays drawable."""

NOT_SETTINGS = ("out", "name", "mlflow", "mlflow_experiment")
"""Fields of the job that say where it is written down, and nothing of what is done."""

END_FIGURES = ("examples_per_second", "time_to_target_seconds", "run_seconds", "final_train_loss")
"""Figures of the summary that are points of their own, ``summary/…``: the curves do not show them.

Which updates the last point of ``train/loss`` covers depends on time; those of `final_train_loss` are the same in two equal runs.
"""


class Spacing:
    """Keeps points apart in time: at first by `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._points = 0

    def over(self, since_seconds: float, now_seconds: float) -> bool:
        """Return whether a point may follow one at `since_seconds`."""
        return now_seconds - since_seconds >= self.seconds

    def count(self) -> None:
        """A point has been made."""
        self._points += 1
        if self._points % POINTS_PER_SPACING == 0:
            self.seconds *= 2


class TrainingCurve:
    """Training records on their way to a point: at first at most one each `spacing_seconds`."""

    def __init__(self, spacing_seconds: float) -> None:
        self.updates = 0
        self._spacing = Spacing(spacing_seconds)
        self._updates_here = 0
        self._timed_updates = self._examples = 0
        self._profile_seconds = 0.0
        self._loss_sum = 0.0
        self._since: float | None = None
        self._learning_rate = math.nan

    def add(self, record: StepRecord) -> dict[str, float] | None:
        """Take a record in; return a point's values by tag when one is due, at `updates`.

        Loss and speeds are those of the updates since the point before, speeds of those that were not profiled; the learning rate is the
        last one.
        """
        if self._since is None:
            self._since = record.time_seconds - (record.seconds if record.profiled_seconds is None else record.profiled_seconds)
        self.updates += record.count
        self._updates_here += record.count
        if record.profiled_seconds is None:
            self._timed_updates += record.count
            self._examples += record.examples
        else:
            self._profile_seconds += record.profiled_seconds
        self._loss_sum += sum(record.losses)
        self._learning_rate = record.learning_rates[-1] if record.learning_rates else math.nan
        return self._point(record.time_seconds) if self._spacing.over(self._since, record.time_seconds) else None

    def rest(self, now: float) -> dict[str, float] | None:
        """Return the last point, of what no point shows yet."""
        return self._point(now) if self._updates_here else None

    def _point(self, now: float) -> dict[str, float]:
        values = {"train/loss": self._loss_sum / self._updates_here, "train/learning_rate": self._learning_rate}
        elapsed = now - (self._since if self._since is not None else now) - self._profile_seconds
        if elapsed > 0 and self._timed_updates:
            values["train/steps_per_second"] = self._timed_updates / elapsed
            values["train/examples_per_second"] = self._examples / elapsed
        self._updates_here, self._timed_updates, self._examples, self._loss_sum, self._since = 0, 0, 0, 0.0, now
        self._profile_seconds = 0.0
        self._spacing.count()
        return values


def end_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the `END_FIGURES` that the summary has, by tag."""
    return {f"summary/{name}": float(summary[name]) for name in END_FIGURES if summary.get(name) is not None}


def settings(job: Job, without: Collection[str] = NOT_SETTINGS) -> dict[str, bool | int | float | str | None]:
    """Return the job's fields as single values, save those in `without`; and what follows from them.

    ``batch_size`` and ``global_batch_size`` are those that the run has, however they were given, unless its batches are filled by tokens;
    ``workers`` is how many compute. A field
    of several values is one text with commas; None is what was not set.
    """
    values = {name: value for name, value in job.model_dump(mode="json").items() if name not in without}
    if job.batch_tokens is None:
        values |= {"batch_size": job.per_worker_batch, "global_batch_size": job.global_batch}
    values["workers"] = job.workers
    if job.mode == "sync":
        values["ps"] = None
    return {name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in values.items()}
