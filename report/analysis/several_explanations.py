"""The bottleneck of each of several runs, and the changes along each axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...records.store.jsonl import finite_json
from ...records.text import rate_text
from ..compare.factors import Factor
from ..compare.ratios import geometric_mean
from ..runs.run import Run, as_recorded, labelled
from .evidence import NAMES, percent
from .sentences import held_back
from .set_ups import SPEED_FIGURE, SetUp, SetUps, called, set_ups, shown
from .verdict import Explanation, explain

HEADER = ("run", "examples/s", "bottleneck")
MOST_COMPONENTS = 2  # parts of a step with the largest changes
LEAST_CHANGE = 0.05  # usual difference of shares between runs of one job


@dataclass(frozen=True, slots=True)
class Change:
    """The changes between the ends of an axis, among otherwise equal configurations."""

    axis: str
    within: str  # common settings, empty without other axes
    first: str
    last: str
    step_fractions: Mapping[str, tuple[float, float]]  # of typical runs, by changed part of a step, at both ends
    examples_per_second: tuple[float, float] | None  # geometric means at both ends, None if one is unknown

    @property
    def sentence(self) -> str:
        """The changes as a sentence."""
        parts = [f"{NAMES[name]} {percent(before)} → {percent(after)} of a step" for name, (before, after) in self.step_fractions.items()]
        if self.examples_per_second is not None:
            parts.append(f"examples/s {' → '.join(rate_text(speed).removesuffix('/s') for speed in self.examples_per_second)}")
        within = f" ({self.within})" if self.within else ""
        return f"{self.axis} {self.first} → {self.last}{within}: {', '.join(parts) or 'no part of a step changes'}."


@dataclass(frozen=True, slots=True)
class SeveralExplanations:
    """The runs with their bottlenecks, and the changes along the axes."""

    runs: tuple[tuple[Run, Explanation], ...]
    changes: tuple[Change, ...]

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """A row of `HEADER` texts per run."""
        return [
            (run.name, rate_text(explanation.evidence.summary.get("examples_per_second")).removesuffix("/s"), held_back(explanation))
            for run, explanation in self.runs
        ]

    def page(self) -> RenderableType:
        """Return the whole output."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for name in HEADER:
            table.add_column(name, justify="right" if name == "examples/s" else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(table, *(Text(change.sentence) for change in self.changes))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        runs = [{**explanation.to_json(), "text": held_back(explanation)} for _, explanation in self.runs]
        found: dict[str, Any] = finite_json({"runs": runs, "changes": [asdict(change) for change in self.changes]})
        return found


def explain_several(runs: Sequence[Run]) -> SeveralExplanations:
    """Explain each run and the changes along the axes. Raises UsageError without updates."""
    every = labelled([as_recorded(run) for run in runs])
    explained = {id(run): explain(run) for run in every}
    found = set_ups(every)
    changes = [change for axis in found.axes for group in found.strata(axis) for change in _changes(found, axis, group, explained)]
    return SeveralExplanations(tuple((run, explained[id(run)]) for run in _in_order_of_axes(found)), tuple(changes))


def _in_order_of_axes(found: SetUps) -> list[Run]:

    def place(one: SetUp) -> list[tuple[bool, Any]]:
        values = [(axis, one.values[axis.key]) for axis in found.axes]
        return [(value is None, () if value is None else axis.order(value)) for axis, value in values]

    return [run for one in sorted(found.all, key=place) for run in one.runs]


def _changes(found: SetUps, axis: Factor, group: Sequence[SetUp], explained: Mapping[int, Explanation]) -> Iterable[Change]:
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
