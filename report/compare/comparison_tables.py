"""A comparison as tables with a row per run: speed, learning, resources, scaling."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ...core.setting import ALL, GROUPS, LEARNING, SPEED, STEPS, WORK
from ..runs.columns import COLUMNS, Column, node_columns, run_columns
from ..runs.cpu_starvation import contention_judged, cpu_starvation
from ..runs.run import batch_text
from .cells import MARK, cell, cells, holds_figures, named_node, node_lines, relative, relative_text
from .comparability import Comparability, Difference
from .comparison import Comparison
from .factors import RULES, setting_text, some_of
from .rows import Row
from .run_tables import ACROSS_MODES, SYNTHETIC

TOO_FAST = "‡"  # an efficiency significantly above 100 %
_CONTEXT = ("backend", "mode", "nodes", "workers", "parameter servers", "global batch", "batch per worker")
# Columns that vary within a series; those of a sweep have the names of its fields.
_OF_SERIES = frozenset({"nodes", "workers", "global batch", "batch per worker", "global_batch_size", "batch_size", "runs"})
_CALLED = ("run", "node")
TextColumn = tuple[str, list[str]]  # header and cells


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """A table of texts: `names` columns name a row; `words`, which include them, are text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int
    words: int

    @property
    def right(self) -> tuple[bool, ...]:
        """Whether each column is right-aligned: figures and numeric settings."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        return tuple(
            label not in _CALLED and holds_figures(texts, index >= self.words)
            for index, (label, texts) in enumerate(zip(self.header, columns, strict=True))
        )


def default_tables(comparison: Comparison) -> list[ComparisonTable]:
    """Return the tables of a comparison, without figures that no row has."""
    blocks = [_speed(comparison), _learning(comparison), _resources(comparison)]
    if comparison.scaling is not None:
        blocks.append(_scaling(comparison))
    return [block for block in blocks if len(block.header) > block.words and block.rows]


def selected_table(comparison: Comparison, columns: Sequence[Column]) -> list[ComparisonTable]:
    """Return one table with some figures; those of nodes have a column per node."""
    lines = node_lines(comparison.entries)
    shown: list[TextColumn] = []
    for column in columns:
        if column.of_node:
            shown += [
                (named_node(node, label, column.header), cells(comparison.entries, comparison.marks, column, node)) for node, label in lines
            ]
        else:
            shown.append((column.header, cells(comparison.entries, comparison.marks, column)))
    return [_block("", comparison, shown)]


def _speed(comparison: Comparison) -> ComparisonTable:
    columns = sorted((column for column in COLUMNS if column.speed), key=lambda column: column.speed)
    return _block("Speed", comparison, _observed(comparison, columns), _context(comparison))


def _learning(comparison: Comparison) -> ComparisonTable:
    columns = [column for column in run_columns(comparison.runs) if column.group in LEARNING or column.learning]
    return _block("Learning", comparison, _observed(comparison, columns))


def _resources(comparison: Comparison) -> ComparisonTable:
    names = tuple(next(iter(comparison.settings)))
    columns = node_columns()
    rows = []
    for entry, settings, marks in zip(comparison.entries, comparison.settings, comparison.marks, strict=True):
        for number, (node, called) in enumerate(node_lines([entry])):
            label = tuple(settings.values()) if number == 0 else ("",) * len(names)
            rows.append((*label, called, *(cell(entry, column, marks, node) for column in columns)))
    return ComparisonTable(
        "Resources of each node", (*names, "node", *(column.header for column in columns)), tuple(rows), len(names) + 1, len(names) + 1
    )


def _scaling(comparison: Comparison) -> ComparisonTable:
    settings = [{label: text for label, text in values.items() if label not in _OF_SERIES} for values in comparison.settings]
    names = tuple(settings[0])
    rows = []
    for series in comparison.scaling or ():
        tokens = comparison.entries[series.points[0].entry].runs[0].job.get("batch_tokens")
        kind = f"{series.kind}, {'global batch' if series.kind == 'strong' else 'batch per worker'} {batch_text(series.batch, tokens)}"
        base = series.points[0].entry
        for point in series.points:
            mark = MARK if SPEED in comparison.comparability.confounded(base, point.entry) else ""
            beyond = TOO_FAST if point.too_fast else ""
            efficiency = "-" if point.efficiency is None else f"{100 * point.efficiency:.0f}%{mark}{beyond}"
            label = (kind, *settings[point.entry].values()) if point is series.points[0] else ("",) * (len(names) + 1)
            rows.append((*label, str(point.nodes), relative_text(point.speedup, marked=bool(mark)), efficiency))
    return ComparisonTable("Scaling", ("scaling", *names, "nodes", "speed-up", "efficiency"), tuple(rows), len(names) + 1, len(names) + 1)


def _observed(comparison: Comparison, columns: Sequence[Column]) -> list[TextColumn]:
    """Return the figures that a row has, some followed by their ratio to the first row's."""
    shown: list[TextColumn] = []
    for column in columns:
        shown.append((column.header, cells(comparison.entries, comparison.marks, column)))
        if column.better:
            shown.append((f"relative to {comparison.entries[0].label}", relative(comparison.entries, comparison.marks, column)))
    return [(header, texts) for header, texts in shown if any(text not in ("-", "") for text in texts)]


