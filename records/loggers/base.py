"""Interface and common parts of loggers (TensorBoard, MLPerf's log, MLflow)."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from ...core.job import Job
from ...core.setting import Role
from ...core.settings.job_fields import fields_with_role
from ..store.run_directory import RunReader
from ..store.schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from ..time_shares import resumed_seconds, with_segments


class RunLogger:
    """Receiver of records; methods must return quickly and may be called from any thread."""

    def step(self, record: StepRecord) -> None:
        """Log a group of updates."""

    def evaluation(self, record: EvalRecord) -> None:
        """Log an evaluation."""

    def event(self, record: EventRecord) -> None:
        """Log an event."""

    def system(self, record: SystemRecord) -> None:
        """Log a sample of a node."""

    def on_replayed(self) -> None:
        """Note that the replay of a resumed run is complete."""

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """Log the end of the run; `summary` is None where it never trained."""

    def close(self) -> None:
        """Close the logger; a second call does nothing."""


def replay(reader: RunReader, logger: RunLogger) -> None:
    """Replay the records of a resumed run to a logger of curves."""
    for group in reader.steps():
        logger.step(group)
    for evaluation in reader.evals():
        logger.evaluation(evaluation)
    for sample in with_segments(reader.system(), resumed_seconds(reader.job())):
        logger.system(sample)
    logger.on_replayed()


POINTS_PER_SPACING = 1000  # after this many points their spacing doubles, which bounds their number
# Points ``summary/…``; `final_train_loss` is equal in equal runs, unlike the last ``train/loss``, which depends on time.
END_FIGURES = ("examples_per_second", "time_to_target_seconds", "run_seconds", "final_train_loss")


class Spacing:
    """Spacing of points in time, `seconds` at first."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._points = 0

    def is_due(self, since_seconds: float, now_seconds: float) -> bool:
        """Return whether a point may follow one at `since_seconds`."""
        return now_seconds - since_seconds >= self.seconds

    def count(self) -> None:
        """Count a point."""
        self._points += 1
        if self._points % POINTS_PER_SPACING == 0:
            self.seconds *= 2


class TrainingCurve:
    """Points of the training records, at most one per `spacing_seconds` at first."""

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
        """Add a record; return a due point's values by tag.

        They are over the updates since the last point; speeds are without profiled ones.
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
        return self._point(record.time_seconds) if self._spacing.is_due(self._since, record.time_seconds) else None

    def rest(self, now: float) -> dict[str, float] | None:
        """Return the last point of the remaining updates, if any."""
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


class CurveLogger(RunLogger):
    """Thread-safe logger of points by tag and step.

    `_add` writes some at a time on the run clock, with the lock held.
    """

    def __init__(self, spacing_seconds: float, zero_unix_seconds: float | None) -> None:
        """Until `on_replayed` times are on the run clock since `zero_unix_seconds`, if given."""
        self._zero = zero_unix_seconds
        self._lock = threading.Lock()
        self._curve = TrainingCurve(spacing_seconds)
        self._time_seconds = 0.0

    @abstractmethod
    def _add(self, values: Mapping[str, float], step: int, time_seconds: float) -> None:
        """Write points."""

    def step(self, record: StepRecord) -> None:
        """Log the due points of the training, at first at the spacing, later fewer."""
        with self._lock:
            self._time_seconds = record.time_seconds
            values = self._curve.add(record)
            if values is not None:
                self._add(values, self._curve.updates, record.time_seconds)

    def evaluation(self, record: EvalRecord) -> None:
        """Log `evaluation_points`."""
        with self._lock:
            self._add(evaluation_points(record), record.step, record.time_seconds)

    def on_replayed(self) -> None:
        """Use the current time for later points."""
        with self._lock:
            self._zero = None

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """Log the rest of the curve, and ``summary/…``."""
        with self._lock:
            self._finish_curve()
            self._add(end_figures(summary or {}), self._curve.updates, self._time_seconds)

    def _finish_curve(self) -> None:
        self._add(self._curve.rest(self._time_seconds) or {}, self._curve.updates, self._time_seconds)

    def _unix_seconds(self, time_seconds: float) -> float:
        return time.time() if self._zero is None else self._zero + time_seconds


def evaluation_points(record: EvalRecord) -> dict[str, float]:
    """Return ``eval/loss`` and each metric (of another split than test: ``eval/<split>/…``)."""
    prefix = "eval" if record.split == "test" else f"eval/{record.split}"
    return {f"{prefix}/{name}": value for name, value in (("loss", record.loss), *record.metrics.items())}


def end_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the summary's `END_FIGURES` by tag."""
    return {f"summary/{name}": float(summary[name]) for name in END_FIGURES if summary.get(name) is not None}


def settings(job: Job, *without: Role) -> dict[str, bool | int | float | str | None]:
    """Return the job's fields as single values, without destinations and these roles.

    Lists are texts with commas.
    """
    left_out = fields_with_role("destination", *without)
    values = {name: value for name, value in job.model_dump(mode="json").items() if name not in left_out}
    if job.batch_tokens is None:
        values |= {"batch_size": job.per_worker_batch, "global_batch_size": job.global_batch}
    values["workers"] = job.workers
    if job.mode == "sync":
        values["ps"] = None
    return {name: ",".join(map(str, value)) if isinstance(value, list) else value for name, value in values.items()}
