"""What the rows of a paper's table are called: the set-ups by the settings in which they differ, numbers in columns of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...records.text.numbers import UNKNOWN
from ..comparison.comparison import Comparison
from ..comparison.factors import Factor
from ..comparison.rows import Row
from ..comparison.seed_statistics import common_stem
from ..conclusion.set_ups import axes_of, called, shown
from .figures import Cell, PaperColumn
from .latex_text import latex_text

__all__ = ["WIDE_NAME", "name_columns", "row_names"]

WIDE_NAME = 40
"""Longer names of set-ups, in characters, are broken into lines."""


def name_columns(comparison: Comparison, by: Sequence[Factor], *, fold: bool) -> list[PaperColumn]:
    """Return the columns that say what a row is: the set-up in words, settings that are numbers, and of how many runs, where that differs.

    Rows that their settings do not tell apart, and runs that are not folded, have their names as well.
    """
    rows = comparison.entries
    axes = axes_of(rows, by)
    values = [{axis.key: axis.value(row.runs[0]) for axis in axes} for row in rows]
    numbers = [axis for axis in axes if all(_is_number(one[axis.key]) for one in values)]
    words = [axis for axis in axes if axis not in numbers]
    told_apart = len({tuple(one.values()) for one in values}) == len(rows)
    names = row_names(rows)
    set_ups = [called(words, one) if words else "" for one in values]
    if not fold or not told_apart or not axes:
        set_ups = [f"{set_up} ({name})" if set_up else name for set_up, name in zip(set_ups, names, strict=True)]
    columns = []
    if any(set_ups):
        wide = max(map(len, set_ups)) > WIDE_NAME
        columns.append(PaperColumn("configuration", tuple(Cell(latex_text(text, breakable=wide)) for text in set_ups), words=True))
    columns += [_numbers(axis, [one[axis.key] for one in values]) for axis in numbers]
    counts = [len(row.runs) for row in rows]
    if len(set(counts)) > 1:
        columns.append(PaperColumn("runs", tuple(Cell(f"{count:,}") for count in counts)))
    return columns


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def row_names(rows: Sequence[Row]) -> list[str]:
    """Return a name for each row, no two alike: what the names of its runs begin with, or the first run's."""
    stems = [common_stem([str(run.summary["run"]) for run in row.runs]) if len(row.runs) > 1 else "" for row in rows]
    return [stem if stem and stems.count(stem) == 1 else row.runs[0].name for stem, row in zip(stems, rows, strict=True)]


def _numbers(axis: Factor, values: Sequence[Any]) -> PaperColumn:
    """Return a column of a setting, with its numbers below each other by their decimal points."""
    texts = [UNKNOWN if value is None else shown(axis, value) for value in values]
    fractions = [len(text.partition(".")[2]) if "e" not in text else 0 for text in texts]
    cells = []
    for text, digits in zip(texts, fractions, strict=True):
        lacking = max(fractions) - digits
        point = "." if lacking and not digits else ""
        padding = rf"\phantom{{{point}{'0' * lacking}}}" if lacking and text != UNKNOWN else ""
        cells.append(Cell(latex_text(text) + padding))
    return PaperColumn(latex_text(axis.label), tuple(cells))
