"""TensorBoard event files without its writer, which prints a traceback on a full disk."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.job import Job
from ...core.settings.job_fields import choices, schema
from ...metrics import MetricInfo
from ...metrics.base import NAMES
from ..node_usage import rate_between
from ..store.jsonl import append_whole
from ..store.schema import SystemRecord
from .base import END_FIGURES, CurveLogger, settings

SHOWN_FIRST = ("backend", "mode", "model", "nodes", "global_batch_size")  # marked as differing: the view first shows five columns
OURS = ("accuracy", *NAMES, "perplexity", "token_accuracy")  # built-in models' metrics: the view takes its figures from any run of a folder


def figures(metrics: Sequence[MetricInfo]) -> tuple[str, ...]:
    """Return the tags of the view's figures for runs with these and other metrics."""
    run_figures = (*(f"eval/{info.name}" for info in metrics), *(f"summary/{name}" for name in END_FIGURES))
    return tuple(dict.fromkeys((*run_figures, *(f"eval/{name}" for name in OURS))))


_STATUS = {"succeeded": "STATUS_SUCCESS", "failed": "STATUS_FAILURE", "interrupted": "STATUS_FAILURE"}


class HParams:
    """Summaries of a run for the HParams view; the plugin's own functions may import tensorflow."""

    def __init__(self) -> None:
        """Import the plugin's messages, in 2 ms after tensorboard's writer."""
        package = "tensorboard.plugins.hparams"
        self._api: Any = importlib.import_module(f"{package}.api_pb2")
        self._data: Any = importlib.import_module(f"{package}.plugin_data_pb2")
        self._metadata: Any = importlib.import_module(f"{package}.metadata")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")

    def start(self, job: Job, metrics: Sequence[MetricInfo], unix_seconds: float) -> Iterable[Any]:
        """Return the start's summaries: the view's columns and the run's values."""
        names = list(settings(Job(), "operation"))
        called = {tag: tag.removeprefix("summary/").replace("_", " ").replace("/", " ") for tag in figures(metrics)}
        called |= {f"eval/{info.name}": f"eval {info.label}" for info in metrics}
        experiment = self._api.Experiment(
            name="crosstrain",
            time_created_secs=unix_seconds,
            hparam_infos=[self._setting(name) for name in names],
            metric_infos=[self._api.MetricInfo(name=self._api.MetricName(tag=tag), display_name=called[tag]) for tag in figures(metrics)],
        )
        begun = self._data.SessionStartInfo(start_time_secs=unix_seconds)
        for name, value in settings(job, "operation").items():
            _assign(begun.hparams[name], value)
        return [
            self._wrapped(self._metadata.EXPERIMENT_TAG, experiment=experiment),
            self._wrapped(self._metadata.SESSION_START_INFO_TAG, session_start_info=begun),
        ]

    def end(self, state: str, unix_seconds: float) -> Any:
        """Return the summary for the end of a run."""
        status = self._api.Status.Value(_STATUS.get(state, "STATUS_UNKNOWN"))
        ended = self._data.SessionEndInfo(status=status, end_time_secs=unix_seconds)
        return self._wrapped(self._metadata.SESSION_END_INFO_TAG, session_end_info=ended)

    def _setting(self, name: str) -> Any:
        kind = "integer" if name == "workers" else schema(name).get("type")
        info = self._api.HParamInfo(name=name, differs=name in SHOWN_FIRST)
        info.type = {
            "integer": self._api.DATA_TYPE_FLOAT64,
            "number": self._api.DATA_TYPE_FLOAT64,
            "boolean": self._api.DATA_TYPE_BOOL,
        }.get(kind or "", self._api.DATA_TYPE_STRING)
        if name != "workers":
            for choice in choices(name):
                info.domain_discrete.values.add().string_value = choice
        return info

    def _wrapped(self, tag: str, **data: Any) -> Any:
        """Return a summary with the message as metadata and an empty tensor."""
        metadata = self._metadata.create_summary_metadata(self._data.HParamsPluginData(**data))
        value = self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=self._metadata.NULL_TENSOR)
        return self._summary.Summary(value=[value])


def _assign(target: Any, value: Mapping[str, Any] | bool | int | float | str | None) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int | float):
        target.number_value = value
    elif value is not None:
        target.string_value = str(value)


FOLDER = "tensorboard"
FIRST_SPACING_SECONDS = 0.1  # between the training curves' points at first


def _without_tensorflow() -> None:
    """Make tensorboard use its file functions without tensorflow.

    Builds without tensorflow do that with a module of this name.
    """
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))


class _EventFile:
    """Event file to which events are appended whole or not at all; a file to `RecordWriter`."""

    def __init__(self, folder: Path, events: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._records: Any = records.RecordWriter(self)
        self.add(events.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def write(self, record: bytes) -> None:
        append_whole(self._descriptor, record)

    def close(self) -> None:
        os.close(self._descriptor)


class TensorBoardWriter(CurveLogger):
    """Thread-safe writer of a run's event file.

    Steps are updates in ``train/`` and ``eval/``, run-clock ms in ``system/``.
    """

    def __init__(
        self,
        path: Path,
        job: Job | None = None,
        zero_unix_seconds: float | None = None,
        metrics: Sequence[MetricInfo] = (),
    ) -> None:
        """Open a new event file in `path`.

        Replayed records get the wall time of the run clock since `zero_unix_seconds`.
        """
        super().__init__(FIRST_SPACING_SECONDS, zero_unix_seconds)
        _without_tensorflow()
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._file = _EventFile(path / FOLDER, self._events)
        self._traffic: dict[int, SystemRecord] = {}
        self._closed = False
        self._hparams = None if job is None else HParams()
        if self._hparams is not None and job is not None:
            for summary in self._hparams.start(job, metrics, time.time() if zero_unix_seconds is None else zero_unix_seconds):
                self._write(summary, 0, 0.0)

    def system(self, record: SystemRecord) -> None:
        """Write ``system/node<i>/…`` of a sample of training, without unobserved figures."""
        with self._lock:
            before = self._traffic.get(record.node)
            self._traffic[record.node] = record
            if not record.initialising:
                self._add(_system_values(before, record), round(record.time_seconds * 1000), record.time_seconds)

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """Write the rest of the curve, ``summary/…`` and the final state."""
        super().on_end(state, summary)
        with self._lock:
            if self._hparams is not None:
                self._write(self._hparams.end(state, time.time()), 0, self._time_seconds)

    def _add(self, values: Mapping[str, float], step: int, time_seconds: float) -> None:
        points = [self._summaries.Summary.Value(tag=tag, simple_value=number) for tag, number in values.items()]
        if points:
            self._write(self._summaries.Summary(value=points), step, time_seconds)

    def _write(self, summary: Any, step: int, time_seconds: float) -> None:
        self._file.add(self._events.Event(wall_time=self._unix_seconds(time_seconds), step=step, summary=summary))

    def close(self) -> None:
        """Write pending data and close the file; a second call does nothing."""
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
