"""Aligns plain tables: columns of figures to the right, columns of words to the left; and measures how wide a text is on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.cells import cell_len as text_width

__all__ = ["GAP", "holds_figures", "plain_lines", "text_width"]

GAP = "  "
"""Stands between the columns of a plain table."""

_SAYS_NOTHING = frozenset({"", "-", "–", "not reached", "none", "NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"})
"""Stand in columns of either kind."""

_FIGURE = re.compile(r"[-−+]?\.?\d(?!.*([^\W\d_]{5}|_))", re.DOTALL)
"""A number, perhaps with its unit, its spread or its kind behind it; names of runs and settings that begin with one have longer words."""


def holds_figures(texts: Iterable[str], otherwise: bool = True) -> bool:
    """Return whether the cells of a column are figures; `otherwise` where none of them says anything."""
    telling = [text for text in (cell.removesuffix("†").strip() for cell in texts) if text not in _SAYS_NOTHING]
    return all(_FIGURE.match(text) for text in telling) if telling else otherwise


def plain_lines(columns: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Return the lines of a table, given as columns of equally many texts, padded to the width that they have on a terminal.

    A sign of Chinese takes two places there, an accent that stands by itself none. `right` says which columns stand right.
    """
    padded = []
    for column, figures in zip(columns, right, strict=True):
        widths = [text_width(text) for text in column]
        widest = max(widths, default=0)
        blanks = [" " * (widest - width) for width in widths]
        padded.append([f"{blank}{text}" if figures else f"{text}{blank}" for text, blank in zip(column, blanks, strict=True)])
    return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)]
