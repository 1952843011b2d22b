"""TensorBoard event files, derived from the records for looking at; never the source of a figure.

They are written by the tensorboard package's own writer. torch's wrapper of it would import tensorflow where that is installed, and
so would tensorboard itself at the first write; see `_without_tensorflow`.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .nodes import rise_per_second
from .records import EvalRecord, StepRecord, SystemRecord

__all__ = ["FOLDER", "TensorBoardWriter"]

FOLDER = "tensorboard"
"""The folder of a run directory that holds the event file."""

_POINTS_PER_SPACING = 1000
"""After this many points of the training curves their distance in time doubles: a run of any length stays drawable."""

_FIRST_SPACING_SECONDS = 0.1

_FLUSH_SECONDS = 5


def _without_tensorflow() -> None:
    """Make tensorboard use its own file functions.

    It asks for tensorflow unless a module of this name exists, which is how builds of tensorboard without tensorflow say so.
    """
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))


class _Curve:
    """Training records on their way to a point: at most one point each `spacing` seconds."""

    def __init__(self) -> None:
        self.spacing = _FIRST_SPACING_SECONDS
        self._points = 0
        self._updates = 0
        self._loss_sum = 0.0
        self._since: float | None = None
        self._learning_rate = math.nan

    def add(self, record: StepRecord) -> dict[str, float] | None:
        """Take a record in; return a point's values by tag when one is due.

        The loss is the mean over the updates since the point before; the learning rate is the last one.
        """
        if self._since is None:
            self._since = record.time_seconds - record.seconds
        self._updates += record.count
        self._loss_sum += sum(record.losses)
        self._learning_rate = record.learning_rates[-1] if record.learning_rates else math.nan
        if record.time_seconds - self._since < self.spacing:
            return None
        return self._point(record.time_seconds)

    def rest(self, now: float) -> dict[str, float] | None:
        """Return the last point, of what no point shows yet."""
        return self._point(now) if self._updates else None

    def _point(self, now: float) -> dict[str, float]:
        values = {"train/loss": self._loss_sum / self._updates, "train/learning_rate": self._learning_rate}
        elapsed = now - (self._since if self._since is not None else now)
        if elapsed > 0:
            values["train/steps_per_second"] = self._updates / elapsed
        self._updates, self._loss_sum, self._since = 0, 0.0, now
        self._points += 1
        if self._points % _POINTS_PER_SPACING == 0:
            self.spacing *= 2
        return values


class TensorBoardWriter:
    """Writes a run's event file into ``tensorboard/`` of the run directory `path`; methods may be called from several threads.

    The step axis counts updates in ``train/`` and ``eval/``, and milliseconds of the run clock in ``system/``.
    """

    def __init__(self, path: Path, zero_unix_seconds: float | None = None) -> None:
        """Open a new event file. Where `zero_unix_seconds` is given, records carry the wall time at which they were made.

        That is their time on the run clock after `zero_unix_seconds`: for records that are written again when a run is resumed.
        """
        self._zero = zero_unix_seconds
        _without_tensorflow()
        events: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._file: Any = events.EventFileWriter(str(path / FOLDER), flush_secs=_FLUSH_SECONDS)
        self._lock = threading.Lock()
        self._curve = _Curve()
        self._updates = 0
        self._time_seconds = 0.0
        self._traffic: dict[int, SystemRecord] = {}
        self._closed = False

    def step(self, record: StepRecord) -> None:
        """Take in a step record; about ten points a second are written at first, fewer in a long run."""
        with self._lock:
            self._updates += record.count
            self._time_seconds = record.time_seconds
            values = self._curve.add(record)
            if values is not None:
                self._write(self._updates, values, record.time_seconds)

    def evaluation(self, record: EvalRecord) -> None:
        """Write ``eval/loss`` and ``eval/accuracy`` (of another split than test: ``eval/<split>/…``)."""
        prefix = "eval" if record.split == "test" else f"eval/{record.split}"
        with self._lock:
            self._write(record.step, {f"{prefix}/loss": record.loss, f"{prefix}/accuracy": record.accuracy}, record.time_seconds)

    def system(self, record: SystemRecord) -> None:
        """Write ``system/node<i>/…`` of a sample within the run clock; what was not observed is left out."""
        with self._lock:
            before = self._traffic.get(record.node)
            self._traffic[record.node] = record
            if record.time_seconds >= 0:
                self._write(round(record.time_seconds * 1000), _system_values(before, record), record.time_seconds)

    def replayed(self) -> None:
        """What follows happens now: it carries the wall time of its writing."""
        self._zero = None

    def _write(self, step: int, values: Mapping[str, float], time_seconds: float) -> None:
        if not values:
            return
        wall_time = time.time() if self._zero is None else self._zero + time_seconds
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[value(tag=tag, simple_value=number) for tag, number in values.items()])
        self._file.add_event(self._events.Event(wall_time=wall_time, step=step, summary=summary))

    def close(self) -> None:
        """Write what is left and close the file; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            values = self._curve.rest(self._time_seconds)
            if values is not None:
                self._write(self._updates, values, self._time_seconds)
            self._file.close()


def _system_values(before: SystemRecord | None, record: SystemRecord) -> dict[str, float]:
    known = {
        "cpu_cores_used": record.cpu_cores_used,
        "memory_rss_bytes": record.memory_rss_bytes,
        "network_sent_bytes_per_second": rise_per_second(before, record, "network_sent_bytes"),
        "network_received_bytes_per_second": rise_per_second(before, record, "network_received_bytes"),
    }
    return {f"system/node{record.node}/{name}": value for name, value in known.items() if value is not None}
