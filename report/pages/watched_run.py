"""The current state of a watched run, as plain lines or drawn on a terminal."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...core.bounded_json import MAX_LINE_BYTES, UnreadableError, open_regular, parse_json
from ...core.console import one_line
from ...core.job import Job
from ...core.terminal_pictures import table_of
from ...metrics import MetricInfo
from ...metrics.base import read_metrics
from ...records.node_usage import rate_between
from ...records.store.jsonl import DamagedRunError, R, decode, no_record
from ...records.store.run_directory import RunReader
from ...records.store.schema import EvalRecord, EventRecord, StepRecord, SystemRecord
from ...records.text import (
    UNKNOWN,
    NodeSamples,
    TrainingState,
    bytes_text,
    duration_text,
    evaluation_text,
    node_text,
    number_text,
    rate_text,
)
from ..analysis.duration import Block, Estimate, Measured, estimate, make_blocks, read_plan, steps_per_epoch
from ..runs.series import checkpoint_pauses, end_translations, pauses

_CHUNK_BYTES = 1 << 20


class Tail(Generic[R]):
    """Follows a run's file of JSON lines, which may not exist yet, by whole lines."""

    # `most_bytes` limits the initial content (None: all). `was_replaced`: the file was replaced at the last `read`, as on resume.

    def __init__(self, path: Path, kind: type[R], most_bytes: int | None = None) -> None:
        self.was_replaced = False
        self._path = path
        self._kind: type[R] = kind
        self._most_bytes = most_bytes
        self._descriptor: int | None = None
        self._offset = 0
        self._inside_line = False
        self._line: int | None = None

    def read(self) -> list[R]:
        """Return the new records. Raises DamagedRunError for a whole line that is no record."""
        self.was_replaced = self._descriptor is not None and self._replaced(self._descriptor)
        if self.was_replaced:
            self.close()
        if self._descriptor is None:
            self._descriptor = self._open()
        records: list[R] = []
        while self._descriptor is not None and (lines := self._lines(self._descriptor)) is not None:
            records += [self._record(line) for line in lines]
        return records

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replaced(self, descriptor: int) -> bool:
        """Return whether the path is another file; the open one keeps its inode from reuse."""
        opened = os.fstat(descriptor)
        try:
            current = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (opened.st_ino, opened.st_dev) != (current.st_ino, current.st_dev) or current.st_size < self._offset

    def _open(self) -> int | None:
        try:
            with open_regular(self._path) as file:
                descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            return None
        except UnreadableError as error:
            raise DamagedRunError(f"{self._path}: {error}.") from error
        size = os.fstat(descriptor).st_size
        skipped = 0 if self._most_bytes is None else max(0, size - self._most_bytes)
        self._inside_line = skipped > 0
        self._line = None if skipped else 0
        self._offset = max(0, skipped - 1)  # the byte before shows whether a line begins here
        return descriptor

    def _lines(self, descriptor: int) -> list[bytes] | None:
        length = _CHUNK_BYTES
        while True:
            data = os.pread(descriptor, length, self._offset)
            end = data.rfind(b"\n") + 1
            if end:
                break
            if len(data) < length:
                return None
            if length > MAX_LINE_BYTES:
                raise DamagedRunError(
                    f"{self._path}: a line from byte {self._offset} on is longer than {MAX_LINE_BYTES >> 20} MiB, the most that is read."
                )
            length *= 2  # a longer line
        self._offset += end
        lines = data[: end - 1].split(b"\n")
        if self._inside_line:
            self._inside_line = False
            lines = lines[1:]
        return lines

    def _record(self, line: bytes) -> R:
        self._line = None if self._line is None else self._line + 1
        try:
            record: R = decode(self._kind, parse_json(line))
        except ValueError as error:
            where = "a line near its end" if self._line is None else f"line {self._line}"
            raise DamagedRunError(f"{self._path}, {where}: {no_record(self._kind, error)}.") from error
        return record


ENDED = ("succeeded", "failed", "interrupted", "died")  # final states
SPEED_SECONDS = 10.0  # on the run clock, over which speeds are measured
LOSSES = 20  # updates of the mean loss, as for ``final_train_loss``
PAUSES = 100  # evaluations and checkpoints stored, for the estimate of later ones
UNWRITTEN_SECONDS = 5.0  # that a new run may be without a status
FIRST_BYTES = 1 << 20  # of earlier updates and samples: enough for the speed, and little of a long run
_SILENT = ("epoch_ended",)  # shown by the figures anyway
News = EventRecord | EvalRecord


@dataclass(frozen=True, slots=True)
class Speed:
    """Updates and examples per second."""

    steps_per_second: float
    examples_per_second: float


