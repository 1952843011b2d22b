"""Progress drawn in place on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...core.job import Job
from ...core.untrusted.terminal_pictures import Drawing
from ...metrics import MetricInfo
from ...records.schema import EvalRecord, SystemRecord
from ...records.text.progress import NodeSamples, TrainingState, evaluation_text

__all__ = ["RichProgress"]

REFRESH_SECONDS = 0.25
"""Shortest time between two pictures."""


class RichProgress:
    """Draws in place on a terminal, at most four times a second and only when something has changed."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Drawing(stream)
        self._state = TrainingState()
        self._metrics: Sequence[MetricInfo] = ()
        self._nodes = NodeSamples()
        self._live: Live | None = None
        self._drawn = 0.0
        self._doing: str | None = None

    def start(self, job: Job, metrics: Sequence[MetricInfo], total_steps: int | None) -> None:
        """Begin to draw."""
        self._state.begin(job, total_steps)
        self._metrics = metrics
        self._live = Live(
            console=self._console, auto_refresh=False, get_renderable=self._picture, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start(refresh=True)

    def update(self, step: int, loss: float, steps_per_second: float | None, time_left_seconds: float | None, epoch: float) -> None:
        """Take note, and draw when the last picture is old enough."""
        self._state.update(step, loss, steps_per_second, time_left_seconds, epoch)
        self._draw()

    def node(self, record: SystemRecord) -> None:
        """Take note of a node."""
        self._nodes.add(record)
        self._draw()

    def evaluation(self, record: EvalRecord) -> None:
        """Leave a line above the picture."""
        self._console.print(Text(evaluation_text(record, self._metrics)))

    def doing(self, text: str | None) -> None:
        """Show it in the picture until it is over."""
        if text != self._doing:
            self._doing = text
            self._draw()

    def message(self, text: str) -> None:
        """Leave a line above the picture."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Draw a last time and leave the picture standing."""
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
        parts: list[Text | Table] = [Text(state.title, style="bold")]
        parts.append(Text(state.line() if state.loss is not None else "starting"))
        if self._doing is not None:
            parts.append(Text(self._doing))
        rows = self._nodes.rows()
        if rows:
            parts.append(_node_table(rows))
        return Group(*parts)


def _node_table(rows: list[Mapping[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table
