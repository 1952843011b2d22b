"""Rows of a comparison: a run, or several of one job (of one seed or of several), as mean and standard deviation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ...records.store.jsonl import finite_json
from ..catalog.copies import measurements
from ..catalog.cpu_starvation import TIMED_FIGURES, cpu_starvation
from ..catalog.run import Run
from ..catalog.summary_rows import number, row
from .comparability import alike
from .factors import Factor
from .ratios import half_width_of_mean
from .seed_statistics import common_name, drop_fastest_and_slowest, spread

__all__ = ["Row", "entry_of", "make_entries", "tells_apart"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the runs it stands for, and the flat row of `summary_rows.row`, of several runs the means of what is a number.

    `sigmas` has the sample standard deviation of each figure that is a mean (a list where the figure is one); empty for a single run.
    `half_widths` has half the width of the interval of 95 % of each such mean (Student's t), by all runs, also those `left_out`.
    `left_out` are the names of runs whose figures do not count (see `drop_fastest_and_slowest`), `converged` how many reached the target.
    `counts` has how many runs each mean is over, where that is fewer than the row's: CPU contention voids the speed and the times of a run
    that has repeats without it.
    """

    label: str
    runs: tuple[Run, ...]
    figures: Mapping[str, Any]
    sigmas: Mapping[str, Any] = field(default_factory=dict)
    half_widths: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    converged: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of its runs, in order."""
        return tuple(sorted({run.summary["seed"] for run in self.runs}))

    @property
    def node_count(self) -> int:
        """How many nodes there are figures of. A summary's ``nodes`` is what it says of itself, and goes through no loop."""
        return max(len(run.summary["per_node"]) for run in self.runs)

    def relabelled(self, label: str) -> Row:
        """Return the same row under another name."""
        return replace(self, label=label, figures={**self.figures, "run": label})

    @property
    def all_converged(self) -> bool:
        """Whether there was a target and every run reached it."""
        return self.converged == len(self.runs)


def make_entries(runs: Sequence[Run], *, fold: bool = True, by: Sequence[Factor] = ()) -> list[Row]:
    """Return the rows for some runs, in the order in which they are given.

    With `fold`, runs of one job become one: those that differ by their seed alone, or not at all; of copies of a run the first one stands
    for all. Where there are settings to group `by`, only runs with the same values of them become one.
    """
    if not fold:
        return _unique_labels([entry_of([run]) for run in runs])
    firsts = [copies[0] for copies in measurements(runs)]
    return _unique_labels([entry_of(group) for group in alike(firsts, without={"seed"}, by=by)])


def tells_apart(rows: Sequence[Row], settings: Sequence[Factor], other: Factor) -> bool:
    """Return whether rows that are alike in some settings differ in another one."""
    found: dict[tuple[Any, ...], set[Any]] = {}
    for entry in rows:
        run = entry.runs[0]
        found.setdefault(tuple(one.value(run) for one in settings), set()).add(other.value(run))
    return any(len(values) > 1 for values in found.values())


def _unique_labels(entries: Sequence[Row]) -> list[Row]:
    """Return rows of which no two are called alike: repeats that would be have the name of their first run, which has its own."""
    counts = Counter(entry.label for entry in entries)
    return [
        entry if counts[entry.label] == 1 or len(entry.runs) == 1 else entry.relabelled(f"{entry.runs[0].name} ×{len(entry.runs)}")
        for entry in entries
    ]


def entry_of(runs: Sequence[Run]) -> Row:
    """Return the row for the runs of one job, at least one."""
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
    together = {name: _alike_or_none(found) if name in _SETTINGS else _together(found) for name, found in columns.items()}
    figures = {name: value for name, (value, _) in together.items()}
    sigmas = {name: sigma for name, (_, sigma) in together.items() if sigma is not None}
    half_widths = {name: _half_widths(every[name]) for name in sigmas}
    label = common_name([str(run.summary["run"]) for run in runs])
    figures |= {"run": label, "target_reached": None if converged is None else converged == len(runs)}
    known = {name: sum(value is not None for value in columns[name]) for name in TIMED_FIGURES if figures.get(name) is not None}
    counts = {name: count for name, count in known.items() if count < len(staying)} if void and any(contended) else {}
    left_out = tuple(names[id(summary)] for summary in dropped)
    return Row(label, tuple(runs), figures, sigmas, half_widths, left_out, converged, counts)


_SETTINGS = frozenset(
    {
        "batch_size",
        "global_batch_size",
        "learning_rate",
        "nodes",
        "nodes_sharing_cores",
        "parameter_servers",
        "restarts",
        "resumed",
        "seed",
        "worker_restarts",
        "workers",
    }
)
"""Numbers of which a mean means nothing."""


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [one.get(name) for one in rows] for name in dict.fromkeys(name for one in rows for name in one)}


def _alike_or_none(values: Sequence[Any]) -> tuple[Any, None]:
    return (values[0] if all(value == values[0] for value in values) else None), None


def _together(values: Sequence[Any]) -> tuple[Any, Any]:
    """Return what values of a figure are together, and their standard deviation.

    Equal ones stay what they are, numbers become their mean, lists of numbers a list of means. One that is not finite makes the mean so.
    """
    known = [value for value in values if value is not None]
    if any(isinstance(value, list) for value in known):
        return _lists(known)
    numbers = [None if isinstance(value, bool) else number(value) for value in known]
    if None in numbers or (known and isinstance(known[0], int) and len(set(known)) == 1):
        return _alike_or_none(known)
    found = spread(numbers)
    return (None, None) if found is None else (finite_json(found["mean"]), found["sigma"])


def _half_widths(values: Sequence[Any]) -> Any:
    """Return half the width of the interval of the mean of a figure, of a figure that is a list as a list; None where there is none."""
    known = [value for value in values if value is not None]
    if any(isinstance(value, list) for value in known):
        return [_half_widths(items) for items in zip_longest(*known)]
    found = spread([number(value) for value in known])
    return None if found is None or found["sigma"] is None else half_width_of_mean(found["sigma"], found["values"])


def _lists(known: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    if len({len(value) for value in known}) > 1 or any(isinstance(item, str) for value in known for item in value):
        return (list(known[0]) if all(value == known[0] for value in known) else None), None
    pairs = [_together(items) for items in zip(*known, strict=True)]
    return [value for value, _ in pairs], [sigma for _, sigma in pairs]
