"""The cells of tables: figures with their intervals and marks, and plain tables of texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.cells import cell_len as text_width

from ...records.text import UNKNOWN, bytes_text, count_text, lines_of, statistic
from ..runs.columns import Column, Show, bytes_rate, decimal, plain
from .rows import Row

MARK = "†"  # a figure that is not comparable with the first row's


def cell(entry: Row, one: Column, marks: Collection[str] = ()) -> str:
    """Return a figure as text: a mean with ± half its 95 % interval, marked if in `marks`."""
    value, half = entry.figures.get(one.key), entry.half_widths.get(one.key)
    if one.key == "time_to_target_seconds" and entry.converged == 0:
        return "not reached"
    text = _spread(one.show, value, half) + _of_fewer(entry, one)
    if one.key == "time_to_target_seconds" and entry.converged is not None and not entry.all_converged:
        count = entry.counts.get(one.key, entry.converged)
        text += f" ({entry.converged} of {len(entry.runs)}{'' if count == entry.converged else f', n={count}'})"
    return text + (MARK if value is not None and one.group in marks else "")


def node_lines(entries: Iterable[Row]) -> list[tuple[int | str, str]]:
    """Return the nodes of these rows with their labels; of many nodes the names of statistics."""
    counts = {entry.node_count for entry in entries}
    of = f" of {max(counts):,}" if len(counts) == 1 else ""
    return [(line, str(line) if isinstance(line, int) else f"{line}{of}") for line in lines_of(max(counts))]


def named_node(node: int | str, label: str, figure: str) -> str:
    """Return the label of a figure of a line of `node_lines`."""
    return f"node {label} {figure}" if isinstance(node, int) else f"{label} nodes: {figure}"


def node_cell(entry: Row, one: Column, node: int | str, marks: Collection[str] = ()) -> str:
    """Return one node's figure, or a statistic over all, as text; empty for a missing node."""
    values, halves = entry.figures[one.key], entry.half_widths.get(one.key)
    if isinstance(node, str):
        found = None if values is None else statistic(node, values)
        return one.show(found) + (MARK if found is not None and one.group in marks else "")
    if values is None or node >= len(values):
        return "" if node >= (entry.figures["nodes"] or 0) else UNKNOWN
    text = _spread(one.show, values[node], None if halves is None else halves[node]) + _of_fewer(entry, one)
    return text + (MARK if values[node] is not None and one.group in marks else "")


def _of_fewer(entry: Row, one: Column) -> str:
    count = entry.counts.get(one.key)
    return "" if count is None or (one.key == "time_to_target_seconds" and not entry.all_converged) else f" (n={count})"


def _spread(show: Show, value: Any, half: float | None) -> str:
    if not half or show in (count_text, plain):
        return show(value)
    if show in (bytes_text, bytes_rate):
        return f"{show(value)} ± {bytes_text(half, per_second=show is bytes_rate, like=value)}"
    return f"{show(value)} ± {f'{half:.2f}' if show is decimal else show(half)}"


def relative_text(value: float | None, *, marked: bool = False) -> str:
    """Return a ratio as text."""
    return UNKNOWN if value is None else f"{value:.2f}x{MARK if marked else ''}"


def relative(values: Sequence[float | None], group: str, marks: Sequence[Collection[str]]) -> list[str]:
    """Return ratios of a kind of figures as texts, marked if the kind is in a row's `marks`."""
    return [relative_text(value, marked=group in own) for value, own in zip(values, marks, strict=True)]


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
