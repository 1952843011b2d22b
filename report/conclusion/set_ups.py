"""The set-ups that some runs compare, each with its repeats, and the axes along which they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import fmean, median
from typing import Any

from ...core.untrusted.console import one_line
from ..catalog.cpu_starvation import CpuStarvation, contention_judged, cpu_starvation, log_speed_lost, timed_runs
from ..catalog.run import Run
from ..catalog.summary_rows import number
from ..comparison.caveats import LEARNT_UNDER_CONTENTION
from ..comparison.comparability import Comparability, Difference, compare_settings
from ..comparison.factors import RULES, SPEED, TARGET, Factor
from ..comparison.names import setting_text
from ..comparison.ratios import USUAL_SCATTER, Ratio, Sample, better_by, interval_of_mean
from ..comparison.rows import Row, make_entries, tells_apart
from ..diagnosis.time_shares import STEP_COMPONENTS, read_workers
from .quality import Quality, judge_quality

__all__ = [
    "FIGURES",
    "SPEED_FIGURE",
    "TARGET_FIGURE",
    "Disturbed",
    "Figure",
    "SetUp",
    "SetUps",
    "axes_of",
    "called",
    "set_ups",
    "shown",
    "times_as_good",
    "value_text",
]

FOLLOWING = frozenset({"seed", "sharing", "threads", "network", "link", "distributed", "exchange"})
"""What comes of other settings, such as the number of nodes on one machine, unless set-ups differ in it by itself: then it is an axis."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that set-ups are ranked by. `group` is its kind (`factors.GROUPS`), `better` 1 where more is better, −1 where less is."""

    key: str
    group: str
    better: int


SPEED_FIGURE = Figure("examples_per_second", SPEED, 1)

TARGET_FIGURE = Figure("time_to_target_seconds", TARGET, -1)

FIGURES = (TARGET_FIGURE, SPEED_FIGURE)
"""In the order of what a person wants to know."""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A run with CPU contention: other programs had its cores, so that its speed and its times count for nothing; what it learnt does."""

    run: Run
    by: CpuStarvation


@dataclass(frozen=True)
class SetUp:
    """A job and its repeats. `values` has the value of each axis, by key; `label` names it by them."""

    label: str
    values: Mapping[str, Any]
    row: Row

    @property
    def runs(self) -> tuple[Run, ...]:
        """The repeats, at least one."""
        return self.row.runs

    @property
    def all_reached(self) -> bool:
        """Whether there was a target, and every run reached it."""
        return self.row.all_converged

    def figures(self, figure: Figure) -> tuple[float, ...]:
        """Return a figure of each run without CPU contention; none where one of them lacks it, or it says nothing about the others."""
        if figure.group == TARGET and not self.all_reached:
            return ()
        found = [number(run.summary.get(figure.key)) for run in timed_runs(self.runs)]
        known = [value for value in found if value is not None and 0 < value < math.inf]
        return tuple(known) if len(known) == len(found) else ()

    def sample(self, figure: Figure) -> Sample:
        """Return `figures`, with what contention below the limit may have taken of them."""
        summaries = [run.summary for run in timed_runs(self.runs)]
        leeway = fmean(map(log_speed_lost, summaries)) if summaries else 0.0
        return Sample(self.figures(figure), leeway, all(map(contention_judged, summaries)))

    def interval(self, figure: Figure) -> tuple[float, float] | None:
        """Return the interval of 95 % of a figure's geometric mean, as wide as contention makes it; None for one value alone."""
        sample = self.sample(figure)
        scatter = interval_of_mean(sample.values)
        if scatter is None:
            return None
        faster = math.exp(sample.leeway)
        return (scatter[0], scatter[1] * faster) if figure.better > 0 else (scatter[0] / faster, scatter[1])

    @property
    def contention_factor(self) -> float:
        """How many times as fast it may have been without contention below the limit, which widens its intervals."""
        return math.exp(self.sample(SPEED_FIGURE).leeway)

    @property
    def contended(self) -> bool:
        """Whether that is more than the usual scatter, so that it is said."""
        return self.contention_factor >= 1.0 + USUAL_SCATTER

    @cached_property
    def typical_run(self) -> Run:
        """The run that stands for the others where one is looked at: that whose steps are most like the median of all, in their parts.

        So one repeat that was calibrated in a bad moment does not speak for the others. Of fewer than three that were calibrated it is the
        run of middle speed.
        """
        runs = timed_runs(self.runs) or self.runs
        ordered = sorted(runs, key=lambda run: number(run.summary["examples_per_second"]) or 0.0)
        middle = (len(ordered) - 1) // 2
        parts = [(run, found) for run in ordered if (found := _parts_of_a_step(run)) is not None]
        if len(parts) < 3:
            return ordered[middle]
        medians = {name: median(found[name] for _, found in parts) for name in STEP_COMPONENTS}
        return min(parts, key=lambda pair: math.fsum(abs(pair[1][name] - medians[name]) for name in STEP_COMPONENTS))[0]


