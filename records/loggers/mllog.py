"""MLPerf's event log of a run, in the keys that MLPerf training defines: a line ``:::MLLOG {json}`` for each event.

It is derived from the records, as TensorBoard's files are, and no figure is read from it. Keys, event types and metadata are those of the
package mlperf-logging (``mlperf_logging/mllog/constants.py``); its checker accepts the log of a run whose quality is below 1 once,
by the rules of training 4.0.0, open division. Writing it needs no package.
"""

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
from ...core.units import Target
from ...metrics.base import PERCENTAGES
from ..schema import EvalRecord, EventRecord, StepRecord
from ..store.jsonl import finite_json
from ..store.run_directory import RunReader
from .base import RunLogger

__all__ = ["FILE", "MLLogWriter", "Sizes"]

Sizes = Mapping[Literal["train", "test"], int]
"""The number of examples of each split."""

FILE = "mllog.txt"
"""The log's name in a run directory."""

BENCHMARK = "resnet"
"""MLPerf's name for its image classification, the task that a run does here; the checker knows no name of another model for it."""

Record = StepRecord | EvalRecord | EventRecord

_START, _STOP, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MLLogWriter(RunLogger):
    """Writes a run's event log into its directory `path`, anew; methods may be called from several threads.

    Epochs count from 1, as MLPerf's do, and `epoch_num` of an evaluation within an epoch is a fraction; `samples_count` counts the
    examples trained on so far. A block is the training between two evaluations. Times are those of the records, in milliseconds of
    Unix time, and never go back from one line to the next.
    """

    def __init__(self, path: Path, job: Job, sizes: Sizes, began_unix_seconds: float, zero_unix_seconds: float | None = None) -> None:
        """Open the log. `sizes` are the examples of the splits; the command started at `began_unix_seconds`.

        `zero_unix_seconds` is when the run clock was at 0; without it the first event tells, which then happens now.
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

    # What is told ---------------------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        """Take in a group of updates: the first of an epoch, or after an evaluation, opens an epoch or a block."""
        with self._lock:
            began = record.time_seconds - record.seconds
            if not self._in_epoch:
                self._in_epoch = True
                self._at(began, _START, "epoch_start", metadata=self._place(epoch_num=self._epochs_ended + 1))
            if not self._in_block:
                self._in_block = True
                self._block_epoch = self._epochs_ended + 1
                self._at(began, _START, "block_start", metadata=self._place(first_epoch_num=self._block_epoch))
            self._examples += record.examples
            self._time_seconds = record.time_seconds

    def evaluation(self, record: EvalRecord) -> None:
        """Tell an evaluation on the test split; training stood still meanwhile, so it ends the block."""
        if record.split != "test":
            return
        with self._lock:
            began = record.time_seconds - record.seconds
            place = self._place(epoch_num=record.epoch)
            if self._target is not None and self._target.reached(record.figure(self._target.metric)):
                self._target_reached = True
            self._end_block(began)
            self._at(began, _START, "eval_start", metadata=place)
            for name, value in record.metrics.items():
                self._at(record.time_seconds, _POINT, f"eval_{name}", value, place)
            if record.metrics and "accuracy" not in record.metrics:  # MLPerf's key for the quality of a model, whatever measures it
                name, value = next(iter(record.metrics.items()))
                share = value / 100 if name in PERCENTAGES else value
                self._at(record.time_seconds, _POINT, "eval_accuracy", share, {**place, "metric": name})
            self._at(record.time_seconds, _POINT, "eval_loss", record.loss, place)
            self._at(record.time_seconds, _STOP, "eval_stop", metadata=place)
            self._time_seconds = record.time_seconds

    def event(self, record: EventRecord) -> None:
        """Take in an event of the run; those that MLPerf has no key for are passed over."""
        with self._lock:
            match record.event:
                case "run_started":
                    self._running = True
                    self._at(record.time_seconds, _STOP, "init_stop")
                    self._at(record.time_seconds, _START, "run_start")
                case "epoch_ended":
                    self._epochs_ended = record.detail["epoch"]
                    self._in_epoch = False
                    self._at(record.time_seconds, _STOP, "epoch_stop", metadata=self._place(epoch_num=self._epochs_ended))
                case "run_ended":
                    self._ended_seconds = record.time_seconds
                case "run_failed" | "run_interrupted":
                    self._aborted = True

    def replay(self, reader: RunReader) -> None:
        """Tell the records that a run has so far in the order of their times; for one that goes on."""
        streams: list[Iterator[Record]] = [reader.steps(), reader.evals(), reader.events()]
        for record in heapq.merge(*streams, key=lambda record: record.time_seconds):
            if isinstance(record, StepRecord):
                self.step(record)
            elif isinstance(record, EvalRecord):
                self.evaluation(record)
            else:
                self.event(record)

    def on_end(self, state: str, summary: Mapping[str, Any] | None) -> None:
        """The run is over; one that did not come to its end is no success."""
        with self._lock:
            self._aborted = self._aborted or state != "succeeded"

    def close(self) -> None:
        """Tell the run's end and close the log; a second call does nothing.

        The status is ``success`` where the target was reached, or where there was none and the run came to its end.
        """
        with self._lock:
            if self._file.closed:
                return
            if self._running:
                ended = self._time_seconds if self._ended_seconds is None else self._ended_seconds
                self._end_block(ended)
                success = not self._aborted and (self._target is None or self._target_reached)
                self._at(ended, _STOP, "run_stop", metadata=self._place(status="success" if success else "aborted"))
            self._file.close()

    # How ------------------------------------------------------------------------------------------------------------

    def _describe(self, began_unix_seconds: float) -> None:
        """Tell what is known before the run: for whom, what, and with which settings."""
        job = self._job
        asked = {"model": job.model, "data": job.data, "backend": job.backend, "mode": job.mode}
        self._line(began_unix_seconds, _POINT, "cache_clear", False, {})  # the system's caches are left as they are
        self._line(began_unix_seconds, _START, "init_start", None, {})
        facts: dict[str, Any] = {
            "submission_org": "crosstrain (no submission)",
            "submission_platform": f"nodes: {job.nodes}, workers: {job.workers}",
            "submission_division": "open",
            "submission_status": "research",
            "submission_benchmark": BENCHMARK,
            "seed": job.seed,
            "global_batch_size": job.global_batch if job.mode == "sync" else job.per_worker_batch,  # of an update
            "gradient_accumulation_steps": job.accumulate,
            "train_samples": self._sizes["train"],
            "eval_samples": self._sizes["test"],
            **_optimizer(job),
        }
        for key, value in facts.items():
            self._line(began_unix_seconds, _POINT, key, value, asked if key == "submission_benchmark" else {})

    def _end_block(self, time_seconds: float) -> None:
        if self._in_block:
            self._in_block = False
            self._at(time_seconds, _STOP, "block_stop", metadata=self._place(first_epoch_num=self._block_epoch))

    def _place(self, **metadata: Any) -> dict[str, Any]:
        return {**metadata, "samples_count": self._examples}

    def _at(self, time_seconds: float, kind: str, key: str, value: Any = None, metadata: Mapping[str, Any] | None = None) -> None:
        """Write a line of the moment `time_seconds` on the run clock."""
        if self._zero is None:
            self._zero = time.time() - time_seconds
        self._line(self._zero + time_seconds, kind, key, value, metadata or {})

    def _line(self, unix_seconds: float, kind: str, key: str, value: Any, metadata: Mapping[str, Any]) -> None:
        self._last_ms = max(self._last_ms, round(unix_seconds * 1000))
        event = {"namespace": "", "time_ms": self._last_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
        self._file.write(f":::MLLOG {json.dumps(finite_json(event))}\n")


def _optimizer(job: Job) -> dict[str, Any]:
    """Return the update rule and the learning rate's course, under MLPerf's keys."""
    found: dict[str, Any] = {"opt_name": job.optimizer, "opt_base_learning_rate": job.lr}
    if job.optimizer == "sgd":
        found |= {"sgd_opt_momentum": job.momentum, "opt_weight_decay": job.weight_decay}
    else:
        prefix = f"opt_{job.optimizer}"
        found |= {f"{prefix}_beta_1": job.beta1, f"{prefix}_beta_2": job.beta2, f"{prefix}_epsilon": job.epsilon}
        found[f"{prefix}_weight_decay" if job.optimizer == "adamw" else "opt_weight_decay"] = job.weight_decay
    found |= {"opt_learning_rate_warmup_steps": job.warmup_steps, "opt_learning_rate_decay_schedule": job.schedule}
    if job.clip_norm:
        found["opt_gradient_clip_norm"] = job.clip_norm
    if job.schedule == "step":
        found["opt_learning_rate_decay_factor"] = job.schedule_gamma
    return found
