"""What holds back each of several runs, a line each, and what changes along each axis in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...records.store.jsonl import finite_json
from ...records.text.numbers import rate_text
from ..catalog.run import Run, labelled
from ..catalog.unfinished import as_recorded
from ..comparison.factors import Factor
from ..comparison.ratios import geometric_mean
from ..diagnosis.verdict import Explanation, explain
from ..diagnosis.words import NAMES, percent
from .sentences import held_back
from .set_ups import SPEED_FIGURE, SetUp, SetUps, called, set_ups, shown

__all__ = ["HEADER", "Change", "SeveralExplanations", "explain_several"]

HEADER = ("run", "examples/s", "bottleneck")

MOST_COMPONENTS = 2
"""Parts of a step whose change is told, the largest changes first."""

LEAST_CHANGE = 0.05
"""Shares of two runs of one job differ by so much; less is no change."""


@dataclass(frozen=True, slots=True)
class Change:
    """What changes from the first to the last value of an axis, among set-ups that are equal in all else.

    `where` says what these have in common, empty where it is all. `shares` has for each part of a step its share at both ends, where it
    changes, of the typical run; `examples_per_second` the geometric mean of the repeats at both ends, None where one is not known.
    """

    axis: str
    where: str
    first: str
    last: str
    shares: Mapping[str, tuple[float, float]]
    examples_per_second: tuple[float, float] | None

    @property
    def sentence(self) -> str:
        """All of it in a sentence."""
        parts = [f"{NAMES[name]} {percent(before)} → {percent(after)} of a step" for name, (before, after) in self.shares.items()]
        if self.examples_per_second is not None:
            parts.append(f"examples/s {' → '.join(rate_text(speed).removesuffix('/s') for speed in self.examples_per_second)}")
        where = f" ({self.where})" if self.where else ""
        return f"{self.axis} {self.first} → {self.last}{where}: {', '.join(parts) or 'no part of a step changes'}."


@dataclass(frozen=True, slots=True)
class SeveralExplanations:
    """The runs with what holds each back, and the changes along the axes."""

    runs: tuple[tuple[Run, Explanation], ...]
    changes: tuple[Change, ...]

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """A row a run, of texts as `HEADER` names them."""
        return [
            (run.name, rate_text(explanation.evidence.summary.get("examples_per_second")).removesuffix("/s"), held_back(explanation))
            for run, explanation in self.runs
        ]

    def page(self) -> RenderableType:
        """Return everything that is printed."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for name in HEADER:
            table.add_column(name, justify="right" if name == "examples/s" else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(table, *(Text(change.sentence) for change in self.changes))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        changes = [
            {
                "axis": one.axis,
                "within": one.where,
                "first": one.first,
                "last": one.last,
                "step_fractions": {name: list(ends) for name, ends in one.shares.items()},
                "examples_per_second": None if one.examples_per_second is None else list(one.examples_per_second),
            }
            for one in self.changes
        ]
        runs = [{**explanation.to_json(), "text": held_back(explanation)} for _, explanation in self.runs]
        found: dict[str, Any] = finite_json({"runs": runs, "changes": changes})
        return found


def explain_several(runs: Sequence[Run]) -> SeveralExplanations:
    """Return what holds back each run, at least one, and what changes along the axes. Raises UsageError for a run without an update."""
    every = labelled([as_recorded(run) for run in runs])
    explained = {id(run): explain(run) for run in every}
    found = set_ups(every)
    changes = [change for axis in found.axes for group in found.strata(axis) for change in _changes(found, axis, group, explained)]
    return SeveralExplanations(tuple((run, explained[id(run)]) for run in _along_the_axes(found)), tuple(changes))


def _along_the_axes(found: SetUps) -> list[Run]:
    """Return all runs, those of a set-up one after the other and set-ups by their values."""

    def place(one: SetUp) -> list[tuple[bool, Any]]:
        values = [(axis, one.values[axis.key]) for axis in found.axes]
        return [(value is None, () if value is None else axis.order(value)) for axis, value in values]

    return [run for one in sorted(found.all, key=place) for run in one.runs]


def _changes(found: SetUps, axis: Factor, group: Sequence[SetUp], explained: Mapping[int, Explanation]) -> Iterable[Change]:
    """Yield what changes in a group from the first value of an axis to the last. `explained` has each run's explanation, by its id."""
    known = [one for one in group if one.values[axis.key] is not None]
    ordered = sorted(known, key=lambda one: axis.order(one.values[axis.key]))
    if len({one.values[axis.key] for one in ordered}) < 2:
        return
    first, last = ordered[0], ordered[-1]
    ends = [explained[id(one.typical_run)] for one in (first, last)]
    steps = [one.step_fractions for one in ends]
    shares = {name: (steps[0][name], steps[1][name]) for name in steps[0] if name in steps[1]}
    largest = sorted(shares.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:MOST_COMPONENTS]
    told = {name: pair for name, pair in largest if abs(pair[1] - pair[0]) >= LEAST_CHANGE}
    speeds = [geometric_mean(figures) if (figures := one.figures(SPEED_FIGURE)) else None for one in (first, last)]
    yield Change(
        axis.label,
        called(found.others(axis), first.values),
        shown(axis, first.values[axis.key]),
        shown(axis, last.values[axis.key]),
        told,
        None if speeds[0] is None or speeds[1] is None else (speeds[0], speeds[1]),
    )
