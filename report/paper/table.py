"""Runs as one LaTeX table for a paper: a row for each set-up, a few figures with their intervals, the rest in the caption."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import UsageError
from ..catalog.cpu_starvation import cpu_starvation
from ..catalog.locate import find_sweep
from ..catalog.run import Run, labelled
from ..comparison.comparison import Comparison, compare_runs
from ..comparison.factors import Factor
from ..comparison.seed_statistics import common_stem
from ..tables.columns import Column
from .caption import caption
from .figures import PLUS_MINUS, Cell, PaperColumn, default_columns, figure_columns, scaling_columns
from .latex_text import comment, label
from .rows import WIDE_NAME, name_columns, row_names

__all__ = ["as_latex"]

_COLUMN_POINTS = 246
"""Width of a column of usual journals in two columns (IEEE and ACM: 3.4 in)."""

_SHORTEST_STEM = 3
"""What the names of all runs begin with says something from so many characters on."""

_DIGIT_POINTS = 5
_GAP_POINTS = 12
"""Of Computer Modern at 10 pt: a digit, and what stands between two columns (twice ``\\tabcolsep``)."""


def as_latex(
    runs: Sequence[Run], columns: Sequence[Column] = (), before: Sequence[str] = (), *, by: Sequence[Factor] = (), fold: bool = True
) -> str:
    """Return the table of some finished runs, which needs the package booktabs alone; the lines `before` are comments above it.

    `columns` are figures that were asked for instead of those that a paper needs. Of runs whose cores other programs had, which a comment
    names, the speed and the times are left out. With `by` and `fold` as for `compare_runs`. Raises UsageError where no figure is left.
    """
    known = labelled(runs)
    disturbed = [run for run in known if cpu_starvation(run.summary) is not None]
    comparison = compare_runs(known, fold=fold, by=by)
    figures = [*figure_columns(comparison, columns or default_columns(comparison)), *scaling_columns(comparison)]
    if disturbed and not figures:
        raise UsageError("--latex: CPU contention from other programs voids the speed of every run. Repeat them on a quiet machine.")
    names = name_columns(comparison, by, fold=fold)
    told = caption(comparison, by, {one.group for one in figures}, disturbed, intervals=any(one.has_intervals for one in figures))
    comments = [
        "For LaTeX with \\usepackage{booktabs}, and no other package.",
        *before,
        *(f"Speed and times are not used, because of CPU contention from other programs: {run.name}" for run in disturbed),
        *(f"Copies of one run, which count once: {', '.join(copies)}" for copies in comparison.copies),
    ]
    return "\n".join([*map(comment, comments), *_environment([*names, *figures], told, _label(comparison))]) + "\n"


def _label(comparison: Comparison) -> str:
    """Return what the table is referred to by: the sweep of all runs, what all their names begin with, or the names of its rows."""
    folders = {run.path.parent for run in comparison.runs}
    sweep = find_sweep(str(folders.pop()), Path()) if len(folders) == 1 else None
    if sweep is not None and len(comparison.runs) > 1:
        return label(sweep.resolve().name)
    names = [str(run.summary["run"]) for run in comparison.runs]
    stem = common_stem(names) if len(names) > 1 else names[0]
    return label(stem if len(stem) >= _SHORTEST_STEM or len(names) == 1 else "-".join(row_names(comparison.entries)))


def _environment(columns: Sequence[PaperColumn], told: str, name: str) -> list[str]:
    kind = "table*" if _points(columns) > _COLUMN_POINTS else "table"
    rows = [[_row_cell(one, row[index]) for index, one in enumerate(columns)] for row in zip(*(one.cells for one in columns), strict=True)]
    return [
        f"\\begin{{{kind}}}",
        "  \\centering",
        *(f"  {line}" for line in f"\\caption{{%\n{told}}}".splitlines()),
        f"  \\label{{tab:{name}}}",
        f"  \\begin{{tabular}}{{{''.join(map(_alignment, columns))}}}",
        "    \\toprule",
        f"    {' & '.join(map(_header, columns))} \\\\",
        "    \\midrule",
        *(f"    {' & '.join(cells)} \\\\" for cells in rows),
        "    \\bottomrule",
        "  \\end{tabular}",
        f"\\end{{{kind}}}",
    ]


def _alignment(one: PaperColumn) -> str:
    if one.words:
        return "p{0.4\\linewidth}" if _wraps(one) else "l"
    if not one.has_behind:
        return "r"
    return "r@{ }r" if all(cell.behind.startswith(PLUS_MINUS) for cell in one.cells if cell.behind) else "r@{ }l"


def _wraps(one: PaperColumn) -> bool:
    return any("\\allowbreak" in cell.figure for cell in one.cells)


def _header(one: PaperColumn) -> str:
    return f"\\multicolumn{{2}}{{c}}{{{one.header}}}" if one.has_behind else one.header


def _row_cell(one: PaperColumn, cell: Cell) -> str:
    if _wraps(one):
        return f"\\raggedright {cell.figure}"
    if not one.has_behind:
        return cell.figure
    return f"\\multicolumn{{2}}{{c}}{{{cell.figure}}}" if cell.spans else f"{cell.figure} & {cell.behind}"


def _points(columns: Sequence[PaperColumn]) -> int:
    """Return about how wide the columns are together."""
    widths = [min(max(_signs(one.header), *(_signs(f"{cell.figure} {cell.behind}") for cell in one.cells)), WIDE_NAME) for one in columns]
    return _DIGIT_POINTS * sum(widths) + _GAP_POINTS * (len(columns) - 1)


def _signs(latex: str) -> int:
    """Return about how many signs are seen of a text in LaTeX."""
    seen = re.sub(r"\\makebox\[.*|\\allowbreak\{\}", "", latex)
    return len(re.sub(r"[{}$]", "", re.sub(r"\\[a-zA-Z]+|\\.", "x", seen)).strip())