def _context(comparison: Comparison) -> list[TextColumn]:
    compared = [difference for difference in comparison.comparability.independent if difference.label in _CONTEXT]
    workers_are_nodes = all(entry.figures["workers"] == entry.figures["nodes"] for entry in comparison.entries)
    omitted = {*comparison.settings[0], *(["workers"] if workers_are_nodes else [])}
    return [(shown.label, [value or "-" for value in shown.values]) for shown in compared if shown.label not in omitted]


def _block(title: str, comparison: Comparison, figures: Sequence[TextColumn], context: Sequence[TextColumn] = ()) -> ComparisonTable:
    names = [(label, [settings[label] for settings in comparison.settings]) for label in comparison.settings[0]]
    columns = [*names, *context, *figures]
    header = tuple(label for label, _ in columns)
    rows = tuple(zip(*(texts for _, texts in columns), strict=True))
    return ComparisonTable(title, header, rows, len(names), len(names) + len(context))


_MAX_VALUES = 5
_USUAL = frozenset(rule.key for rule in RULES if rule.independent)
_SAME = "data, seeds, precision, threads, machine, software versions, optimizer and schedule, augmentation, budget, evaluations and network"
_IMPLIED_BY = {"workers": ("nodes",), "update_examples": ("global_batch_size", "batch_size")}


def difference_lines(comparison: Comparison) -> list[str]:
    """Return lines on the differences of the rows, or on the caveats of a single row."""
    copies = [f"Copies of one run, which count once: {', '.join(names)}." for names in comparison.copies]
    if len(comparison.entries) < 2:
        return [*copies, *(_fault(fault, comparison.comparability) for fault in comparison.comparability.faults)]
    return [*copies, *_differences(comparison)]


def _differences(comparison: Comparison) -> list[str]:
    comparability = comparison.comparability
    values = {difference.key: difference.values for difference in comparability.independent}
    independent = [
        difference
        for difference in comparability.independent
        if not any(difference.values == values.get(key) for key in _IMPLIED_BY.get(difference.key, ()))
    ]
    lines = [f"Compared: {'; '.join(_named(difference) for difference in independent)}."] if independent else []
    for difference in comparability.independent:
        if difference.key in ("mode", "update_examples"):
            lines.append(f"  {difference.label}: {difference.why}.")
    if comparability.without_effect:
        lines.append(
            f"Differences without effect on the figures: {'; '.join(_named(difference) for difference in comparability.without_effect)}."
        )
    faults = comparability.faults
    if faults:
        lines += ["Confounding differences:", *(f"  {_fault(fault, comparability)}" for fault in faults)]
    elif not comparability.unrecorded:
        same = "" if any(difference.key not in _USUAL for difference in comparability.independent) else f": {_SAME} are the same"
        lines.append(f"{'Nothing else differs' if lines else 'Nothing differs'}{same}.")
    else:
        lines.append(f"No {'other ' if lines else ''}difference is known.")
    if comparability.unrecorded:
        lines.append(f"Not recorded, so possibly different: {_unrecorded(comparison)}.")
    return lines


def table_notes(comparison: Comparison, columns: Sequence[Column] = (), *, side_by_side: bool = False) -> list[str]:
    """Return the notes below the tables, with `columns` only those on these figures."""
    lines = []
    shown = {column.group for column in columns} if columns else set(GROUPS)
    if reasons := not_comparable(comparison, shown):
        lines.append(f"{MARK} not comparable with {comparison.entries[0].label}: {reasons}.")
    folded = [entry for entry in comparison.entries if len(entry.runs) > 1]
    if folded:
        lines.append(_note_on_means(comparison, folded, "column" if side_by_side else "row"))
    if not shown.isdisjoint(WORK):
        lines += _notes_on_contention(comparison, folded)
    for entry in folded:
        if entry.left_out:
            lines.append(f"{entry.label}: the fastest and the slowest are excluded ({', '.join(entry.left_out)}).")
    lines += [] if columns else _notes_on_scaling(comparison)
    modes = {run.summary["mode"] for run in comparison.runs}
    if len(modes) > 1 and (STEPS in shown or any(column.key == "steps" for column in columns)):
        lines.append(ACROSS_MODES)
    if any(run.summary.get("synthetic") for run in comparison.runs):
        lines.append(SYNTHETIC)
    return lines


