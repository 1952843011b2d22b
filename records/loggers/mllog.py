"""MLPerf event log (``:::MLLOG {json}``) for its checker of training 4.0.0, open division."""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from ...core.job import Job
from ...core.settings.job_fields import DECLARED
from ...core.units import Target
from ...metrics.base import PERCENTAGES
from ..store.jsonl import finite_json
from ..store.run_directory import RunReader
from ..store.schema import EvalRecord, EventRecord, StepRecord
from .base import RunLogger

Sizes = Mapping[Literal["train", "test"], int]
FILE = "mllog.txt"
BENCHMARK = "resnet"  # MLPerf's only name for image classification
Record = StepRecord | EvalRecord | EventRecord
_START, _STOP, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MLLogWriter(RunLogger):
    """Thread-safe writer of a run's event log.

    Epochs count from 1, `samples_count` is in examples, times are ms of Unix time and never fall.
    """

    def __init__(self, path: Path, job: Job, sizes: Sizes, began_unix_seconds: float, zero_unix_seconds: float | None = None) -> None:
        """Open the log; the run clock was 0 at `zero_unix_seconds`.

        By default it is such that the first event is now.
        """
        self._job = job
        self._sizes = sizes
        self._zero = zero_unix_seconds
        descriptor = os.open(path / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file: TextIO = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._last_ms = 0
        self._examples = 0
        self._epochs_ended = self._block_epoch = 0
        self._in_epoch = self._in_block = self._running = False
        self._target = None if job.until is None else Target.parse(job.until)
        self._target_reached = self._aborted = False
        self._ended_seconds: float | None = None
        self._time_seconds = 0.0
        self._describe(began_unix_seconds)

    def step(self, record: StepRecord) -> None:
        """Count a group of updates; open an epoch or block where one starts."""
        with self._lock:
            began = record.time_seconds - record.seconds
            if not self._in_epoch:
                self._in_epoch = True
                self._log_at(began, _START, "epoch_start", metadata=self._place(epoch_num=self._epochs_ended + 1))
            if not self._in_block:
                self._in_block = True
                self._block_epoch = self._epochs_ended + 1
                self._log_at(began, _START, "block_start", metadata=self._place(first_epoch_num=self._block_epoch))
            self._examples += record.examples
            self._time_seconds = record.time_seconds

    def evaluation(self, record: EvalRecord) -> None:
        """Log a test evaluation, which ends the block."""
        if record.split != "test":
            return
        with self._lock:
            began = record.time_seconds - record.seconds
            place = self._place(epoch_num=record.epoch)
            if self._target is not None and self._target.reached(record.figure(self._target.metric)):
                self._target_reached = True
            self._end_block(began)
            self._log_at(began, _START, "eval_start", metadata=place)
            for name, value in record.metrics.items():
                self._log_at(record.time_seconds, _POINT, f"eval_{name}", value, place)
            if record.metrics and "accuracy" not in record.metrics:  # MLPerf's key for any quality
                name, value = next(iter(record.metrics.items()))
                share = value / 100 if name in PERCENTAGES else value
                self._log_at(record.time_seconds, _POINT, "eval_accuracy", share, {**place, "metric": name})
            self._log_at(record.time_seconds, _POINT, "eval_loss", record.loss, place)
            self._log_at(record.time_seconds, _STOP, "eval_stop", metadata=place)
            self._time_seconds = record.time_seconds

    def event(self, record: EventRecord) -> None:
        """Log an event that has an MLPerf key."""
        with self._lock:
            match record.event:
                case "run_started":
                    self._running = True
                    self._log_at(record.time_seconds, _STOP, "init_stop")
                    self._log_at(record.time_seconds, _START, "run_start")
                case "epoch_ended":
                    self._epochs_ended = record.detail["epoch"]
                    self._in_epoch = False
                    self._log_at(record.time_seconds, _STOP, "epoch_stop", metadata=self._place(epoch_num=self._epochs_ended))
                case "run_ended":
                    self._ended_seconds = record.time_seconds
                case "run_failed" | "run_interrupted":
                    self._aborted = True

    def replay(self, reader: RunReader) -> None:
        """Log a resumed run's records in order of time."""
        streams: list[Iterator[Record]] = [reader.steps(), reader.evals(), reader.events()]
        for record in heapq.merge(*streams, key=lambda record: record.time_seconds):
            if isinstance(record, StepRecord):
                self.step(record)
            elif isinstance(record, EvalRecord):
                self.evaluation(record)
            else:
                self.event(record)

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """Note whether the run was aborted."""
        with self._lock:
            self._aborted = self._aborted or state != "succeeded"

    def close(self) -> None:
        """Log the end, ``success`` for a complete run that reached any target; idempotent."""
        with self._lock:
            if self._file.closed:
                return
            if self._running:
                ended = self._time_seconds if self._ended_seconds is None else self._ended_seconds
                self._end_block(ended)
                success = not self._aborted and (self._target is None or self._target_reached)
                self._log_at(ended, _STOP, "run_stop", metadata=self._place(status="success" if success else "aborted"))
            self._file.close()

    def _describe(self, began_unix_seconds: float) -> None:
        job = self._job
        settings = {"model": job.model, "data": job.data, "backend": job.backend, "mode": job.mode}
        self._line(began_unix_seconds, _POINT, "cache_clear", False, {})  # the system's caches are not cleared
        self._line(began_unix_seconds, _START, "init_start", None, {})
        facts: dict[str, Any] = {
            "submission_org": "crosstrain (no submission)",
            "submission_platform": f"nodes: {job.nodes}, workers: {job.workers}",
            "submission_division": "open",
            "submission_status": "research",
            "submission_benchmark": BENCHMARK,
            "global_batch_size": job.update_batch,
            "train_samples": self._sizes["train"],
            "eval_samples": self._sizes["test"],
            **_declared(job),
        }
        for key, value in facts.items():
            self._line(began_unix_seconds, _POINT, key, value, settings if key == "submission_benchmark" else {})

    def _end_block(self, time_seconds: float) -> None:
        if self._in_block:
            self._in_block = False
            self._log_at(time_seconds, _STOP, "block_stop", metadata=self._place(first_epoch_num=self._block_epoch))

    def _place(self, **metadata: Any) -> dict[str, Any]:
        return {**metadata, "samples_count": self._examples}

    def _log_at(self, time_seconds: float, kind: str, key: str, value: Any = None, metadata: Mapping[str, Any] | None = None) -> None:
        if self._zero is None:
            self._zero = time.time() - time_seconds
        self._line(self._zero + time_seconds, kind, key, value, metadata or {})

    def _line(self, unix_seconds: float, kind: str, key: str, value: Any, metadata: Mapping[str, Any]) -> None:
        self._last_ms = max(self._last_ms, round(unix_seconds * 1000))
        event = {"namespace": "", "time_ms": self._last_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
        self._file.write(f":::MLLOG {json.dumps(finite_json(event))}\n")


def _declared(job: Job) -> dict[str, Any]:
    values, settings = job.model_dump(mode="json"), {}
    for name, declared in DECLARED.items():
        rule = declared.compare
        only_if = declared.requires or (None if rule is None else rule.only_if)
        if declared.mllog is not None and (only_if is None or only_if.holds(values)):
            settings[declared.mllog.format(**values)] = values[name]
    settings["opt_adamw_weight_decay" if job.optimizer == "adamw" else "opt_weight_decay"] = job.weight_decay
    if job.clip_norm:
        settings["opt_gradient_clip_norm"] = job.clip_norm
    return settings
