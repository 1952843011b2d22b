"""A comparison as tables of text with a row for each run: speed, learning, resources of each node, scaling. Every format uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..catalog.batches import batch_text
from ..comparison.comparison import Comparison
from ..comparison.factors import LEARNING, SPEED, TARGET
from ..comparison.scaling import relative_speed, relative_target
from .alignment import holds_figures
from .columns import MARK, NODE, RUN_COLUMNS, Column, cell, named_node, node_cell, node_lines, relative, run_columns

__all__ = ["TOO_FAST", "ComparisonTable", "default_tables", "selected_table"]

_RELATIVE = "relative to "

TOO_FAST = "‡"
"""Beside an efficiency above 100 % by more than the scatter."""

_SPEED = ("examples_per_second", "steps_per_second", "run_seconds", "train_seconds", "init_seconds")
_LEARNING = ("staleness_mean",)
_CONTEXT = ("backend", "mode", "nodes", "workers", "parameter servers", "global batch", "batch per worker")
_OF_SERIES = frozenset({"nodes", "workers", "global batch", "batch per worker", "global_batch_size", "batch_size", "runs"})
"""Columns that say nothing about a whole series; those of a sweep are called as its fields are."""

_CALLED = ("run", "node")

TextColumn = tuple[str, list[str]]
"""A column: its header and its texts."""


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """A table: its title, its header, and rows of as many texts.

    The first `names` columns say what a row is; the first `words`, those among them, hold words, the others figures.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int
    words: int

    @property
    def right(self) -> tuple[bool, ...]:
        """Which columns stand right: those of figures, also of a setting that is a number; what a run or node is called is none."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        return tuple(
            label not in _CALLED and holds_figures(texts, index >= self.words)
            for index, (label, texts) in enumerate(zip(self.header, columns, strict=True))
        )


def default_tables(comparison: Comparison) -> list[ComparisonTable]:
    """Return the tables of a comparison; figures that no row has are left out."""
    blocks = [_speed(comparison), _learning(comparison), _resources(comparison)]
    if comparison.scaling is not None:
        blocks.append(_scaling(comparison))
    return [block for block in blocks if len(block.header) > block.words and block.rows]


def selected_table(comparison: Comparison, columns: Sequence[Column]) -> list[ComparisonTable]:
    """Return one table with the figures that were asked for; a figure of each node is a column a node."""
    found: list[TextColumn] = []
    for one in columns:
        if one in NODE or one.key.startswith("node_"):
            lines = node_lines(comparison.entries)
            found += [(named_node(node, label, one.header), _node_cells(comparison, one, node)) for node, label in lines]
        else:
            found.append((one.header, _cells(comparison, one)))
    return [_block("", comparison, found)]


def _speed(comparison: Comparison) -> ComparisonTable:
    found = []
    for key in _SPEED:
        found.append(_column(comparison, key))
        if key == "examples_per_second":
            found.append((_RELATIVE + comparison.entries[0].label, _relative(comparison, relative_speed(comparison.entries), SPEED)))
    return _block("Speed", comparison, [column for column in found if _observed(column)], _context(comparison))


def _learning(comparison: Comparison) -> ComparisonTable:
    found = []
    for one in (one for one in run_columns(comparison.runs) if one.group in LEARNING or one.key in _LEARNING):
        column = one.header, _cells(comparison, one)
        found.append(column)
        if one.key == "time_to_target_seconds" and _observed(column):
            found.append((_RELATIVE + comparison.entries[0].label, _relative(comparison, relative_target(comparison.entries), TARGET)))
    return _block("Learning", comparison, [column for column in found if _observed(column)])


def _resources(comparison: Comparison) -> ComparisonTable:
    names = tuple(next(iter(comparison.settings)))
    rows = []
    for entry, settings, marks in zip(comparison.entries, comparison.settings, comparison.marks, strict=True):
        for number, (node, called) in enumerate(node_lines([entry])):
            label = tuple(settings.values()) if number == 0 else ("",) * len(names)
            rows.append((*label, called, *(node_cell(entry, one, node, marks) for one in NODE)))
    return ComparisonTable(
        "Resources of each node", (*names, "node", *(one.header for one in NODE)), tuple(rows), len(names) + 1, len(names) + 1
    )


def _scaling(comparison: Comparison) -> ComparisonTable:
    """Return speed-up and efficiency of each series of rows."""
    others = [{label: text for label, text in one.items() if label not in _OF_SERIES} for one in comparison.settings]
    names = tuple(others[0])
    rows = []
    for series in comparison.scaling or ():
        tokens = comparison.entries[series.points[0].entry].runs[0].job.get("batch_tokens")
        kind = f"{series.kind}, {'global batch' if series.kind == 'strong' else 'batch per worker'} {batch_text(series.batch, tokens)}"
        base = series.points[0].entry
        for point in series.points:
            mark = MARK if SPEED in comparison.comparability.confounded(base, point.entry) else ""
            beyond = TOO_FAST if point.too_fast else ""
            efficiency = "-" if point.efficiency is None else f"{100 * point.efficiency:.0f}%{mark}{beyond}"
            label = (kind, *others[point.entry].values()) if point is series.points[0] else ("",) * (len(names) + 1)
            rows.append((*label, str(point.nodes), relative(point.speedup, marked=bool(mark)), efficiency))
    return ComparisonTable("Scaling", ("scaling", *names, "nodes", "speed-up", "efficiency"), tuple(rows), len(names) + 1, len(names) + 1)


def _column(comparison: Comparison, key: str) -> TextColumn:
    one = next(one for one in RUN_COLUMNS if one.key == key)
    return one.header, _cells(comparison, one)


def _cells(comparison: Comparison, one: Column) -> list[str]:
    return [cell(entry, one, marks) for entry, marks in zip(comparison.entries, comparison.marks, strict=True)]


def _node_cells(comparison: Comparison, one: Column, node: int | str) -> list[str]:
    return [node_cell(entry, one, node, marks) for entry, marks in zip(comparison.entries, comparison.marks, strict=True)]


def _relative(comparison: Comparison, values: Sequence[float | None], group: str) -> list[str]:
    return [relative(value, marked=group in marks) for value, marks in zip(values, comparison.marks, strict=True)]


def _observed(column: TextColumn) -> bool:
    return any(text not in ("-", "") for text in column[1])


def _names(comparison: Comparison) -> list[TextColumn]:
    """Return the columns that say what a row is."""
    return [(label, [one[label] for one in comparison.settings]) for label in comparison.settings[0]]


def _context(comparison: Comparison) -> list[TextColumn]:
    """Return columns for the settings that are compared, apart from those that name the rows."""
    compared = [difference for difference in comparison.comparability.independent if difference.label in _CONTEXT]
    workers_are_nodes = all(entry.figures["workers"] == entry.figures["nodes"] for entry in comparison.entries)
    left_out = {*comparison.settings[0], *(["workers"] if workers_are_nodes else [])}
    return [(one.label, [value or "-" for value in one.values]) for one in compared if one.label not in left_out]


def _block(title: str, comparison: Comparison, figures: Sequence[TextColumn], context: Sequence[TextColumn] = ()) -> ComparisonTable:
    names = _names(comparison)
    columns = [*names, *context, *figures]
    header = tuple(label for label, _ in columns)
    rows = tuple(zip(*(texts for _, texts in columns), strict=True))
    return ComparisonTable(title, header, rows, len(names), len(names) + len(context))
