"""A LaTeX table of configurations with intervals, and a caption, for a paper."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.setting import TARGET, WORK
from ...records.text import UNKNOWN
from ..analysis.configurations import bare_value_text, find_axes, values_label
from ..analysis.sentences import shared_settings
from ..compare.cells import MARK
from ..compare.comparison import Comparison, compare_runs
from ..compare.comparison_tables import enumerated, not_comparable
from ..compare.factors import CHOSEN, Factor
from ..compare.ratios import common_stem
from ..compare.rows import Row
from ..runs.columns import Column
from ..runs.cpu_starvation import cpu_starvation
from ..runs.locate import find_sweep
from ..runs.run import Run, labelled
from .figure import are_numbers
from .paper_figures import (
    PLUS_MINUS,
    Cell,
    PaperColumn,
    comment,
    default_columns,
    figure_columns,
    label,
    latex_text,
    scaling_columns,
)

_SHARED = frozenset(
    {"model", "data", "backend", "mode", "nodes", "ps", "global_batch_size"}
    | {"optimizer", "lr", "schedule", "precision", "budget", "until"}
)  # settings in the caption if all runs have the same
# In the caption if they differ; the others follow, or appear with the figures.
_CHOSEN = {rule.key for rule in CHOSEN} - {"seed", "digest", "update_examples", "translation_signature", "translation_signature_at_the_end"}
_MAX_CHARACTERS = 2000  # of one sentence
_UNINFORMATIVE = frozenset({"target none", "constant"})


def _caption(
    comparison: Comparison, by: Sequence[Factor], groups: Collection[str | None], disturbed: int, *, intervals: bool
) -> Iterator[str]:
    rows = comparison.entries
    yield from _training(rows)
    if differing := _not_shown(comparison, by):
        yield f"The rows differ in {differing} as well."
    yield _repeats(rows, intervals=intervals)
    if any(row.converged and not row.all_converged for row in rows) and TARGET in groups:
        yield "In brackets: how many of the repeats reached the target; the time is the mean over those."
    if comparison.scaling:
        kinds = " and ".join(dict.fromkeys(series.kind for series in comparison.scaling))
        yield f"Speed-up ({kinds} scaling) is over the fewest nodes of a series, efficiency that over the ratio of the nodes."
    if any((run.summary.get("nodes_sharing_cores") or 1) > 1 for row in rows for run in row.runs):
        yield "Nodes of one machine share its cores."
    if any(run.summary.get("synthetic") for row in rows for run in row.runs):
        yield "Synthetic data: speed means something, loss and metrics do not."
    if reasons := not_comparable(comparison, groups):
        yield f"{MARK} Not comparable with the first row: {reasons}."
    if disturbed and not WORK.isdisjoint(groups):
        yield f"Speed and times of {disturbed} run{'' if disturbed == 1 else 's'} with CPU contention from other programs are not used."


def _training(rows: Sequence[Row]) -> Iterator[str]:
    firsts = [row.runs[0] for row in rows]
    keys = _SHARED | (set() if len({run.summary["global_batch_size"] for run in firsts}) == 1 else {"batch_size"})
    settings = [part for part in shared_settings(firsts, keys) if part not in _UNINFORMATIVE]
    parts = [part.replace(">=", " ≥ ").replace("<=", " ≤ ") if part.startswith("target ") else part for part in settings]
    if parts:
        first, *rest = parts
        yield f"Training: {first}{'; ' if rest else ''}{', '.join(rest)}."


def _not_shown(comparison: Comparison, by: Sequence[Factor]) -> str:
    shown = {key for axis in find_axes(comparison.entries, by) for key in axis.key.split(" and ")}
    known = comparison.comparability
    values = {difference.key: difference.values for difference in (*known.independent, *known.faults)}
    texts = [
        f"{difference.label} ({', '.join(difference.known)})"
        for difference in (*known.independent, *known.faults)
        if difference.key in _CHOSEN and difference.key not in shown and difference.values not in [values.get(key) for key in shown]
    ]
    return enumerated(texts)


def _repeats(rows: Sequence[Row], *, intervals: bool) -> str:
    counts = {len(row.runs) for row in rows}
    if counts == {1}:
        return "One run each." if len(rows) > 1 else "One run."
    runs = "the runs of each row" if len(counts) > 1 else f"{min(counts):,} repeats{' each' if len(rows) > 1 else ''}"
    seeds = ", which differ by their seeds" if all(len(row.seeds) == len(row.runs) for row in rows) else ""
    if not intervals:
        return f"Means over {runs}{seeds}."
    single = "; of a single run there is none" if 1 in counts else ""
    return f"Means over {runs}{seeds}; ± is half the width of the 95 % interval of the mean by Student's t{single}."


WIDE_NAME = 40  # longer names of configurations, in characters, are broken into lines


def name_columns(comparison: Comparison, by: Sequence[Factor], *, fold: bool) -> list[PaperColumn]:
    """Return the columns that name a row: configuration, numeric settings, varying run counts."""
    # Names of runs are added if the settings do not distinguish all rows, or without `fold`.
    rows = comparison.entries
    axes = find_axes(rows, by)
    values = [{axis.key: axis.value(row.runs[0]) for axis in axes} for row in rows]
    numbers = [axis for axis in axes if are_numbers([row[axis.key] for row in values if row[axis.key] is not None])]
    words = [axis for axis in axes if axis not in numbers]
    are_distinct = len({tuple(row_values.values()) for row_values in values}) == len(rows)
    names = [values_label(words, row_values) for row_values in values]
    if not fold or not are_distinct or not axes:
        names = [f"{settings} ({name})" if settings else name for settings, name in zip(names, row_names(rows), strict=True)]
    columns = []
    if any(names):
        wide = max(map(len, names)) > WIDE_NAME
        columns.append(PaperColumn("configuration", tuple(Cell(latex_text(text, breakable=wide)) for text in names), words=True))
    columns += [_numbers(axis, [row_values[axis.key] for row_values in values]) for axis in numbers]
    counts = [len(row.runs) for row in rows]
    if len(set(counts)) > 1:
        columns.append(PaperColumn("runs", tuple(Cell(f"{count:,}") for count in counts)))
    return columns


def row_names(rows: Sequence[Row]) -> list[str]:
    """Return a unique name for each row: the common start of its runs' names, or the first."""
    stems = [common_stem([str(run.summary["run"]) for run in row.runs]) if len(row.runs) > 1 else "" for row in rows]
    return [stem if stem and stems.count(stem) == 1 else row.runs[0].name for stem, row in zip(stems, rows, strict=True)]