def _parts_of_a_step(run: Run) -> Mapping[str, float] | None:
    """Return the fractions of a run's steps, the mean over its workers; None where it was not calibrated."""
    workers = read_workers(run.summary) if run.summary.get("time_shares") else []
    if not workers:
        return None
    return {name: fmean(worker.fractions[name] for worker in workers) for name in STEP_COMPONENTS}


@dataclass(frozen=True)
class SetUps:
    """All set-ups, and their `axes`: the settings in which they differ, of which each tells some apart that the others do not.

    `disturbed` are the runs with CPU contention, whose speed and times do not count.
    """

    all: tuple[SetUp, ...]
    axes: tuple[Factor, ...]
    disturbed: tuple[Disturbed, ...]
    comparability: Comparability

    def comparable(self, one: SetUp, other: SetUp, group: str) -> bool:
        """Return whether a kind of figures of two set-ups can be compared."""
        return group not in self.comparability.confounded(self.place(one), self.place(other))

    @cached_property
    def quality(self) -> Quality:
        """What they have learnt, by their places in `all`."""

        def comparable(group: str, among: Sequence[int]) -> Sequence[int]:
            return self.comparability.comparable(group, among, ignoring=(LEARNT_UNDER_CONTENTION,))  # which is marked, and counts

        keys = [tuple((key, value) for key, value in one.values.items() if key != "test_size") for one in self.all]
        return judge_quality([one.runs for one in self.all], keys, comparable)

    def ranks(self, one: SetUp) -> bool:
        """Return whether a set-up is ranked by its speed: it has not diverged, and is not significantly worse than the best in quality."""
        return self.quality.ranks(self.place(one))

    def all_comparable(self, figure: Figure) -> list[SetUp]:
        """Return the set-ups that are ranked by a figure, and of which any two can be compared in it: the largest set, or the first's."""
        among = [index for index, one in enumerate(self.all) if one.figures(figure) and self.quality.ranks(index)]
        return [self.all[index] for index in self.comparability.comparable(figure.group, among)]

    def faults(self, one: SetUp, other: SetUp, group: str) -> list[Difference]:
        """Return what makes a kind of figures of two set-ups incomparable."""
        mine, theirs = self.place(one), self.place(other)
        found = []
        for fault in self.comparability.faults:
            differ = fault.values[mine] != fault.values[theirs] or not self.comparable(one, one, group)
            if group in fault.confounds and differ:
                found.append(fault)
        return found

    def why_not_judged(self, one: SetUp) -> list[Difference]:
        """Return what makes the quality of a set-up incomparable with that of the judged ones."""
        judged = [self.all[place] for place in sorted(self.quality.judged)]
        faults = self.faults(one, judged[0], self.quality.kind) if judged else []
        return [fault for fault in faults if fault.key != LEARNT_UNDER_CONTENTION]

    def strata(self, axis: Factor) -> list[list[SetUp]]:
        """Return the set-ups in groups that are equal in every axis but this one."""
        found: dict[tuple[Any, ...], list[SetUp]] = {}
        for one in self.all:
            found.setdefault(tuple(value for key, value in one.values.items() if key != axis.key), []).append(one)
        return list(found.values())

    @cached_property
    def beyond_ideal(self) -> list[tuple[SetUp, SetUp, Ratio]]:
        """Set-ups, equal in all else, of which the one on more nodes is faster than the ratio of the nodes allows; and by how much.

        That is no property of the nodes, so that they are not judged by such a pair.
        """
        axis = next((one for one in self.axes if one.key == "nodes"), None)
        found = []
        for group in [] if axis is None else self.strata(axis):
            ordered = sorted((one for one in group if one.figures(SPEED_FIGURE)), key=lambda one: int(one.values["nodes"]))
            for fewer, more in combinations(ordered, 2):
                times = times_as_good(more, fewer, SPEED_FIGURE)
                if more.values["nodes"] > fewer.values["nodes"] and times.above(more.values["nodes"] / fewer.values["nodes"]):
                    found.append((more, fewer, times))
        return found

    def too_fast(self, one: SetUp, other: SetUp) -> bool:
        """Return whether two set-ups are such a pair."""
        return any({id(one), id(other)} == {id(more), id(fewer)} for more, fewer, _ in self.beyond_ideal)

    @property
    def without_speed(self) -> list[Run]:
        """The runs of set-ups that have no run without CPU contention, so that nothing is known of their speed: they are to be repeated."""
        return [run for one in self.all if not timed_runs(one.runs) for run in one.runs]

    def others(self, axis: Factor) -> list[Factor]:
        """Return all axes but this one."""
        return [rule for rule in self.axes if rule.key != axis.key]

    def place(self, one: SetUp) -> int:
        """Return the place of a set-up in `all`."""
        return next(index for index, known in enumerate(self.all) if known is one)


def times_as_good(one: SetUp, other: SetUp, figure: Figure) -> Ratio:
    """Return how many times as good the first is by a figure that both have."""
    return better_by([(one.sample(figure), other.sample(figure))], figure.better)


