"""Progress as plain lines, for log files and for terminals that cannot draw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from ...core.job import Job
from ...metrics import MetricInfo
from ...records.schema import EvalRecord, SystemRecord
from ...records.text.numbers import count_text
from ...records.text.progress import NodeSamples, TrainingState, evaluation_text, node_text

__all__ = ["PlainProgress"]

LINE_SECONDS = 2.0
"""Time between two lines about the training."""

NODES_SECONDS = 10.0
"""Time between two groups of lines about the nodes."""


class PlainProgress:
    """Writes plain lines: about every two seconds, and for every evaluation; on the nodes, and on what gets on slowly, about every ten."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._state = TrainingState()
        self._metrics: Sequence[MetricInfo] = ()
        self._nodes = NodeSamples(until_shown=True)
        self._started = self._paused = False
        self._said = ""
        self._written = self._nodes_written = self._updated = 0.0

    def start(self, job: Job, metrics: Sequence[MetricInfo], total_steps: int | None) -> None:
        """Write what will be trained."""
        self._state.begin(job, total_steps)
        self._metrics = metrics
        self._started = True
        self._written = self._nodes_written = self._updated = time.monotonic()
        self._nodes = NodeSamples(until_shown=True)  # what was sent before is no traffic of the training
        total = f", {count_text(total_steps)} steps" if total_steps is not None else ""
        self.message(f"training {self._state.title}{total}")

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Write a line when the last one is old enough."""
        self._state.update(step, loss, steps_per_second, time_left_seconds, epoch)
        self._resumed()
        now = self._updated
        if now - self._written >= LINE_SECONDS:
            self._written = now
            self.message(self._state.line())

    def node(self, record: SystemRecord) -> None:
        """Write a line for each node, once training has begun and when the last ones are old enough."""
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
        """Write a line when the last one is old enough; the same one again only after as long as lines about the nodes take."""
        self._paused = self._paused or text is not None
        now = time.monotonic()
        if text is not None and now - self._written >= (NODES_SECONDS if text == self._said else LINE_SECONDS):
            self._written = now
            self._said = text
            self.message(text)
        elif text is None:
            self._said = ""

    def _resumed(self) -> None:
        self._paused = False
        self._nodes.pausing()
        self._updated = time.monotonic()

    def message(self, text: str) -> None:
        """Write a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Write where training stands; a second call does nothing."""
        self._state.end()
        if self._state.loss is not None:
            self.message(self._state.line())
            self._state.loss = None
