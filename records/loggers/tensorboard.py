"""TensorBoard event files of a run, derived from the records for viewing; no figure is read from them.

They are made of the tensorboard package's own events and records. Its writer of whole files would do so in a thread of its own, which
prints a traceback where the disk is full; torch's wrapper of it would import tensorflow where that is installed, and so would tensorboard
itself; see `_without_tensorflow`.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.job import Job
from ...metrics import MetricInfo
from ..schema import EvalRecord, StepRecord, SystemRecord
from ..store.jsonl import append_whole
from ..summary.node_usage import rate_between
from .base import RunLogger
from .curve_points import TrainingCurve, end_figures
from .tensorboard_hparams import HParams

__all__ = ["FOLDER", "TensorBoardWriter"]

FOLDER = "tensorboard"
"""The folder of a run directory that holds the event file."""

FIRST_SPACING_SECONDS = 0.1
"""Distance of the training curves' points at first."""


def _without_tensorflow() -> None:
    """Make tensorboard use its own file functions.

    It asks for tensorflow unless a module of this name exists, which is how builds of tensorboard without tensorflow say so.
    """
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))


class _EventFile:
    """A new event file in `folder`, to which an event is appended as a whole or not at all; to `RecordWriter` it is a file."""

    def __init__(self, folder: Path, events: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._records: Any = records.RecordWriter(self)
        self.add(events.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Any) -> None:
        """Append an event. Raises OSError."""
        self._records.write(event.SerializeToString())

    def write(self, record: bytes) -> None:
        """Append a record. Raises OSError."""
        append_whole(self._descriptor, record)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class TensorBoardWriter(RunLogger):
    """Writes a run's event file into ``tensorboard/`` of the run directory `path`; methods may be called from several threads.

    The step axis counts updates in ``train/`` and ``eval/``, and milliseconds of the run clock in ``system/``.
    """

    def __init__(
        self,
        path: Path,
        job: Job | None = None,
        zero_unix_seconds: float | None = None,
        metrics: Sequence[MetricInfo] = (),
    ) -> None:
        """Open a new event file. The settings of `job`, where it is given, are written for the HParams view, with the `metrics` beside.

        Where `zero_unix_seconds` is given, records carry the wall time at which they were made, which is their time on the run clock after
        it: for records that are written again when a run is resumed.
        """
        self._zero = zero_unix_seconds
        _without_tensorflow()
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._file = _EventFile(path / FOLDER, self._events)
        self._lock = threading.Lock()
        self._curve = TrainingCurve(FIRST_SPACING_SECONDS)
        self._time_seconds = 0.0
        self._traffic: dict[int, SystemRecord] = {}
        self._closed = False
        self._hparams = None if job is None else HParams()
        if self._hparams is not None and job is not None:
            for summary in self._hparams.start(job, metrics, time.time() if zero_unix_seconds is None else zero_unix_seconds):
                self._add(summary, 0, 0.0)

    def step(self, record: StepRecord) -> None:
        """Take in a step record; about ten points a second are written at first, fewer in a long run."""
        with self._lock:
            self._time_seconds = record.time_seconds
            values = self._curve.add(record)
            if values is not None:
                self._write(self._curve.updates, values, record.time_seconds)

    def evaluation(self, record: EvalRecord) -> None:
        """Write ``eval/loss`` and each metric, such as ``eval/accuracy`` (of another split than test: ``eval/<split>/…``)."""
        prefix = "eval" if record.split == "test" else f"eval/{record.split}"
        with self._lock:
            self._write(
                record.step,
                {f"{prefix}/{name}": value for name, value in (("loss", record.loss), *record.metrics.items())},
                record.time_seconds,
            )

    def system(self, record: SystemRecord) -> None:
        """Write ``system/node<i>/…`` of a sample of training; what was not observed is left out."""
        with self._lock:
            before = self._traffic.get(record.node)
            self._traffic[record.node] = record
            if not record.initialising:
                self._write(round(record.time_seconds * 1000), _system_values(before, record), record.time_seconds)

    def on_replayed(self) -> None:
        """What follows happens now: it carries the wall time of its writing."""
        self._zero = None

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """Write the rest of the curve, ``summary/…``, and how the run ended."""
        with self._lock:
            self._finish_curve()
            if summary is not None:
                self._write(self._curve.updates, end_figures(summary), self._time_seconds)
            if self._hparams is not None:
                self._add(self._hparams.end(state, time.time()), 0, self._time_seconds)

    def _write(self, step: int, values: Mapping[str, float], time_seconds: float) -> None:
        if not values:
            return
        points = [self._summaries.Summary.Value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._add(self._summaries.Summary(value=points), step, time_seconds)

    def _add(self, summary: Any, step: int, time_seconds: float) -> None:
        wall_time = time.time() if self._zero is None else self._zero + time_seconds
        self._file.add(self._events.Event(wall_time=wall_time, step=step, summary=summary))

    def _finish_curve(self) -> None:
        values = self._curve.rest(self._time_seconds)
        if values is not None:
            self._write(self._curve.updates, values, self._time_seconds)

    def close(self) -> None:
        """Write what is left and close the file; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._finish_curve()
            finally:
                self._file.close()


def _system_values(before: SystemRecord | None, record: SystemRecord) -> dict[str, float]:
    known = {
        "cpu_cores_used": record.cpu_cores_used,
        "memory_rss_bytes": record.memory_rss_bytes,
        "network_sent_bytes_per_second": rate_between(before, record, "network_sent_bytes"),
        "network_received_bytes_per_second": rate_between(before, record, "network_received_bytes"),
    }
    return {f"system/node{record.node}/{name}": value for name, value in known.items() if value is not None}
