"""The compared configurations with their repeats, and the axes in which they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import fmean, median
from typing import Any

from ...core.console import one_line
from ...core.setting import SPEED, TARGET
from ..compare.caveats import LEARNT_UNDER_CONTENTION
from ..compare.comparability import Comparability, Difference, compare_settings
from ..compare.factors import RULES, Factor, setting_text
from ..compare.ratios import USUAL_SCATTER, Ratio, Sample, better_by, interval_of_mean
from ..compare.rows import Row, is_distinguishing, make_entries
from ..runs.cpu_starvation import contention_judged, cpu_starvation, log_speed_lost, timed_runs
from ..runs.run import Run, number
from .evidence import STEP_COMPONENTS, read_workers
from .quality import Quality, assess_quality, grouped

# Settings that follow from others; an axis only if varied independently.
DERIVED = frozenset({"seed", "sharing", "threads", "network", "link", "distributed", "exchange"})


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure to rank by, of the kind `group`; `better` is 1 where more is better, else −1."""

    key: str
    group: str
    better: int


SPEED_FIGURE = Figure("examples_per_second", SPEED, 1)
TARGET_FIGURE = Figure("time_to_target_seconds", TARGET, -1)
FIGURES = (TARGET_FIGURE, SPEED_FIGURE)  # by importance


@dataclass(frozen=True)
class Configuration:
    """A configuration and its repeats, with each axis's value by key, and a label of these."""

    index: int  # in `ConfigurationSet.all`
    label: str
    values: Mapping[str, Any]
    row: Row

    @property
    def runs(self) -> tuple[Run, ...]:
        """The repeats, at least one."""
        return self.row.runs

    @property
    def missed_target(self) -> bool:
        """Whether there was a target that not every run reached."""
        return self.row.converged is not None and not self.row.all_converged

    def figures(self, figure: Figure) -> tuple[float, ...]:
        """Return a figure of the uncontended runs; empty if incomplete or a target was missed."""
        if figure.group == TARGET and not self.row.all_converged:
            return ()
        values = [number(run.summary.get(figure.key)) for run in timed_runs(self.runs)]
        known = [value for value in values if value is not None and 0 < value < math.inf]
        return tuple(known) if len(known) == len(values) else ()

    def sample(self, figure: Figure) -> Sample:
        """Return `figures`, and how much contention below the limit may have reduced them."""
        summaries = [run.summary for run in timed_runs(self.runs)]
        leeway = fmean(map(log_speed_lost, summaries)) if summaries else 0.0
        return Sample(self.figures(figure), leeway, all(map(contention_judged, summaries)))

    def interval(self, figure: Figure) -> tuple[float, float] | None:
        """Return the 95 % interval of a geometric mean, widened for contention; None for one value."""
        sample = self.sample(figure)
        scatter = interval_of_mean(sample.values)
        if scatter is None:
            return None
        faster = math.exp(sample.leeway)
        return (scatter[0], scatter[1] * faster) if figure.better > 0 else (scatter[0] / faster, scatter[1])

    @property
    def contention_factor(self) -> float:
        """The possible speed-up without contention below the limit."""
        return math.exp(self.sample(SPEED_FIGURE).leeway)

    @property
    def contended(self) -> bool:
        """Whether `contention_factor` exceeds the usual scatter."""
        return self.contention_factor >= 1.0 + USUAL_SCATTER

    @cached_property
    def median_run(self) -> Run:
        """The run with the median step shares; with fewer than three calibrated ones by speed."""
        runs = timed_runs(self.runs) or self.runs
        ordered = sorted(runs, key=lambda run: number(run.summary["examples_per_second"]) or 0.0)
        middle = (len(ordered) - 1) // 2
        parts = [(run, shares) for run in ordered if (shares := _step_shares(run)) is not None]
        if len(parts) < 3:
            return ordered[middle]
        medians = {name: median(shares[name] for _, shares in parts) for name in STEP_COMPONENTS}
        return min(parts, key=lambda pair: math.fsum(abs(pair[1][name] - medians[name]) for name in STEP_COMPONENTS))[0]


def _step_shares(run: Run) -> Mapping[str, float] | None:
    workers = read_workers(run.summary) if run.summary.get("time_shares") else []
    if not workers:
        return None
    return {name: fmean(worker.fractions[name] for worker in workers) for name in STEP_COMPONENTS}