def _note_on_means(comparison: Comparison, folded: Sequence[Row], place: str) -> str:
    counts = {len(entry.runs) for entry in comparison.entries}
    every = len(counts) == 1 and not any(entry.left_out or entry.counts for entry in folded)
    which = f"Each {place} is the mean of {counts.pop()} repeats" if every else f"A {place} of several runs has their mean"
    return (
        f"{which} ± half its 95 % confidence interval (trainer compare --no-fold keeps repeats apart). "
        "The conclusion has geometric means of speeds and times."
    )


def _notes_on_contention(comparison: Comparison, folded: Sequence[Row]) -> Iterator[str]:
    contended = [run.name for entry in folded if entry.counts for run in entry.runs if cpu_starvation(run.summary) is not None]
    if contended:
        names = some_of(contended)
        yield f"(n=…): the mean is over n runs; CPU contention from other programs invalidates the speed and times of {names}."
    unjudged = [run.name for run in comparison.runs if not contention_judged(run.summary)]
    if unjudged:
        yield f"CPU contention was not measured (run under 2 s, or no samples): {some_of(unjudged)}."


def _notes_on_scaling(comparison: Comparison) -> Iterator[str]:
    if comparison.fits_neither:
        names = "; ".join(comparison.entries[index].label for index in comparison.fits_neither)
        yield f"In no scaling series, as no other number of nodes has the same global batch or batch per worker: {names}."
    if any(point.too_fast for series in comparison.scaling or () for point in series.points):
        yield f"{TOO_FAST} significantly above 100 %, so a measurement is wrong or another advantage helped; measure both again."


def _named(difference: Difference) -> str:
    return f"{difference.label} {_values(difference)}"


def _values(difference: Difference) -> str:
    values = difference.known
    if len(values) > _MAX_VALUES:
        values = [*values[: _MAX_VALUES - 1], "…", values[-1]]
    return ", ".join(values)


def _by_rows(difference: Difference, comparability: Comparability) -> str:
    names = comparability.names
    for axis in comparability.independent if None not in difference.values else ():  # caveats of single rows depend on no setting
        if None not in axis.values and len(set(zip(axis.values, difference.values, strict=True))) == len(set(axis.values)):
            names = [setting_text(axis.label, str(value)) for value in axis.values]
            break
    if len(difference.values) < 2 or len(set(names)) > _MAX_VALUES:
        return _values(difference)
    holders = {
        value: dict.fromkeys(name for name, row_value in zip(names, difference.values, strict=True) if row_value == value)
        for value in difference.known
    }
    return "; ".join(f"{' and '.join(holder_names)}{f': {value}' * (value != 'yes')}" for value, holder_names in holders.items())


def _fault(difference: Difference, comparability: Comparability) -> str:
    named = f"{difference.label} ({_by_rows(difference, comparability)})"
    names = comparability.called(difference.confounds)
    if not names:
        return f"{named}: {difference.why}."
    figures = "all figures" if set(difference.confounds) == ALL else enumerated(names)
    return f"{named}: {figures} {'is' if len(names) == 1 and names[0] != 'resources' else 'are'} not comparable; {difference.why}."


def enumerated(words: Sequence[str]) -> str:
    """Return words as ``a, b and c``."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def not_comparable(comparison: Comparison, shown: Collection[str | None]) -> str:
    """Return the marked kinds of figures among those `shown`, with the confounding settings."""
    marked = {group for marks in comparison.marks for group in marks if group in shown}
    differences = [*comparison.comparability.independent, *comparison.comparability.faults]
    reasons: dict[str, list[str]] = {}
    for group in GROUPS:
        if group in marked:
            why = ", ".join(difference.label for difference in differences if group in difference.confounds)
            reasons.setdefault(why, []).extend(comparison.comparability.called([group]))  # none of a kind that no run has
    reasons = {why: groups for why, groups in reasons.items() if groups}
    return "; ".join(f"{', '.join(groups)} ({why})" for why, groups in reasons.items())


def _unrecorded(comparison: Comparison) -> str:
    every = len(comparison.entries)
    by_runs: dict[Sequence[str], list[str]] = {}
    for label, names in comparison.comparability.unrecorded.items():
        by_runs.setdefault(tuple(names), []).append(label)
    return "; ".join(f"{', '.join(labels)} of {'all' if len(names) == every else ' and '.join(names)}" for names, labels in by_runs.items())