def set_ups(runs: Sequence[Run], swept: Sequence[Factor] = ()) -> SetUps:
    """Return the set-ups of some labelled runs.

    Their axes are those that the runs themselves show, so that the same runs are called alike by whoever looks at them; and of what was
    `swept`, where that is known, what tells further ones apart.
    """
    rows = make_entries(runs, by=swept)
    disturbed = [Disturbed(run, by) for row in rows for run in row.runs if (by := cpu_starvation(run.summary)) is not None]
    axes = axes_of(rows)
    axes += [axis for axis in swept if tells_apart(rows, axes, axis)]
    firsts = [row.runs[0] for row in rows]
    keys = frozenset(key for axis in axes for key in axis.key.split(_AND))
    chosen = {rule.key for rule in RULES if rule.key in _CHOSEN_BY_THEMSELVES and _varies(_known(rows, rule), rule)}
    chosen |= {name for name in _CHOSEN_WHERE_TYPED if len({repr(run.job.get(name)) for run in firsts}) > 1}
    independent = (FOLLOWING - chosen) | keys
    comparability = compare_settings(firsts, independent=independent, repeats=[row.runs for row in rows])
    return SetUps(tuple(_named(rows, axes)), tuple(axes), tuple(disturbed), comparability)


def axes_of(rows: Sequence[Row], swept: Sequence[Factor] = ()) -> list[Factor]:
    """Return the settings in which some rows differ, those that were `swept` first; each tells some apart that the others do not."""
    axes = [axis for axis in swept if _varies(rows, axis)]
    for rule in RULES:
        if rule.key not in {axis.key for axis in axes} and rule.key != "seed" and rule.matters and tells_apart(rows, axes, rule):
            axes.append(rule)
    return _joined(rows, axes, len(swept))


_CHOSEN_WHERE_TYPED = frozenset({"threads", "network", "distributed"})
"""Settings that the program chooses, unless a job does."""


def _known(rows: Sequence[Row], axis: Factor) -> list[Row]:
    """Return the rows that have the setting."""
    return [row for row in rows if axis.value(row.runs[0]) is not None]


def _varies(rows: Sequence[Row], axis: Factor) -> bool:
    return len({axis.value(row.runs[0]) for row in rows}) > 1


def _joined(rows: Sequence[Row], axes: Sequence[Factor], known: int) -> list[Factor]:
    """Return the axes, those that were found with what goes along with them, so that nothing is taken for the effect of one alone.

    Where all runs on one backend are async ones, and all on the other sync, the axis is backend and mode; where sync ones have the direct
    exchange on one backend alone, it is backend and exchange. The first `known` were chosen.
    """
    found = list(axes)
    for rule in RULES:
        keys = {key for axis in found for key in axis.key.split(_AND)}
        those = _known(rows, rule)
        if rule.key not in _CHOSEN_BY_THEMSELVES or rule.key in keys or not _varies(those, rule):
            continue
        place = next((index for index in range(known, len(found)) if not tells_apart(those, [found[index]], rule)), None)
        if place is not None:
            found[place] = _both(found[place], rule)
    return found


_CHOSEN_BY_THEMSELVES = frozenset({"backend", "mode", "nodes", "exchange"})
"""Settings that come of no other one, among the runs that have them: that async ones have no exchange comes of the mode."""

_AND = " and "


def _both(one: Factor, other: Factor) -> Factor:
    return replace(
        one,
        key=f"{one.key}{_AND}{other.key}",
        label=f"{one.label}{_AND}{other.label}",
        value=lambda run: (one.value(run), other.value(run)),
        show=lambda pair: f"{value_text(one, pair[0])}, {value_text(other, pair[1])}",
        order=lambda pair: ((pair[0] is not None, one.order(pair[0]) if pair[0] is not None else ()), str(pair[1])),
    )


def _named(rows: Sequence[Row], axes: Sequence[Factor]) -> list[SetUp]:
    """Return the set-ups, called by what they differ in; those that would be called alike keep their names beside it."""
    values = [{axis.key: axis.value(row.runs[0]) for axis in axes} for row in rows]
    labels = [called(axes, one) for one in values]
    return [
        SetUp(label if labels.count(label) == 1 and label else " ".join(filter(None, [label, f"({row.label})"])), one, row)
        for label, one, row in zip(labels, values, rows, strict=True)
    ]


def called(axes: Sequence[Factor], values: Mapping[str, Any]) -> str:
    """Return what a set-up is called by its values of some axes: ``torch, async, global batch 32``."""
    return ", ".join(value_text(axis, values[axis.key]) for axis in axes)


def value_text(axis: Factor, value: Any) -> str:
    """Return a value of an axis as a name: words speak for themselves, numbers and switches need their label."""
    return shown(axis, value) if _AND in axis.key else setting_text(axis.label, shown(axis, value))


def shown(axis: Factor, value: Any) -> str:
    """Return a value of an axis by itself, on one line whatever a run's files have for it."""
    return "-" if value is None else one_line(axis.show(value))