class _Training:
    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.time_seconds: float | None = None
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._recent: deque[StepRecord] = deque()

    def add(self, record: StepRecord) -> None:
        self.step = max(self.step, record.step + record.count)  # async groups arrive in any order
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
        if not self._recent:
            return []
        first, *rest = self._recent
        if not rest or rest[-1].time_seconds <= first.time_seconds:
            last = self._recent[-1]
            return [Block(last.count, last.seconds)] if last.seconds > 0 else []
        ends = np.array([record.time_seconds - first.time_seconds for record in rest])
        since = [(start - first.time_seconds, end - first.time_seconds) for start, end in stops if end > first.time_seconds]
        return make_blocks(ends, np.array([record.count for record in rest]), since)

    @property
    def examples_per_step(self) -> float | None:
        steps = sum(record.count for record in self._recent)
        return sum(record.examples for record in self._recent) / steps if steps else None

    def speed(self) -> Speed | None:
        if not self._recent:
            return None
        first, *rest = self._recent
        seconds = self._recent[-1].time_seconds - first.time_seconds
        if not rest or seconds <= 0:
            rest, seconds = [self._recent[-1]], self._recent[-1].seconds
        if seconds <= 0:
            return None
        return Speed(sum(record.count for record in rest) / seconds, sum(record.examples for record in rest) / seconds)


class WatchedRun:
    """Follows one run directory incrementally, where `runs.run.Run` reads once."""

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
        self._steps = Tail(path / "steps.jsonl", StepRecord, FIRST_BYTES)
        self._evals = Tail(path / "evals.jsonl", EvalRecord)
        self._events = Tail(path / "events.jsonl", EventRecord)
        self._system = Tail(path / "system.jsonl", SystemRecord, FIRST_BYTES)
        self._tails = (self._events, self._steps, self._evals, self._system)

    def close(self) -> None:
        """Close the files; idempotent."""
        for tail in self._tails:
            tail.close()

    @property
    def metrics(self) -> Sequence[MetricInfo]:
        """The metrics of its evaluations; none if still unknown."""
        return () if self.job is None else read_metrics(self.job)

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in ENDED

    @property
    def silent_seconds(self) -> float:
        """How long nothing has been written, as far as it was watched."""
        return time.monotonic() - self._heard

    def poll(self) -> list[News]:
        """Read news; return evaluations and events since the first call. Raises DamagedRunError."""
        self._read_status()  # before the records, so that those of an ended run are complete
        records = self._read()
        if any(tail.was_replaced for tail in self._tails):
            self.close()
            self._begin()
            records = self._read()
        for record in records:
            self._take(record)
        if records:
            self._heard = time.monotonic()
        readable = [record for record in records if isinstance(record, EventRecord | EvalRecord)]
        news = [record for record in readable if _key(record) not in self._shown]
        self._shown.update(map(_key, readable))
        first, self._polled = not self._polled, True
        shown_news = [] if first else [record for record in news if not (isinstance(record, EventRecord) and record.event in _SILENT)]
        return sorted(shown_news, key=lambda record: record.time_seconds)

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
            case SystemRecord() if record.time_seconds <= self._ended_seconds:  # excludes the calibration after training
                self.nodes.add(record)

    @property
    def node_count(self) -> int:
        """The current number of nodes; before a resume it may have been higher."""
        return self.job["nodes"] if self.job else 0

    @property
    def progress(self) -> float | None:
        """Updates done as a share of all, 0 to 1; None if the total is unknown."""
        return min(1.0, self.training.step / self.total_steps) if self.total_steps else None

    @property
    def time_left(self) -> Estimate | None:
        """The estimate of ``trainer explain``, from recent updates, without an earlier target."""
        if self.ended or self.job is None or self.total_steps is None:
            return None
        plan = read_plan(self.job, self.total_steps, steps_per_epoch(self.job, self.training.examples_per_step))
        blocks = self.training.blocks(pauses(self._evaluated, self._saved))
        stalls = [end - start for start, end in checkpoint_pauses(self._saved)]
        evaluations = [record.seconds for record in self._evaluated]
        translations = [end - start for start, end in end_translations(self._translated)]
        return estimate(plan, Measured(self.training.step, blocks, evaluations, stalls, translations))

    def snapshot(self, news: list[News]) -> dict[str, Any]:
        """Return the state as JSON (null: unknown); `news` is under ``events`` and ``evaluations``."""
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
            "nodes": [_node(*samples) for node, samples in sorted(self.nodes.samples.items()) if node < self.node_count],
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


