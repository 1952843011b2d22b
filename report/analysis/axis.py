"""The best value of one axis among otherwise equal configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from ..compare.factors import Factor, some_of
from ..compare.ratios import Ratio, better_by, repeats_that_would_tell
from ..runs.cpu_starvation import timed_runs
from .set_ups import Figure, SetUp, SetUps, called, differing, shown


@dataclass(frozen=True, slots=True)
class Missed:
    """A configuration that reached the target only in `reached` of its `runs`."""

    set_up: str
    reached: int
    runs: int


@dataclass(frozen=True, slots=True)
class AxisVerdict:
    """The ranking of an axis by one figure."""

    axis: str
    label: str
    figure: str
    missed: tuple[Missed, ...]  # ranked last, without a ratio
    winner: str | None = None  # the best value; None if no two compare
    other: str | None = None  # the second
    ratio: Ratio | None = None  # over all pairs of otherwise equal configurations with these two values
    each: tuple[Ratio, ...] = ()  # of each pair
    where: tuple[str, ...] = ()  # common settings of each pair; empty without other axes
    repeats: int | None = None  # per configuration for a significant ratio
    last: str | None = None  # the worst of several values
    over_last: Ratio | None = None  # ratio of the best to the worst
    why_not: str | None = None  # reason without winner

    @property
    def depends(self) -> bool:
        """Whether some pair is significantly reversed."""
        return any(one.sure and one.ratio < 1.0 for one in self.each)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "axis": self.axis,
            "figure": self.figure,
            "best": self.winner,
            "second": self.other,
            "ratio": None if self.ratio is None else self.ratio.to_json(),
            "within": list(self.where),
            "ratio_within": [one.to_json() for one in self.each],
            "depends": self.depends,
            "repeats_that_would_tell": self.repeats,
            "worst": self.last,
            "ratio_over_worst": None if self.over_last is None else self.over_last.to_json(),
            "missed_the_target": [asdict(one) for one in self.missed],
            "why_not": self.why_not,
        }


Pairs = list[tuple[SetUp, SetUp]]


def judge_axis(found: SetUps, axis: Factor, figure: Figure) -> AxisVerdict:
    """Return the verdict on an axis by a figure."""
    groups = found.strata(axis)
    values = sorted({one.values[axis.key] for group in groups for one in group}, key=lambda value: (value is None, axis.order(value)))
    pairs = {(a, b): _pairs(found, groups, axis.key, figure, a, b) for a, b in combinations(values, 2)}
    known = [pair for pair, members in pairs.items() if members]
    missed = tuple(
        Missed(one.label, one.row.converged or 0, len(one.runs))
        for group in groups
        for one in group
        if figure.better < 0 and one.missed_target
    )
    if not known:
        why = _why_not(found, groups, figure)
        return AxisVerdict(axis.key, axis.label, figure.key, missed, why_not=why)
    ranked = _ranked(values, pairs, figure)
    winner = ranked[0]
    beside = [value for value in ranked[1:] if _between(pairs, winner, value)]  # a value may be comparable only with others
    other, last = beside[0], beside[-1]
    members = _between(pairs, winner, other)
    first = _ratio(members, figure)
    others = found.others(axis)
    repeats = None if first.sure or first.open_by_contention else repeats_that_would_tell(_figures(members, figure))
    beyond = _between(pairs, winner, last) if last != other else []
    return AxisVerdict(
        axis.key,
        axis.label,
        figure.key,
        missed,
        shown(axis, winner),
        shown(axis, other),
        first,
        tuple(_ratio([pair], figure) for pair in members),
        tuple(called(others, one.values) for one, _ in members) if others else (),
        repeats,
        shown(axis, last) if beyond else None,
        _ratio(beyond, figure) if beyond else None,
    )


def _pairs(found: SetUps, groups: Sequence[Sequence[SetUp]], key: str, figure: Figure, value: Any, other: Any) -> Pairs:
    ranked = [[one for one in group if one.figures(figure) and found.ranks(one)] for group in groups]
    return [
        (one, two)
        for group in ranked
        for one in group
        if one.values[key] == value
        for two in group
        if two.values[key] == other
        if found.comparable(one, two, figure.group) and not (key == "nodes" and found.too_fast(one, two))
    ]


def _between(pairs: Mapping[tuple[Any, Any], Pairs], value: Any, other: Any) -> Pairs:
    return pairs.get((value, other)) or [(two, one) for one, two in pairs.get((other, value), [])]


def _figures(members: Pairs, figure: Figure) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    sides = [(one.figures(figure), other.figures(figure)) for one, other in members]
    return sides if figure.better > 0 else [(other, one) for one, other in sides]


def _ratio(members: Pairs, figure: Figure) -> Ratio:
    return better_by([(one.sample(figure), other.sample(figure)) for one, other in members], figure.better)


def _ranked(values: Sequence[Any], pairs: Mapping[tuple[Any, Any], Pairs], figure: Figure) -> list[Any]:
    logs: dict[Any, list[float]] = {}
    for (one, other), members in pairs.items():
        if members:
            found = math.log(_ratio(members, figure).ratio)
            logs.setdefault(one, []).append(found)
            logs.setdefault(other, []).append(-found)
    return sorted((value for value in values if value in logs), key=lambda value: -math.fsum(logs[value]) / len(logs[value]))


def _why_not(found: SetUps, groups: Sequence[Sequence[SetUp]], figure: Figure) -> str:
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    if not pairs:
        return "no pair differs only in this setting"
    measured = [pair for pair in pairs if all(one.figures(figure) for one in pair)]
    if not measured:
        return _why_not_measured(pairs, figure)
    if not any(found.ranks(one) and found.ranks(other) for one, other in measured):
        return _why_not_ranked(found, measured)
    if all(found.too_fast(*pair) for pair in measured):
        return "the speed-up exceeds the ideal, so a measurement is wrong"
    reasons = [fault.label for one, other in measured for fault in found.faults(one, other, figure.group)]
    return f"it is confounded with {', '.join(dict.fromkeys(reasons))}"


def _why_not_measured(pairs: Sequence[tuple[SetUp, SetUp]], figure: Figure) -> str:
    every = {id(one): one for pair in pairs for one in pair}.values()
    contended = [run.name for one in every if not timed_runs(one.runs) for run in one.runs]
    if contended and (figure.better > 0 or all(one.row.all_converged for one in every)):
        return f"CPU contention from other programs voids speeds; repeat {some_of(contended)}"
    return "no pair differing only in this setting reached the target in every run" if figure.better < 0 else "it is unknown"


def _why_not_ranked(found: SetUps, pairs: Sequence[tuple[SetUp, SetUp]]) -> str:
    places = {found.place(one) for pair in pairs for one in pair}
    if places & found.quality.diverged.keys():
        return "one of the two diverged"
    assert found.quality.info is not None
    if places & found.quality.worse:
        return f"test {found.quality.info.label} differs significantly"
    outside = [one for pair in pairs for one in pair if found.place(one) not in found.quality.judged]
    faults = [fault for one in outside for fault in found.why_not_judged(one)]
    return f"test {found.quality.info.label} is not comparable{differing(faults)}"
