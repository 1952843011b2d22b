"""The present state of a run, read from the files that it writes: what ``trainer watch`` shows."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...metrics import MetricInfo
from ...metrics.recorded import read_metrics
from ...records.schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from ...records.store.run_directory import RunReader
from ...records.summary.node_usage import rate_between
from ...records.text.progress import NodeSamples
from ..questions.time_left import Block, Estimate, Measured, blocks_of, estimate, plan_of, steps_per_epoch
from ..series.throughput import checkpoint_pauses, end_translations, pauses
from .tail import Tail

__all__ = ["ENDED", "News", "Speed", "WatchedRun"]

ENDED = ("succeeded", "failed", "interrupted", "died")
"""States that a run does not leave by itself."""

SPEED_SECONDS = 10.0
"""Speeds are those of about the last so many seconds on the run clock."""

LOSSES = 20
"""The loss shown is the mean over so many updates, as ``final_train_loss`` is."""

PAUSES = 100
"""Of evaluations and of checkpoints so many are kept, the last ones: what those to come take is judged by them."""

UNWRITTEN_SECONDS = 5.0
"""So long a run may be without a status: it is written when the folder has just been made."""

FIRST_BYTES = 1 << 20
"""Of updates and samples from before the watching so many bytes are read: enough for the speed, and little of a long run."""

_SILENT = ("epoch_ended",)
"""Events that the figures show anyway."""

News = EventRecord | EvalRecord


@dataclass(frozen=True, slots=True)
class Speed:
    """Updates and examples per second."""

    steps_per_second: float
    examples_per_second: float


class _Training:
    """What the updates say: how far, how fast, how well."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.time_seconds: float | None = None
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._recent: deque[StepRecord] = deque()

    def add(self, record: StepRecord) -> None:
        self.step = max(self.step, record.step + record.count)  # async: groups arrive in any order
        self.epoch = max(self.epoch, record.epoch)
        self.time_seconds = record.time_seconds
        self._losses.extend(record.losses[-LOSSES:])
        if record.profiled_seconds is not None:
            self._recent.clear()
            return
        self._recent.append(record)
        while len(self._recent) > 2 and record.time_seconds - self._recent[1].time_seconds >= SPEED_SECONDS:
            self._recent.popleft()

    @property
    def loss(self) -> float | None:
        return sum(self._losses) / len(self._losses) if self._losses else None

    def blocks(self, stops: Sequence[tuple[float, float]]) -> list[Block]:
        """What `time_left.blocks_of` makes of the groups of late: without `stops`, and a single group by its own time."""
        if not self._recent:
            return []
        first, *others = self._recent
        if not others or others[-1].time_seconds <= first.time_seconds:
            last = self._recent[-1]
            return [Block(last.count, last.seconds)] if last.seconds > 0 else []
        ends = np.array([record.time_seconds - first.time_seconds for record in others])
        since = [(start - first.time_seconds, end - first.time_seconds) for start, end in stops if end > first.time_seconds]
        return blocks_of(ends, np.array([record.count for record in others]), since)

    @property
    def examples_per_step(self) -> float | None:
        """Of the groups of late."""
        steps = sum(record.count for record in self._recent)
        return sum(record.examples for record in self._recent) / steps if steps else None

    def speed(self) -> Speed | None:
        """Over the time between the reports of the oldest and the newest group of late; of a single group over its own time."""
        if not self._recent:
            return None
        first, *others = self._recent
        seconds = self._recent[-1].time_seconds - first.time_seconds
        if not others or seconds <= 0:
            others, seconds = [self._recent[-1]], self._recent[-1].seconds
        if seconds <= 0:
            return None
        return Speed(sum(record.count for record in others) / seconds, sum(record.examples for record in others) / seconds)