@dataclass(frozen=True)
class ConfigurationSet:
    """All compared configurations, and the axes in which they differ.

    Of `contended_runs`, which had CPU contention, only the quality counts.
    """

    all: tuple[Configuration, ...]
    axes: tuple[Factor, ...]
    contended_runs: tuple[Run, ...]
    comparability: Comparability

    def comparable(self, first: Configuration, second: Configuration, group: str) -> bool:
        """Return whether a kind of figures of two configurations is comparable."""
        return group not in self.comparability.confounded(first.index, second.index)

    @cached_property
    def quality(self) -> Quality:
        """Their quality, by index in `all`."""

        def comparable(group: str, among: Sequence[int]) -> Sequence[int]:
            return self.comparability.comparable(group, among, ignoring=(LEARNT_UNDER_CONTENTION,))  # marked, but counted

        keys = [tuple((key, value) for key, value in config.values.items() if key != "test_size") for config in self.all]
        return assess_quality([config.runs for config in self.all], keys, comparable)

    def is_ranked(self, config: Configuration) -> bool:
        """Return whether a configuration is ranked by speed: neither diverged nor of worse quality."""
        return self.quality.is_ranked(config.index)

    def all_comparable(self, figure: Figure) -> list[Configuration]:
        """Return the largest set of ranked configurations that are comparable in a figure."""
        known = [config.index for config in self.all if config.figures(figure) and self.is_ranked(config)]
        return [self.all[index] for index in self.comparability.comparable(figure.group, known)]

    def faults(self, first: Configuration, second: Configuration, group: str) -> list[Difference]:
        """Return what makes a kind of figures of two configurations incomparable."""
        return [
            fault
            for fault in self.comparability.faults
            if group in fault.confounds
            and (fault.values[first.index] != fault.values[second.index] or not self.comparable(first, first, group))
        ]

    def why_not_judged(self, config: Configuration) -> list[Difference]:
        """Return what makes a configuration's quality incomparable with that of the judged ones."""
        judged = [self.all[place] for place in sorted(self.quality.judged)]
        faults = self.faults(config, judged[0], self.quality.kind) if judged else []
        return [fault for fault in faults if fault.key != LEARNT_UNDER_CONTENTION]

    def strata(self, axis: Factor) -> list[list[Configuration]]:
        """Group the configurations that are equal in every other axis."""
        return [*grouped((tuple(value for key, value in config.values.items() if key != axis.key), config) for config in self.all).values()]

    @cached_property
    def superlinear_pairs(self) -> list[tuple[Configuration, Configuration, Ratio]]:
        """Pairs that differ only in nodes, with a superlinear speed-up: not an effect of the nodes."""
        axis = next((axis for axis in self.axes if axis.key == "nodes"), None)
        timed = [[config for config in group if config.figures(SPEED_FIGURE)] for group in ([] if axis is None else self.strata(axis))]
        return [
            (more, fewer, times)
            for group in timed
            for fewer, more in combinations(sorted(group, key=lambda config: int(config.values["nodes"])), 2)
            if (ideal := more.values["nodes"] / fewer.values["nodes"]) > 1
            if (times := speedup(more, fewer, SPEED_FIGURE)).is_above(ideal)
        ]

    def is_superlinear(self, first: Configuration, second: Configuration) -> bool:
        """Return whether two configurations are a pair of `superlinear_pairs`."""
        return any({first.index, second.index} == {more.index, fewer.index} for more, fewer, _ in self.superlinear_pairs)

    def sorted_values(self, axis: Factor) -> list[Any]:
        """Return the sorted values of an axis, None last."""
        values = {config.values[axis.key] for config in self.all}
        return sorted(values, key=lambda value: (value is None, () if value is None else axis.order(value)))

    @property
    def in_order(self) -> list[Configuration]:
        """All, sorted by their values of the axes."""
        values = [(axis.key, self.sorted_values(axis)) for axis in self.axes]
        return sorted(self.all, key=lambda config: [known.index(config.values[key]) for key, known in values])

    def other_axes(self, axis: Factor) -> list[Factor]:
        """Return all axes but this one."""
        return [rule for rule in self.axes if rule.key != axis.key]


def speedup(first: Configuration, second: Configuration, figure: Figure) -> Ratio:
    """Return the ratio of `one` to `other` by a figure that both have."""
    return better_by([(first.sample(figure), second.sample(figure))], figure.better)


def configuration_set(runs: Sequence[Run], swept: Sequence[Factor] = ()) -> ConfigurationSet:
    """Return the configurations of labelled runs, by their axes and those `swept`."""
    rows = make_entries(runs, by=swept)
    contended_runs = [run for row in rows for run in row.runs if cpu_starvation(run.summary) is not None]
    axes = find_axes(rows)
    axes += [axis for axis in swept if is_distinguishing(rows, axes, axis)]
    firsts = [row.runs[0] for row in rows]
    keys = frozenset(key for axis in axes for key in axis.key.split(_JOINT))
    chosen = {rule.key for rule in RULES if rule.key in _INDEPENDENT and _is_varied(_rows_with(rows, rule), rule)}
    chosen |= {name for name in _AUTOMATIC if len({repr(run.job.get(name)) for run in firsts}) > 1}
    independent = (DERIVED - chosen) | keys
    comparability = compare_settings(firsts, independent=independent, repeats=[row.runs for row in rows])
    return ConfigurationSet(tuple(_label_configurations(rows, axes)), tuple(axes), tuple(contended_runs), comparability)