def _numbers(axis: Factor, values: Sequence[Any]) -> PaperColumn:
    texts = [UNKNOWN if value is None else bare_value_text(axis, value) for value in values]
    fractions = [len(text.partition(".")[2]) if "e" not in text else 0 for text in texts]
    cells = []
    for text, digits in zip(texts, fractions, strict=True):
        missing = max(fractions) - digits
        point = "." if missing and not digits else ""
        padding = rf"\phantom{{{point}{'0' * missing}}}" if missing and text != UNKNOWN else ""
        cells.append(Cell(latex_text(text) + padding))
    return PaperColumn(latex_text(axis.label), tuple(cells))


_COLUMN_POINTS = 246  # column width of usual journals in two columns (IEEE and ACM: 3.4 in)
_MIN_STEM = 3  # characters of a meaningful common start of names
_DIGIT_POINTS = 5
_GAP_POINTS = 12  # of Computer Modern at 10 pt: a digit, and the space between columns (twice ``\tabcolsep``)


def as_latex(
    runs: Sequence[Run], columns: Sequence[Column] = (), before: Sequence[str] = (), *, by: Sequence[Factor] = (), fold: bool = True
) -> str:
    """Return the table of finished runs below the comments `before`. Raises UsageError if empty."""
    # Speeds and times of contended runs are excluded.
    known = labelled(runs)
    disturbed = [run for run in known if cpu_starvation(run.summary) is not None]
    comparison = compare_runs(known, fold=fold, by=by)
    figures = [*figure_columns(comparison, columns or default_columns(comparison)), *scaling_columns(comparison)]
    if disturbed and not figures:
        raise UsageError("--latex: CPU contention from other programs voids the speed of every run. Repeat them on a quiet machine.")
    names = name_columns(comparison, by, fold=fold)
    groups, intervals = (
        {figure.group for figure in figures},
        any(cell.behind.startswith(PLUS_MINUS) for figure in figures for cell in figure.cells),
    )
    sentences = _caption(comparison, by, groups, len(disturbed), intervals=intervals)
    caption = "\n".join(latex_text(sentence, most=_MAX_CHARACTERS) for sentence in sentences)
    comments = [
        "For LaTeX with \\usepackage{booktabs}, and no other package.",
        *before,
        *(f"Speed and times are not used, because of CPU contention from other programs: {run.name}" for run in disturbed),
        *(f"Copies of one run, which count once: {', '.join(copies)}" for copies in comparison.copies),
    ]
    return "\n".join([*map(comment, comments), *_environment([*names, *figures], caption, _label(comparison))]) + "\n"


