"""Live progress on standard error: step, loss, speed, time left and nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from ..core.job import Job
from ..metrics import MetricInfo
from ..records.store.schema import EvalRecord, SystemRecord
from ..records.text import NodeSamples, TrainingState, count_text, evaluation_text, node_text

LINE_SECONDS = 2.0  # between two lines about training
NODES_SECONDS = 10.0  # between two groups of lines about nodes


class Progress(Protocol):
    """Receiver of a run's progress; calls are cheap, at any rate and from any thread."""

    def start(self, job: Job, metrics: Sequence[MetricInfo], total_steps: int | None) -> None:
        """Start a run with these metrics; `total_steps` is None where only a target ends it."""

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Show `step` reported updates, the last with this loss, in this epoch (from 0)."""

    def node(self, record: SystemRecord) -> None:
        """Show a node's sample."""

    def evaluation(self, record: EvalRecord) -> None:
        """Show a finished evaluation."""

    def doing(self, text: str | None) -> None:
        """Show an activity other than training with its progress; None when it is over."""

    def message(self, text: str) -> None:
        """Show a text."""

    def close(self) -> None:
        """End the progress; a second call does nothing."""


class QuietProgress:
    """Progress that shows nothing."""

    def start(self, *_: object, **__: object) -> None:
        """Ignore everything."""

    update = node = evaluation = doing = message = close = start


class PlainProgress:
    """Plain lines, about every two seconds and per evaluation; about nodes every ten."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._state = TrainingState()
        self._metrics: Sequence[MetricInfo] = ()
        self._nodes = NodeSamples(until_shown=True)
        self._started = self._paused = False
        self._last_text = ""
        self._written = self._nodes_written = self._updated = 0.0

    def start(self, job: Job, metrics: Sequence[MetricInfo], total_steps: int | None) -> None:
        """Write the job's summary."""
        self._state.begin(job, total_steps)
        self._metrics = metrics
        self._started = True
        self._written = self._nodes_written = self._updated = time.monotonic()
        self._nodes = NodeSamples(until_shown=True)  # traffic before training does not count
        total = f", {count_text(total_steps)} steps" if total_steps is not None else ""
        self.message(f"training {self._state.title}{total}")

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Write a line when the last is old enough."""
        self._state.update(step, loss, steps_per_second, time_left_seconds, epoch)
        self._resumed()
        now = self._updated
        if now - self._written >= LINE_SECONDS:
            self._written = now
            self.message(self._state.line())

    def node(self, record: SystemRecord) -> None:
        """Write a line per node, once training has begun and the last lines are old enough."""
        self._nodes.add(record)
        now = time.monotonic()
        if self._paused:
            self._nodes.pausing(record.time_seconds - (now - self._updated))
        if self._started and now - self._nodes_written >= NODES_SECONDS:
            self._nodes_written = now
            for row in self._nodes.rows():
                self.message(node_text(row))
            self._nodes.shown()

    def evaluation(self, record: EvalRecord) -> None:
        """Write a line."""
        self._resumed()
        self._nodes.paused(record.time_seconds - record.seconds, record.time_seconds)
        self.message(evaluation_text(record, self._metrics))

    def doing(self, text: str | None) -> None:
        """Write a line when the last is old enough; a repeated text only at the nodes' rate."""
        self._paused = self._paused or text is not None
        now = time.monotonic()
        if text is not None and now - self._written >= (NODES_SECONDS if text == self._last_text else LINE_SECONDS):
            self._written = now
            self._last_text = text
            self.message(text)
        elif text is None:
            self._last_text = ""

    def _resumed(self) -> None:
        self._paused = False
        self._nodes.pausing()
        self._updated = time.monotonic()

    def message(self, text: str) -> None:
        """Write a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Write the final state; a second call does nothing."""
        self._state.end()
        if self._state.loss is not None:
            self.message(self._state.line())
            self._state.loss = None


def terminal(stream: TextIO, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether `stream` is a terminal with control sequences, without NO_COLOR."""
    known = os.environ if environment is None else environment
    return stream.isatty() and not known.get("NO_COLOR") and known.get("TERM", "dumb") != "dumb"


def make_progress(stream: TextIO, quiet: bool) -> Progress:
    """Return progress for the stream.

    It is drawn on a terminal, plain lines elsewhere, none if `quiet`.
    """
    if quiet:
        return QuietProgress()
    if not terminal(stream):
        return PlainProgress(stream)
    from .terminal_progress import RichProgress

    return RichProgress(stream)
