"""Drawings on a terminal, with texts from any source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from .console import raw_stream, shown


class Drawing(Console):
    """A console of rich that shows control characters and markup instead of obeying them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=raw_stream(stream), highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments to draw; only rich's own control sequences reach the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def table_of(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table with one row per node; the column ``node`` is text, the others are figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table