def _label(comparison: Comparison) -> str:
    folders = {run.path.parent for run in comparison.runs}
    sweep = find_sweep(str(folders.pop()), Path()) if len(folders) == 1 else None
    if sweep is not None and len(comparison.runs) > 1:
        return label(sweep.resolve().name)
    names = [str(run.summary["run"]) for run in comparison.runs]
    stem = common_stem(names) if len(names) > 1 else names[0]
    return label(stem if len(stem) >= _MIN_STEM or len(names) == 1 else "-".join(row_names(comparison.entries)))


def _environment(columns: Sequence[PaperColumn], caption: str, name: str) -> list[str]:
    kind = "table*" if _points(columns) > _COLUMN_POINTS else "table"
    rows = [
        [_row_cell(column, row[index]) for index, column in enumerate(columns)]
        for row in zip(*(column.cells for column in columns), strict=True)
    ]
    return [
        f"\\begin{{{kind}}}",
        "  \\centering",
        *(f"  {line}" for line in f"\\caption{{%\n{caption}}}".splitlines()),
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


def _alignment(column: PaperColumn) -> str:
    if column.words:
        return "p{0.4\\linewidth}" if _wraps(column) else "l"
    if not column.has_behind:
        return "r"
    return "r@{ }r" if all(cell.behind.startswith(PLUS_MINUS) for cell in column.cells if cell.behind) else "r@{ }l"


def _wraps(column: PaperColumn) -> bool:
    return any("\\allowbreak" in cell.figure for cell in column.cells)


def _header(column: PaperColumn) -> str:
    return f"\\multicolumn{{2}}{{c}}{{{column.header}}}" if column.has_behind else column.header


def _row_cell(column: PaperColumn, cell: Cell) -> str:
    if _wraps(column):
        return f"\\raggedright {cell.figure}"
    if not column.has_behind:
        return cell.figure
    return f"\\multicolumn{{2}}{{c}}{{{cell.figure}}}" if cell.spans else f"{cell.figure} & {cell.behind}"


def _points(columns: Sequence[PaperColumn]) -> int:
    texts = [[column.header, *(f"{cell.figure} {cell.behind}" for cell in column.cells)] for column in columns]
    widths = [min(max(map(_count_characters, column_texts)), WIDE_NAME) for column_texts in texts]
    return _DIGIT_POINTS * sum(widths) + _GAP_POINTS * (len(columns) - 1)


def _count_characters(latex: str) -> int:
    seen = re.sub(r"\\makebox\[.*|\\allowbreak\{\}", "", latex)
    return len(re.sub(r"[{}$]", "", re.sub(r"\\[a-zA-Z]+|\\.", "x", seen)).strip())
