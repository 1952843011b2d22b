"""Progress drawn on a terminal; imported on demand, as importing rich is slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..core.job import Job
from ..core.terminal_pictures import Drawing, table_of
from ..metrics import MetricInfo
from ..records.store.schema import EvalRecord, SystemRecord
from ..records.text import NodeSamples, TrainingState, evaluation_text

REFRESH_SECONDS = 0.25  # shortest time between two drawings


class RichProgress:
    """Progress redrawn in place at most four times a second, and only on changes."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Drawing(stream)
        self._state = TrainingState()
        self._metrics: Sequence[MetricInfo] = ()
        self._nodes = NodeSamples()
        self._live: Live | None = None
        self._drawn = 0.0
        self._doing: str | None = None

    def start(self, job: Job, metrics: Sequence[MetricInfo], total_steps: int | None) -> None:
        """Start drawing."""
        self._state.begin(job, total_steps)
        self._metrics = metrics
        self._live = Live(
            console=self._console, auto_refresh=False, get_renderable=self._picture, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start(refresh=True)

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Store the figures; draw when the last drawing is old enough."""
        self._state.update(step, loss, steps_per_second, time_left_seconds, epoch)
        self._draw()

    def node(self, record: SystemRecord) -> None:
        """Store a node's sample."""
        self._nodes.add(record)
        self._draw()

    def evaluation(self, record: EvalRecord) -> None:
        """Print a line above the drawing."""
        self.message(evaluation_text(record, self._metrics))

    def doing(self, text: str | None) -> None:
        """Show an activity until it is over."""
        if text != self._doing:
            self._doing = text
            self._draw()

    def message(self, text: str) -> None:
        """Print a line above the drawing."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Draw a last time."""
        self._state.end()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        now = time.monotonic()
        live = self._live
        if live is not None and now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            live.refresh()

    def _picture(self) -> Group:
        state = self._state
        parts: list[Text | Table] = [Text(state.title, style="bold"), Text(state.line() if state.loss is not None else "starting")]
        if self._doing is not None:
            parts.append(Text(self._doing))
        rows = self._nodes.rows()
        if rows:
            parts.append(table_of(rows))
        return Group(*parts)
