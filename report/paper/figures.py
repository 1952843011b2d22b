"""The figures of a paper's table: a column each, in one unit, with as many decimals in every row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...metrics.base import PERCENTAGES
from ...records.text.many_nodes import statistic
from ...records.text.numbers import UNKNOWN
from ..catalog.cpu_starvation import TIMED_FIGURES, timed_runs
from ..catalog.summary_rows import number, row
from ..comparison.comparison import Comparison
from ..comparison.factors import LEARNING, LOSS, SPEED, TARGET
from ..comparison.rows import Row
from ..tables.columns import NODE, Column, column, metric_columns, named_node, node_lines
from .estimates import Estimate, decimals, estimate, number_latex
from .latex_text import latex_text

__all__ = ["PLUS_MINUS", "Cell", "PaperColumn", "default_columns", "figure_columns", "scaling_columns"]

_MARK = r"\makebox[0pt][l]{$^\dagger$}"
"""Takes no room, so that figures with it and without it stand below each other."""

PLUS_MINUS = r"$\pm$"

_DECIMALS_OF_METRICS = 4
_DECIMALS_OF_PERCENTAGES = 2

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as LaTeX: `figure`, and what stands behind it (± and half the width of the interval, or of how many repeats it is)."""

    figure: str
    behind: str = ""
    spans: bool = False
    """Whether it is words, in the place of both."""


@dataclass(frozen=True, slots=True)
class PaperColumn:
    """A column: its header as LaTeX, with its unit, and a cell for each row. Words stand left, figures right."""

    header: str
    cells: tuple[Cell, ...]
    words: bool = False
    group: str | None = None
    """The kind (`factors.GROUPS`) that its figures are of."""

    @property
    def has_behind(self) -> bool:
        """Whether something stands behind a figure of it."""
        return any(cell.behind for cell in self.cells)

    @property
    def has_intervals(self) -> bool:
        """Whether what stands behind a figure of it is half the width of an interval."""
        return any(cell.behind.startswith(PLUS_MINUS) for cell in self.cells)


def default_columns(comparison: Comparison) -> list[Column]:
    """Return what a paper needs: the metrics, or the loss where there is none; the time to target where there was one; examples/s.

    Of translations those of all test sentences at the end, where a run has them. Nothing that was learnt is told of synthetic data.
    """
    synthetic = all(run.summary.get("synthetic") for run in comparison.runs)
    metrics = metric_columns(comparison.runs)
    at_the_end = {one.key.removeprefix("end_") for one in metrics if one.key.startswith("end_")}
    learnt = [one for one in metrics if one.key.removeprefix("eval_") not in at_the_end] or [column("loss")]
    target = [column("time_to_target")] if any(entry.converged is not None for entry in comparison.entries) else []
    return [*([] if synthetic else learnt), *target, column("examples_per_second")]


def figure_columns(comparison: Comparison, columns: Sequence[Column]) -> list[PaperColumn]:
    """Return the columns of some figures; one of each node is a column a node. What no row has is left out."""
    known = {id(run): row(run.summary) for entry in comparison.entries for run in entry.runs}
    found = []
    for one in columns:
        if one in NODE or one.key.startswith("node_"):
            for node, label in node_lines(comparison.entries):
                found.append(_column(comparison, one, known, named_node(node, label, one.header), _of_node(one.key, node)))
        else:
            found.append(_column(comparison, one, known, one.header, _of_run(one.key)))
    return [one for one in found if any(cell.figure != UNKNOWN for cell in one.cells)]


Read = Callable[[Mapping[str, Any]], Any]
"""Reads a figure from a flat row of a run."""


def _of_run(key: str) -> Read:
    return lambda flat: flat.get(key)


def _of_node(key: str, node: int | str) -> Read:
    def read(flat: Mapping[str, Any]) -> Any:
        values = flat.get(key) or []
        return statistic(node, values) if isinstance(node, str) else values[node] if node < len(values) else None

    return read


def _column(comparison: Comparison, one: Column, known: Mapping[int, Mapping[str, Any]], header: str, read: Read) -> PaperColumn:
    marked = [one.group in marks for marks in comparison.marks]
    counting = [timed_runs(entry.runs) if one.key in TIMED_FIGURES else entry.runs for entry in comparison.entries]
    values = [[read(known[id(run)]) for run in runs] for runs in counting]
    if any(value is not None and (isinstance(value, bool | list) or number(value) is None) for each in values for value in each):
        words = tuple(Cell(_words(each) + (_MARK if mark else "")) for each, mark in zip(values, marked, strict=True))
        return PaperColumn(latex_text(header), words, words=True, group=one.group)
    estimates = [estimate([number(value) for value in each]) for each in values]
    factor, unit = _unit(one.key, [found.mean for found in estimates if found is not None])
    scaled = [None if found is None else found.scaled(factor) for found in estimates]
    digits = _digits(one, [found for found in scaled if found is not None])
    cells = [_cell(one, entry, found, digits, marked=mark) for entry, found, mark in zip(comparison.entries, scaled, marked, strict=True)]
    return PaperColumn(latex_text(f"{header} ({unit})" if unit else header), tuple(cells), group=one.group)