class WatchedRun:
    """Keeps up with one run directory; `poll` takes in what has been written since, where a `catalog.run.Run` reads once."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self.job: Mapping[str, Any] | None = None
        self.total_steps: int | None = None
        self.state = "starting"
        self.cause: str | None = None
        self._status_of: str | None = None
        self._shown: set[tuple[str, float]] = set()
        self._since = self._heard = time.monotonic()
        self._polled = False
        self._begin()

    def _begin(self) -> None:
        path = self.reader.path
        self.training = _Training()
        self.evaluation: EvalRecord | None = None
        self._evaluated: deque[EvalRecord] = deque(maxlen=PAUSES)
        self._saved: deque[EventRecord] = deque(maxlen=PAUSES)
        self._translated: deque[EventRecord] = deque(maxlen=PAUSES)
        self.nodes = NodeSamples()
        self._ended_seconds = math.inf
        self._samples: dict[int, tuple[SystemRecord | None, SystemRecord]] = {}
        self._steps = Tail(path / "steps.jsonl", StepRecord, FIRST_BYTES)
        self._evals = Tail(path / "evals.jsonl", EvalRecord)
        self._events = Tail(path / "events.jsonl", EventRecord)
        self._system = Tail(path / "system.jsonl", SystemRecord, FIRST_BYTES)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for tail in (self._steps, self._evals, self._events, self._system):
            tail.close()

    @property
    def metrics(self) -> Sequence[MetricInfo]:
        """The metrics of its evaluations; none while nothing is known of it."""
        return () if self.job is None else read_metrics(self.job)

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be expected."""
        return self.state in ENDED

    @property
    def silent_seconds(self) -> float:
        """How long nothing has been written, as far as it was watched."""
        return time.monotonic() - self._heard

    def poll(self) -> list[News]:
        """Take in what is new; return the evaluations and events among it, in the order of their times.

        What was there before the first call is not news. Raises DamagedRunError where a file cannot be read.
        """
        self._read_status()  # before the records: what an ended run has written is complete
        records = self._read()
        if self._cut():
            self.close()
            self._begin()
            records = self._read()
        for record in records:
            self._take(record)
        if records:
            self._heard = time.monotonic()
        found = [record for record in records if isinstance(record, EventRecord | EvalRecord)]
        news = [record for record in found if _key(record) not in self._shown]
        self._shown.update(map(_key, found))
        first, self._polled = not self._polled, True
        kept = [] if first else [record for record in news if not (isinstance(record, EventRecord) and record.event in _SILENT)]
        return sorted(kept, key=lambda record: record.time_seconds)

    def _read_status(self) -> None:
        path = self.reader.path / "status.json"
        if not os.path.lexists(path) and time.monotonic() - self._since < UNWRITTEN_SECONDS:
            return
        status = self.reader.status()
        self.state, self.cause = self.reader.state(), status["cause"]
        if status["changed_at"] != self._status_of and (self.reader.path / "job.json").is_file():
            self._status_of = status["changed_at"]
            self.job = self.reader.job()
            self.total_steps = self.job.get("total_steps")

    def _read(self) -> list[StepRecord | EvalRecord | EventRecord | SystemRecord]:
        return [*self._events.read(), *self._steps.read(), *self._evals.read(), *self._system.read()]

    def _cut(self) -> bool:
        return any(tail.anew for tail in (self._steps, self._evals, self._events, self._system))

    def _take(self, record: StepRecord | EvalRecord | EventRecord | SystemRecord) -> None:
        match record:
            case StepRecord():
                self.training.add(record)
            case EvalRecord():
                self.evaluation = record
                self._evaluated.append(record)
            case EventRecord(event="checkpoint_saved"):
                self._saved.append(record)
            case EventRecord(event="translated"):
                self._translated.append(record)
            case EventRecord(event="run_ended"):
                self._ended_seconds = record.time_seconds
            case SystemRecord() if record.time_seconds <= self._ended_seconds:  # the calibration that may follow is no training
                self.nodes.add(record)
                before = self._samples.get(record.node)
                self._samples[record.node] = (before[1] if before else None, record)

    # What it comes to -----------------------------------------------------------------------------------------------

    @property
    def node_count(self) -> int:
        """How many nodes the run has now; before it was resumed it may have had more."""
        return self.job["nodes"] if self.job else 0

    @property
    def progress(self) -> float | None:
        """Updates done as a share of all, 0 to 1; None where the total is not known."""
        return min(1.0, self.training.step / self.total_steps) if self.total_steps else None

    @property
    def time_left(self) -> Estimate | None:
        """The rest of the training at the pace of late, with what comes between and after; a run with a target may end before.

        It is the estimate of ``trainer explain``, which has the whole measured part for it.
        """
        if self.ended or self.job is None or self.total_steps is None:
            return None
        plan = plan_of(self.job, self.total_steps, steps_per_epoch(self.job, self.training.examples_per_step))
        blocks = self.training.blocks(pauses(self._evaluated, self._saved))
        stalls = [end - start for start, end in checkpoint_pauses(self._saved)]
        evaluations = [record.seconds for record in self._evaluated]
        translations = [end - start for start, end in end_translations(self._translated)]
        return estimate(plan, Measured(self.training.step, blocks, evaluations, stalls, translations))

    def snapshot(self, news: list[News]) -> dict[str, Any]:
        """Return all of it as JSON: null is what is not known, `news` goes in under ``events`` and ``evaluations``."""
        training, speed, left = self.training, self.training.speed(), self.time_left
        return {
            "run": self.reader.name,
            "state": self.state,
            "cause": self.cause,
            "time_seconds": training.time_seconds,
            "step": training.step,
            "total_steps": self.total_steps,
            "progress": self.progress,
            "epoch": training.epoch,
            "loss": training.loss,
            "steps_per_second": speed.steps_per_second if speed else None,
            "examples_per_second": speed.examples_per_second if speed else None,
            "time_left_seconds": left.seconds if left else None,
            "time_left_low_seconds": left.low_seconds if left else None,
            "time_left_high_seconds": left.high_seconds if left else None,
            "time_left_translate_seconds": left.translate_seconds if left else None,
            "silent_seconds": self.silent_seconds,
            "evaluation": _plain(self.evaluation) if self.evaluation else None,
            "nodes": [_node(*self._samples[node]) for node in sorted(self._samples) if node < self.node_count],
            "evaluations": [_plain(record) for record in news if isinstance(record, EvalRecord)],
            "events": [_plain(record) for record in news if isinstance(record, EventRecord)],
        }


def _key(record: News) -> tuple[str, float]:
    return (record.event if isinstance(record, EventRecord) else f"evaluated {record.split}", record.time_seconds)


def _plain(record: News) -> dict[str, Any]:
    plain = {name: getattr(record, name) for name in record.__slots__}
    return plain if isinstance(record, EventRecord) else {**plain, **plain.pop("metrics")}


def _node(before: SystemRecord | None, record: SystemRecord) -> dict[str, Any]:
    names = ("node", "time_seconds", "cpu_cores_used", "cores_available", "memory_rss_bytes")
    rates = ("network_sent_bytes", "network_received_bytes")
    return {
        **{name: getattr(record, name) for name in names},
        **{f"{name}_per_second": rate_between(before, record, name) for name in rates},
    }
