"""Pictures on a terminal, of which the layout is ours and the text may be anybody's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from .console import raw_stream, shown

__all__ = ["Drawing"]


class Drawing(Console):
    """A console of rich whose own control sequences reach the terminal, while those within a text are shown.

    A text in brackets is no markup either: it would set colours and links.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=raw_stream(stream), highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the pieces of something to be drawn."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