def _words(values: Sequence[Any]) -> str:
    return latex_text(", ".join(dict.fromkeys(UNKNOWN if value is None else str(value) for value in values)))


def _unit(key: str, means: Sequence[float]) -> tuple[float, str]:
    """Return what figures are multiplied by, and the unit that this gives; none where the figure's name says it, or it has none."""
    largest = max((abs(mean) for mean in means), default=0.0)
    if "_bytes" in key:
        size, unit = next(((size, unit) for size, unit in reversed(_BYTES) if largest < 1000 * size), _BYTES[0])
        return 1 / size, f"{unit}/s" if key.endswith("_second") else unit
    if "_seconds" in key:
        return (1000.0, "ms") if 0 < largest < 1 else (1.0, "s")
    return (100.0, "%") if "_fraction" in key else (1.0, "")


def _digits(one: Column, estimates: Sequence[Estimate]) -> int:
    """Return how many decimals a column has: of a metric as many as in other tables, none of what is counted, else by the smallest."""
    means = [found.mean for found in estimates]
    if one.group == LOSS or (one.group in LEARNING and one.group != TARGET):
        percentages = one.key.removeprefix("best_").removeprefix("eval_").removeprefix("end_") in PERCENTAGES
        return _DECIMALS_OF_PERCENTAGES if percentages else _DECIMALS_OF_METRICS
    counted = all(found.mean.is_integer() and not found.half_width for found in estimates)
    return 0 if counted else decimals(means)


def _cell(one: Column, entry: Row, found: Estimate | None, digits: int, *, marked: bool) -> Cell:
    to_target = one.key == "time_to_target_seconds" and entry.converged is not None
    if to_target and entry.converged == 0:
        return Cell("not reached", spans=True)
    if found is None:
        return Cell(UNKNOWN)
    mark = _MARK if marked else ""
    figure = number_latex(found.mean, digits)
    if to_target and not entry.all_converged:
        count = "" if found.repeats == entry.converged else f", $n={found.repeats}$"
        return Cell(figure, f"({entry.converged} of {len(entry.runs)}{count}){mark}")
    count = rf" ($n={found.repeats}$)" if found.repeats < len(entry.runs) else ""
    if found.half_width is None:
        return Cell(figure + mark, count.strip())
    return Cell(figure, f"{PLUS_MINUS} {_half_width(found.half_width, digits)}{mark}{count}")


def _half_width(value: float, digits: int) -> str:
    smallest = 10.0**-digits
    return f"\\textless{{}}{smallest:.{digits}f}" if 0 < value < smallest / 2 else number_latex(value, digits)


def scaling_columns(comparison: Comparison) -> list[PaperColumn]:
    """Return speed-up and parallel efficiency of rows that are grouped by nodes, for each kind of scaling that they show."""
    found = []
    speeds = [estimate([number(run.summary["examples_per_second"]) for run in timed_runs(entry.runs)]) for entry in comparison.entries]
    kinds = list(dict.fromkeys(series.kind for series in comparison.scaling or ()))
    for kind in kinds:
        speedups: dict[int, Cell] = {}
        efficiencies: dict[int, Cell] = {}
        for series in (one for one in comparison.scaling or () if one.kind == kind):
            base = series.points[0]
            for point in series.points:
                own, first = speeds[point.entry], speeds[base.entry]
                if own is None or first is None or not first.mean:
                    continue
                mark = _MARK if SPEED in comparison.comparability.confounded(base.entry, point.entry) else ""
                times = own.mean / first.mean
                speedups[point.entry] = Cell(f"{number_latex(times, 2)}{mark}")
                if point.efficiency is not None:
                    efficiencies[point.entry] = Cell(f"{number_latex(100 * times * base.nodes / point.nodes, 0)}{mark}")
        which = f"{kind} " if len(kinds) > 1 else ""
        found += [_placed(f"{which}speed-up", speedups, comparison), _placed(f"{which}efficiency (%)", efficiencies, comparison)]
    return found


def _placed(header: str, cells: Mapping[int, Cell], comparison: Comparison) -> PaperColumn:
    every = tuple(cells.get(index, Cell(UNKNOWN)) for index in range(len(comparison.entries)))
    return PaperColumn(latex_text(header), every, group=SPEED)
