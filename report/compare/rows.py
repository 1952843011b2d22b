"""Rows of a comparison: a run, or repeats as mean and standard deviation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ...records.store.jsonl import finite_json
from ..runs.columns import COLUMNS, TIMED_FIGURES, row
from ..runs.cpu_starvation import cpu_starvation
from ..runs.run import Run, measurements, number
from .comparability import group_equal_runs
from .factors import Factor
from .ratios import common_name, drop_fastest_and_slowest, estimate


@dataclass(frozen=True, slots=True)
class Row:
    """A row of runs."""

    label: str
    runs: tuple[Run, ...]
    figures: Mapping[str, Any]  # flat row (`columns.row`) with the means of numbers
    sigmas: Mapping[str, Any] = field(default_factory=dict)  # sample standard deviations (lists for lists)
    half_widths: Mapping[str, Any] = field(default_factory=dict)  # half the 95 % intervals (Student's t) over all runs, also `left_out`
    left_out: tuple[str, ...] = ()  # by `drop_fastest_and_slowest`
    converged: int | None = None  # runs that reached the target
    counts: Mapping[str, int] = field(default_factory=dict)  # runs of a mean, if CPU contention leaves fewer

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of its runs, sorted."""
        return tuple(sorted({run.summary["seed"] for run in self.runs}))

    @property
    def node_count(self) -> int:
        """The number of nodes with figures; a summary's ``nodes`` is untrusted."""
        return max(len(run.summary["per_node"]) for run in self.runs)

    def relabelled(self, label: str) -> Row:
        """Return the row under another name."""
        return replace(self, label=label, figures={**self.figures, "run": label})

    @property
    def all_converged(self) -> bool:
        """Whether there was a target and every run reached it."""
        return self.converged == len(self.runs)


def make_entries(runs: Sequence[Run], *, fold: bool = True, by: Sequence[Factor] = ()) -> list[Row]:
    """Return the rows in order; with `fold`, repeats that agree in `by` are one row."""
    if not fold:
        return _unique_labels([make_entry([run]) for run in runs])
    firsts = [copies[0] for copies in measurements(runs)]
    return _unique_labels([make_entry(group) for group in group_equal_runs(firsts, without={"seed"}, by=by)])


def is_distinguishing(rows: Sequence[Row], settings: Sequence[Factor], factor: Factor) -> bool:
    """Return whether rows with equal values of some settings differ in another one."""
    values_by_settings: dict[tuple[Any, ...], set[Any]] = {}
    for entry in rows:
        run = entry.runs[0]
        values_by_settings.setdefault(tuple(setting.value(run) for setting in settings), set()).add(factor.value(run))
    return any(len(values) > 1 for values in values_by_settings.values())


def _unique_labels(entries: Sequence[Row]) -> list[Row]:
    counts = Counter(entry.label for entry in entries)
    return [
        entry if counts[entry.label] == 1 or len(entry.runs) == 1 else entry.relabelled(f"{entry.runs[0].name} ×{len(entry.runs)}")
        for entry in entries
    ]


def make_entry(runs: Sequence[Run]) -> Row:
    """Return the row of the runs of one job, at least one."""
    summaries = [run.summary for run in runs]
    converged = None if summaries[0]["target"] is None else sum(bool(summary["target_reached"]) for summary in summaries)
    if len(runs) == 1:
        return Row(runs[0].name, tuple(runs), {**row(summaries[0]), "run": runs[0].name}, converged=converged)
    staying, dropped = drop_fastest_and_slowest(summaries)
    names = {id(run.summary): run.name for run in runs}
    contended = [cpu_starvation(summary) is not None for summary in staying]
    void = dict.fromkeys(TIMED_FIGURES) if not all(contended) else {}
    rows = [{**row(summary), **(void if cpu_starvation(summary) is not None else {})} for summary in (*staying, *dropped)]
    columns, every = _columns(rows[: len(staying)]), _columns(rows)
    settings = {column.key for column in COLUMNS if not column.averaged}
    together = {name: _equal_or_none(values) if name in settings else _combined(values) for name, values in columns.items()}
    figures = {name: value for name, (value, _) in together.items()}
    sigmas = {name: sigma for name, (_, sigma) in together.items() if sigma is not None}
    half_widths = {name: _half_widths(every[name]) for name in sigmas}
    label = common_name([str(run.summary["run"]) for run in runs])
    figures |= {"run": label, "target_reached": None if converged is None else converged == len(runs)}
    known = {name: sum(value is not None for value in columns[name]) for name in TIMED_FIGURES if figures.get(name) is not None}
    counts = {name: count for name, count in known.items() if count < len(staying)} if void and any(contended) else {}
    left_out = tuple(names[id(summary)] for summary in dropped)
    return Row(label, tuple(runs), figures, sigmas, half_widths, left_out, converged, counts)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {
        name: [row_figures.get(name) for row_figures in rows]
        for name in dict.fromkeys(name for row_figures in rows for name in row_figures)
    }


def _equal_or_none(values: Sequence[Any]) -> tuple[Any, None]:
    return (values[0] if all(value == values[0] for value in values) else None), None


def _combined(values: Sequence[Any]) -> tuple[Any, Any]:
    known = [value for value in values if value is not None]
    if any(isinstance(value, list) for value in known):
        return _lists(known)
    numbers = [None if isinstance(value, bool) else number(value) for value in known]
    if None in numbers or (known and isinstance(known[0], int) and len(set(known)) == 1):
        return _equal_or_none(known)
    mean = estimate(numbers)
    return (None, None) if mean is None else (finite_json(mean.mean), mean.sigma)


def _half_widths(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if any(isinstance(value, list) for value in known):
        return [_half_widths(items) for items in zip_longest(*known)]
    mean = estimate([number(value) for value in known])
    return None if mean is None else mean.half_width


def _lists(known: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    if len({len(value) for value in known}) > 1 or any(isinstance(item, str) for value in known for item in value):
        return (list(known[0]) if all(value == known[0] for value in known) else None), None
    pairs = [_combined(items) for items in zip(*known, strict=True)]
    return [value for value, _ in pairs], [sigma for _, sigma in pairs]