def find_axes(rows: Sequence[Row], swept: Sequence[Factor] = ()) -> list[Factor]:
    """Return the settings in which rows differ, the `swept` ones first; each adds a distinction."""
    axes = [axis for axis in swept if _is_varied(rows, axis)]
    for rule in RULES:
        if rule.key not in {axis.key for axis in axes} and rule.key != "seed" and rule.matters and is_distinguishing(rows, axes, rule):
            axes.append(rule)
    return _join_implied(rows, axes, len(swept))


_AUTOMATIC = frozenset({"threads", "network", "distributed"})  # automatic unless a job sets them


def _rows_with(rows: Sequence[Row], axis: Factor) -> list[Row]:
    return [row for row in rows if axis.value(row.runs[0]) is not None]


def _is_varied(rows: Sequence[Row], axis: Factor) -> bool:
    return len({axis.value(row.runs[0]) for row in rows}) > 1


def _join_implied(rows: Sequence[Row], axes: Sequence[Factor], known: int) -> list[Factor]:
    joined = list(axes)
    for rule in RULES:
        keys = {key for axis in joined for key in axis.key.split(_JOINT)}
        rows_with_value = _rows_with(rows, rule)
        if rule.key not in _INDEPENDENT or rule.key in keys or not _is_varied(rows_with_value, rule):
            continue
        place = next((index for index in range(known, len(joined)) if not is_distinguishing(rows_with_value, [joined[index]], rule)), None)
        if place is not None:
            joined[place] = _join_axes(joined[place], rule)
    return joined


# Settings that do not follow from others: async runs have no exchange.
_INDEPENDENT = frozenset({"backend", "mode", "nodes", "exchange"})
_JOINT = " and "


def _join_axes(first: Factor, second: Factor) -> Factor:
    return replace(
        first,
        key=f"{first.key}{_JOINT}{second.key}",
        label=f"{first.label}{_JOINT}{second.label}",
        value=lambda run: (first.value(run), second.value(run)),
        show=lambda pair: f"{value_text(first, pair[0])}, {value_text(second, pair[1])}",
        order=lambda pair: ((pair[0] is not None, first.order(pair[0]) if pair[0] is not None else ()), str(pair[1])),
    )


def _label_configurations(rows: Sequence[Row], axes: Sequence[Factor]) -> list[Configuration]:
    values = [{axis.key: axis.value(row.runs[0]) for axis in axes} for row in rows]
    labels = [values_label(axes, axis_values) for axis_values in values]
    return [
        Configuration(
            index, label if labels.count(label) == 1 and label else " ".join(filter(None, [label, f"({row.label})"])), axis_values, row
        )
        for index, (label, axis_values, row) in enumerate(zip(labels, values, rows, strict=True))
    ]


def values_label(axes: Sequence[Factor], values: Mapping[str, Any]) -> str:
    """Return a configuration's name by some axes: ``torch, async, global batch 32``."""
    return ", ".join(value_text(axis, values[axis.key]) for axis in axes)


def value_text(axis: Factor, value: Any) -> str:
    """Return an axis's value as text, with its label for numbers and switches."""
    return bare_value_text(axis, value) if _JOINT in axis.key else setting_text(axis.label, bare_value_text(axis, value))


def bare_value_text(axis: Factor, value: Any) -> str:
    """Return a value of an axis as text on one line."""
    return "-" if value is None else one_line(axis.show(value))


FINE = 0.1  # sufficient relative resolution of a time to target


def coarse_gaps(configurations: Iterable[Configuration]) -> list[float]:
    """Return the sorted seconds between a target's evaluation and the one before, unless `FINE`."""
    gaps = [gap_and_time for config in configurations for run in config.runs if (gap_and_time := _gap(run)) is not None]
    if not gaps or median(gap / seconds for gap, seconds in gaps) <= FINE:
        return []
    return sorted(gap for gap, _ in gaps)


def _gap(run: Run) -> tuple[float, float] | None:
    seconds = number(run.summary.get("time_to_target_seconds"))
    times = [record.time_seconds for record in run.tests]
    if not seconds or not times:
        return None
    return seconds - max((time for time in times if time < seconds), default=0.0), seconds


def count_with_noun(count: int, what: str) -> str:
    """Return a count with its noun: ``1 run``, ``12 runs``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def differences_text(faults: Sequence[Difference]) -> str:
    """Return the differing values: `` (budget 9,600 examples and 19,200 examples)``."""
    values = {fault.label: " and ".join(fault.known) for fault in faults}
    return f" ({'; '.join(f'{label} {text}' for label, text in values.items())})" if values else ""


def interval_text(low: str, high: str, *, widened: bool) -> str:
    """Return an interval with its name, and a star if contention widens it."""
    return f"95 % CI{'*' * widened} {low}–{high}"


def times_text(value: float) -> str:
    """Return a ratio with its sign: ``1.84 ×``."""
    return f"{ratio_text(value)} ×"


def ratio_text(value: float) -> str:
    """Return a ratio with three digits, with four near 1."""
    return f"{value:.3g}" if value >= 10 else f"{value:.3f}" if 0 < abs(value - 1.0) < 0.005 else f"{value:.2f}"
