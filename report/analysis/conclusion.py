"""The conclusion from several runs: ranking, effects, bottlenecks and advice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from ...records.store.jsonl import finite_json
from ...records.text import duration_text
from ..compare.factors import MAX_NAMED, Factor, some_of
from ..compare.ratios import Ratio, better_by, geometric_mean, repeats_that_would_tell
from ..runs.cpu_starvation import contention_judged, cpu_starvation, timed_runs
from ..runs.run import Run, labelled, number
from .advice import Advice, advise
from .configurations import (
    FIGURES,
    SPEED_FIGURE,
    Configuration,
    ConfigurationSet,
    Figure,
    called,
    coarse_gaps,
    configuration_set,
    counted,
    differing,
    shown,
    times_as_good,
    times_text,
)
from .configurations import TARGET_FIGURE as TARGET
from .evidence import percent
from .quality import LossAgreement, loss_agreements
from .verdict import Explanation, explain


@dataclass(frozen=True, slots=True)
class AxisVerdict:
    """The ranking of an axis by one figure."""

    axis: str
    label: str
    figure: str
    missed: tuple[Configuration, ...]  # the target in some of their runs; ranked last, without a ratio
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
            "missed_the_target": [{"set_up": one.label, "reached": one.row.converged or 0, "runs": len(one.runs)} for one in self.missed],
            "why_not": self.why_not,
        }


Pairs = list[tuple[Configuration, Configuration]]


def judge_axis(found: ConfigurationSet, axis: Factor, figure: Figure) -> AxisVerdict:
    """Return the verdict on an axis by a figure."""
    groups = found.strata(axis)
    values = found.values_of(axis)
    pairs = {(a, b): _pairs(found, groups, axis.key, figure, a, b) for a, b in combinations(values, 2)}
    known = [pair for pair, members in pairs.items() if members]
    missed = tuple(one for group in groups for one in group if figure.better < 0 and one.missed_target)
    if not known:
        return AxisVerdict(axis.key, axis.label, figure.key, missed, why_not=_why_not(found, groups, figure))
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


def _pairs(found: ConfigurationSet, groups: Sequence[Sequence[Configuration]], key: str, figure: Figure, value: Any, other: Any) -> Pairs:
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


def _why_not(found: ConfigurationSet, groups: Sequence[Sequence[Configuration]], figure: Figure) -> str:
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


def _why_not_measured(pairs: Sequence[tuple[Configuration, Configuration]], figure: Figure) -> str:
    every = {one.index: one for pair in pairs for one in pair}.values()
    contended = [run.name for one in every if not timed_runs(one.runs) for run in one.runs]
    if contended and (figure.better > 0 or all(one.row.all_converged for one in every)):
        return f"CPU contention from other programs voids speeds; repeat {some_of(contended)}"
    return "no pair differing only in this setting reached the target in every run" if figure.better < 0 else "it is unknown"


def _why_not_ranked(found: ConfigurationSet, pairs: Sequence[tuple[Configuration, Configuration]]) -> str:
    places = {one.index for pair in pairs for one in pair}
    if places & found.quality.diverged.keys():
        return "one of the two diverged"
    assert found.quality.info is not None
    if places & found.quality.worse:
        return f"test {found.quality.info.label} differs significantly"
    outside = [one for pair in pairs for one in pair if one.index not in found.quality.judged]
    faults = [fault for one in outside for fault in found.why_not_judged(one)]
    return f"test {found.quality.info.label} is not comparable{differing(faults)}"


MAX_ADVICE = 2


@dataclass(frozen=True, slots=True)
class Best:
    """The best configuration by a figure."""

    configuration: Configuration
    figure: Figure
    value: float  # geometric mean over the repeats
    interval: tuple[float, float] | None  # 95 %, None for one run
    worst: Configuration | None  # last of the `compared` ones, None for a single one
    over_worst: Ratio | None  # ratio of the best to the worst
    compared: int = 1
    left: int = 0  # number with this figure that are not comparable
    rivals: tuple[Configuration, ...] = ()  # not significantly worse than the best, in order

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "set_up": self.configuration.label,
            "figure": self.figure.key,
            "value": self.value,
            "runs": len(self.configuration.figures(self.figure)),
            "interval": self.interval,
            "worst": None if self.worst is None else self.worst.label,
            "ratio_over_worst": None if self.over_worst is None else self.over_worst.to_json(),
            "compared": self.compared,
            "not_comparable": self.left,
            "not_surely_worse": [one.label for one in self.rivals],
        }


@dataclass(frozen=True, slots=True)
class Limit:
    """The bottleneck of a configuration, by its typical run's calibration."""

    configuration: Configuration
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The conclusion from several runs."""

    configurations: ConfigurationSet
    best: tuple[Best, ...]  # by each of the `figures`
    verdicts: tuple[AxisVerdict, ...]  # by axis and each of the `figures`
    limits: tuple[Limit, ...]  # bottlenecks of the best and the worst
    advice: tuple[Advice, ...]  # for the best
    losses: tuple[LossAgreement, ...] = ()  # of runs that should train alike
    figures: tuple[Figure, ...] = FIGURES  # to rank by

    @property
    def concludes(self) -> bool:
        """Whether there are several runs to conclude from."""
        return sum(len(one.runs) for one in self.configurations.all) > 1

    def to_json(self, sentences: Sequence[str] = ()) -> dict[str, Any]:
        """Return it as a JSON object, with its sentences."""
        document = {
            "sentences": list(sentences),
            "set_ups": [{"label": one.label, "runs": [run.name for run in one.runs]} for one in self.configurations.all],
            "best": [one.to_json() for one in self.best],
            "axes": [one.to_json() for one in self.verdicts],
            "limits": [
                {"set_up": limit.configuration.label, "run": limit.explanation.evidence.name, "verdict": limit.explanation.verdict}
                for limit in self.limits
            ],
            "next": [{name: getattr(one, name) for name in ("option", "speedup", "bound", "reason")} for one in self.advice],
            "losses": [asdict(one) for one in self.losses],
            "quality": self.configurations.quality.to_json([one.label for one in self.configurations.all]),
            "left_out": [
                {"run": run.name, "starved_fraction": by.fraction, "foreign_cores": by.foreign_cores}
                for run in self.configurations.disturbed
                if (by := cpu_starvation(run.summary)) is not None
            ],
        }
        found: dict[str, Any] = finite_json(document)
        return found


def conclude(runs: Sequence[Run], swept: Sequence[Factor] = (), figures: Sequence[Figure] = FIGURES) -> Conclusion:
    """Return the conclusion from runs with figures, ranked by `figures`; `swept`: see `configuration_set`."""
    found = configuration_set(labelled(runs), swept)
    best = [one for figure in figures if (one := _best(found, figure)) is not None]
    # a target ranks an axis only if two configurations always reached it
    ranked = [figure for figure in figures if figure.better > 0 or sum(bool(one.figures(figure)) for one in found.all) > 1]
    verdicts = [judge_axis(found, axis, figure) for axis in found.axes for figure in ranked]
    every = [run for one in found.all for run in one.runs]
    limits = _limits(found, best) if figures and len(every) > 1 else []
    advice = advise(limits[0].explanation) if limits and not found.quality.undecided else []
    advice = [one for one in advice if one.speedup is not None][:MAX_ADVICE]
    losses = loss_agreements(every)
    return Conclusion(found, tuple(best), tuple(verdicts), tuple(limits), tuple(advice), tuple(losses), tuple(figures))


def _best(found: ConfigurationSet, figure: Figure) -> Best | None:
    among = found.all_comparable(figure)
    if not among or (len(among) == 1 and (len(found.all) == 1 or figure.better > 0)):
        return None
    missed = [one.missed_target and found.comparable(among[0], one, figure.group) for one in found.all if one is not among[0]]
    if len(among) == 1 and not all(missed):  # alone it is only the best if it alone reached the target
        return None
    ordered = sorted(among, key=lambda one: -figure.better * geometric_mean(one.figures(figure)))
    first, worst = ordered[0], ordered[-1] if len(ordered) > 1 else None
    over = None if worst is None else times_as_good(first, worst, figure)
    left = sum(bool(one.figures(figure)) and found.ranks(one) for one in found.all) - len(among)
    rivals = [one for one in ordered[1:-1] if not times_as_good(first, one, figure).sure] if over is not None and over.known else []
    value = geometric_mean(first.figures(figure))
    return Best(first, figure, value, first.interval(figure), worst, over, len(among), left, tuple(rivals))


def _limits(found: ConfigurationSet, best: Sequence[Best]) -> list[Limit]:
    place = found.quality.best if found.quality.best is not None else 0 if len(found.all) == 1 else None
    alone = () if place is None or not found.quality.ranks(place) else (found.all[place],)
    looked_at = (best[0].configuration, best[0].worst) if best else alone
    return [Limit(one, explain(one.typical_run)) for one in looked_at if one is not None and one.typical_run.calibration is not None]


MAX_TOO_FAST = 3
MAX_STARTS = 3
MIN_START = 0.1  # from this fraction of the time to target on, start-up may change the ranking


def cautions(conclusion: Conclusion) -> Iterator[str]:
    """Yield the caveats, a sentence each."""
    configurations = conclusion.configurations
    summaries = [run.summary for one in configurations.all for run in one.runs]
    if any((summary.get("nodes_sharing_cores") or 1) > 1 for summary in summaries):
        yield "Nodes share cores: results do not predict separate machines."
    yield from _target_times(conclusion)
    for more, fewer, times in configurations.beyond_ideal[:MAX_TOO_FAST]:
        ideal = int(more.values["nodes"]) / int(fewer.values["nodes"])
        yield (
            f"{more.label} is {times_text(times.ratio)} as fast as {fewer.label}, above the ideal {ideal:.3g} ×: a measurement is wrong or "
            "another advantage helped, so this pair does not count for the effect of nodes; measure both again."
        )
    yield from _contention(configurations)
    if any(summary.get("synthetic") for summary in summaries):
        yield "The data is synthetic, so quality has no meaning."


def _target_times(conclusion: Conclusion) -> Iterator[str]:
    best = next((one for one in conclusion.best if one.figure is TARGET), None)
    if best is None:
        return
    starts = []
    for one in (best.configuration, *best.rivals, best.worst):
        known = [] if one is None else [number(run.summary.get("init_seconds")) for run in one.runs]
        if one is not None and (seconds := [value for value in known if value is not None]):
            starts.append((one, fmean(seconds)))
    if any(seconds >= MIN_START * geometric_mean(one.figures(TARGET)) for one, seconds in starts):
        named = ", ".join(f"{duration_text(seconds)} with {one.label}" for one, seconds in starts[:MAX_STARTS])
        yield f"Time to target excludes start-up: {named}."
    measured = [one for one in conclusion.configurations.all if one.figures(TARGET)]
    if gaps := coarse_gaps(measured):
        apart = duration_text(gaps[0]) if gaps[0] == gaps[-1] else f"{duration_text(gaps[0])} to {duration_text(gaps[-1])}"
        every = {str(run.job.get("eval_every")) for one in measured for run in one.runs}
        now = f" (--eval-every {every.pop()})" if len(every) == 1 else ""
        yield f"Time to target has the resolution of evaluations{now}, {apart} here; evaluate more often for a finer one."


def _contention(configurations: ConfigurationSet) -> Iterator[str]:
    every, disturbed = configurations.all, configurations.disturbed
    for run in disturbed[:MAX_NAMED]:
        by = cpu_starvation(run.summary)
        assert by is not None
        taken = f"other programs took {percent(by.fraction)} of the CPU time that {run.name} needed"
        yield f"CPU contention: {taken}; its speed and times are not used."
    if (more := len(disturbed) - MAX_NAMED) > 0:
        yield f"CPU contention: the speed and times of {counted(more, 'more run')} are not used either."
    ranked = [one for one in every if configurations.ranks(one)]
    slowed = [one for one in ranked if len(ranked) > 1 and one.contended]
    if slowed:
        named = some_of([f"{one.label} up to {times_text(one.contention_factor)} as fast" for one in slowed])
        widened = any(one.interval(SPEED_FIGURE) for one in slowed)
        what = "* Widened for CPU contention" if widened else "CPU contention may have reduced throughput"
        yield f"{what}; without it: {named}."
    unjudged = [run.name for one in every for run in one.runs if not contention_judged(run.summary)]
    if unjudged:
        yield f"CPU contention was not measured (run under 2 s, or no samples): {some_of(unjudged)}."
    if any(run.summary["mode"] == "async" for run in disturbed):
        yield "CPU contention changes the staleness of async updates, and so the quality of async runs."
