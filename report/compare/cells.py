"""The cells of tables: figures with their intervals and marks, and plain tables of texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.cells import cell_len as text_width

from ...core.setting import TARGET
from ...records.text import UNKNOWN, bytes_text, count_text, lines_of, statistic
from ..runs.columns import Column, decimal, plain
from .rows import Row

MARK = "†"  # a figure that is not comparable with the first row's


def cell(entry: Row, column: Column, marks: Collection[str] = (), node: int | str | None = None) -> str:
    """Return a figure as text: a mean with ± half its 95 % interval.

    It is marked if its kind is in `marks`. `node` is a line of `node_lines`; the text is empty for a missing node.
    """
    value, half = entry.figures.get(column.key), entry.half_widths.get(column.key)
    if isinstance(node, str):
        value, half = None if value is None else statistic(node, value), None
    elif node is not None:
        if value is None or node >= len(value):
            return "" if node >= (entry.figures["nodes"] or 0) else UNKNOWN
        value, half = value[node], None if half is None else half[node]
    elif column.key == "time_to_target_seconds" and entry.converged == 0:
        return "not reached"
    fewer = "" if isinstance(node, str) else _of_fewer(entry, column)
    return _spread(column, value, half) + fewer + (MARK if value is not None and column.group in marks else "")


def cells(entries: Sequence[Row], marks: Sequence[Collection[str]], column: Column, node: int | str | None = None) -> list[str]:
    """Return the `cell` of each row."""
    return [cell(entry, column, row_marks, node) for entry, row_marks in zip(entries, marks, strict=True)]


def node_lines(entries: Iterable[Row]) -> list[tuple[int | str, str]]:
    """Return the nodes of these rows with their labels; of many nodes the names of statistics."""
    counts = {entry.node_count for entry in entries}
    of = f" of {max(counts):,}" if len(counts) == 1 else ""
    return [(line, str(line) if isinstance(line, int) else f"{line}{of}") for line in lines_of(max(counts))]


def named_node(node: int | str, label: str, figure: str) -> str:
    """Return the label of a figure of a line of `node_lines`."""
    return f"node {label} {figure}" if isinstance(node, int) else f"{label} nodes: {figure}"


def _of_fewer(entry: Row, column: Column) -> str:
    """Return of how many runs a mean is, if not of all."""
    count = entry.counts.get(column.key)
    if column.key != "time_to_target_seconds" or entry.converged is None or entry.all_converged:
        return "" if count is None else f" (n={count})"
    return f" ({entry.converged} of {len(entry.runs)}{'' if count in (None, entry.converged) else f', n={count}'})"


def _spread(column: Column, value: Any, half: float | None) -> str:
    show = column.show
    if not half or show in (count_text, plain):
        return show(value)
    if column.unit in ("bytes", "bytes/s"):
        return f"{show(value)} ± {bytes_text(half, per_second=column.unit == 'bytes/s', like=value)}"
    return f"{show(value)} ± {f'{half:.2f}' if show is decimal else show(half)}"


def relative_text(value: float | None, *, marked: bool = False) -> str:
    """Return a ratio as text."""
    return UNKNOWN if value is None else f"{value:.2f}x{MARK if marked else ''}"


def relative_to_first(entries: Sequence[Row], column: Column) -> list[float | None]:
    """Return how many times as good as the first row's each figure is.

    None if either is unknown, or a run missed its target.
    """
    values = [entry.figures.get(column.key) if column.group != TARGET or entry.all_converged else None for entry in entries]
    if column.better > 0:
        return [None if value is None or not values[0] else value / values[0] for value in values]
    return [None if not value or not values[0] else values[0] / value for value in values]


def relative(entries: Sequence[Row], marks: Sequence[Collection[str]], column: Column) -> list[str]:
    """Return the ratios to the first row's figure as texts.

    They are marked if the figure's kind is in a row's `marks`.
    """
    values = relative_to_first(entries, column)
    return [relative_text(value, marked=column.group in row_marks) for value, row_marks in zip(values, marks, strict=True)]


GAP = "  "  # between the columns of a plain table
_SAYS_NOTHING = frozenset({"", "-", "–", "not reached", "none", "NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"})
# A number with an optional unit, spread or kind; names that start with a digit have longer words.
_FIGURE = re.compile(r"[-−+]?\.?\d(?!.*([^\W\d_]{5}|_))", re.DOTALL)


def holds_figures(texts: Iterable[str], otherwise: bool = True) -> bool:
    """Return whether the cells of a column are figures; `otherwise` if all of them are empty."""
    telling = [text for text in (cell.removesuffix("†").strip() for cell in texts) if text not in _SAYS_NOTHING]
    return all(_FIGURE.match(text) for text in telling) if telling else otherwise


def plain_lines(columns: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Return a table's lines, padded by terminal width; `right`: right-aligned columns."""
    padded = []
    for column, figures in zip(columns, right, strict=True):
        widths = [text_width(text) for text in column]
        widest = max(widths, default=0)
        blanks = [" " * (widest - width) for width in widths]
        padded.append([f"{blank}{text}" if figures else f"{text}{blank}" for text, blank in zip(column, blanks, strict=True)])
    return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)]