SILENT_SECONDS = 10  # unit of a reported silence; whether a run on another host lives is unknown here
BAR_WIDTH = 40  # characters of the progress bar
_WITH_FIGURES = ("translated",)  # events with metrics among their details
_STYLES = {"running": "green", "succeeded": "green", "failed": "red", "died": "red", "interrupted": "yellow"}


def title(run: WatchedRun) -> str:
    """Return the run's name and what it trains."""
    if run.job is None:
        return run.reader.name
    state, names = TrainingState(), ("model", "data", "backend", "mode", "nodes", "procs_per_node")
    state.begin(Job.model_validate({name: run.job[name] for name in names if name in run.job}), None)
    return one_line(f"{run.reader.name}: {state.title}")


def state_line(run: WatchedRun) -> str:
    """Return the state, with its cause and a long silence, if any."""
    if run.state == "died":
        driver = run.reader.status()["driver"]
        return f"died: its driver process {driver['pid']} on {driver['host']} is gone and recorded no end state"
    cause = f": {one_line(run.cause)}" if run.cause else ""
    tens = int(run.silent_seconds / SILENT_SECONDS)
    silent = f", silent for {tens * SILENT_SECONDS} s" if tens and run.state == "running" else ""
    return f"{run.state}{cause}{silent}"


def figures_line(run: WatchedRun) -> str | None:
    """Return the training progress in one line; None before its first update."""
    training, speed, left = run.training, run.training.speed(), run.time_left
    if training.loss is None:
        return None
    total = f"/{run.total_steps:,} ({run.progress:.0%})" if run.total_steps and run.progress is not None else ""
    parts = [f"step {training.step:,}{total}", f"epoch {training.epoch + 1}", f"loss {number_text(training.loss)}"]
    if speed is not None:
        parts += [rate_text(speed.steps_per_second, " steps/s"), rate_text(speed.examples_per_second, " examples/s")]
    if left is not None:
        unknown = ", not counting the final translation" if left.translate_seconds is None else ""
        parts.append(f"{duration_text(left.seconds)} left{unknown}")
    return "  ".join(parts)


def node_lines(run: WatchedRun) -> list[str]:
    """Return a line for each node, or some for many nodes together."""
    return [node_text(row) for row in run.nodes.rows(run.node_count)]


def news_line(record: News, metrics: Sequence[MetricInfo]) -> str:
    """Return an evaluation or event in one line, with its time on the run clock."""
    if not isinstance(record, EventRecord):
        return f"{duration_text(record.time_seconds)}  {evaluation_text(record, metrics)}"
    labels = {info.name: info.label for info in metrics} if record.event in _WITH_FIGURES else {}
    detail = ", ".join(_detail(name, value, labels) for name, value in record.detail.items() if value not in (None, {}, []))
    words = record.event.replace("_", " ")
    when = f"{duration_text(record.time_seconds)}  " if record.time_seconds >= 0 else ""
    return one_line(f"{when}{words}: {detail}" if detail else f"{when}{words}")


def _detail(name: str, value: Any, labels: Mapping[str, str]) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name in labels:
            return f"{labels[name]} {number_text(value)}"
        if name.endswith("seconds"):
            return f"{name.removesuffix('seconds').replace('_', ' ').strip() or 'took'} {duration_text(value)}"
        if name.endswith("bytes"):
            return f"{name.removesuffix('bytes').replace('_', ' ')}{bytes_text(value)}"
    shown = " ".join(map(str, value)) if isinstance(value, list) else value
    return f"{name.replace('_', ' ')} {shown}"


def last_evaluation(record: EvalRecord, metrics: Sequence[MetricInfo]) -> str:
    """Return the last evaluation in one line."""
    return f"last {evaluation_text(record, metrics)}"


def is_in_summary(run: WatchedRun) -> bool:
    """Return whether a summary follows, whose figures are of the training only."""
    return run.ended and run.reader.summary() is not None


def picture(run: WatchedRun) -> RenderableType:
    """Return the whole view for a terminal; of an ended run only what its summary does not show."""
    parts: list[RenderableType] = [Text(title(run), style="bold"), Text(state_line(run), style=_STYLES.get(run.state, ""))]
    if is_in_summary(run):
        return Group(*parts)
    if run.progress is not None:
        line = Table.grid()  # a bar does not end its line
        line.add_row(ProgressBar(total=1.0, completed=run.progress, width=BAR_WIDTH))
        parts.append(line)
    figures = figures_line(run)
    if figures is not None:
        parts.append(Text(figures))
    if run.evaluation is not None:
        parts.append(Text(last_evaluation(run.evaluation, run.metrics), style="cyan"))
    rows = run.nodes.rows(run.node_count)
    if rows:
        parts.append(table_of([{name: value or UNKNOWN for name, value in row.items()} for row in rows]))
    return Group(*parts)
