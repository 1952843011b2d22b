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
    bare_value_text,
    coarse_gaps,
    configuration_set,
    count_with_noun,
    differences_text,
    speedup,
    times_text,
    values_label,
)
from .configurations import TARGET_FIGURE as TARGET
from .diagnosis import Diagnosis, diagnose
from .evidence import percent
from .quality import LossAgreement, grouped, loss_agreements


@dataclass(frozen=True, slots=True)
class AxisRanking:
    """The ranking of an axis by one figure."""

    axis: str
    label: str
    figure: str
    missed: tuple[Configuration, ...]  # the target in some of their runs; ranked last, without a ratio
    winner: str | None = None  # the best value; None if no two compare
    second: str | None = None
    ratio: Ratio | None = None  # over all pairs of otherwise equal configurations with these two values
    ratios: tuple[Ratio, ...] = ()  # of each pair
    where: tuple[str, ...] = ()  # common settings of each pair; empty without other axes
    repeats: int | None = None  # per configuration for a significant ratio
    last: str | None = None  # the worst of several values
    over_last: Ratio | None = None  # ratio of the best to the worst
    why_not: str | None = None  # reason without winner

    @property
    def depends(self) -> bool:
        """Whether some pair is significantly reversed."""
        return any(ratio.sure and ratio.ratio < 1.0 for ratio in self.ratios)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "axis": self.axis,
            "figure": self.figure,
            "best": self.winner,
            "second": self.second,
            "ratio": None if self.ratio is None else self.ratio.to_json(),
            "within": list(self.where),
            "ratio_within": [ratio.to_json() for ratio in self.ratios],
            "depends": self.depends,
            "repeats_that_would_tell": self.repeats,
            "worst": self.last,
            "ratio_over_worst": None if self.over_last is None else self.over_last.to_json(),
            "missed_the_target": [
                {"set_up": config.label, "reached": config.row.converged or 0, "runs": len(config.runs)} for config in self.missed
            ],
            "why_not": self.why_not,
        }


Pairs = list[tuple[Configuration, Configuration]]


def rank_axis(configs: ConfigurationSet, axis: Factor, figure: Figure) -> AxisRanking:
    """Return the verdict on an axis by a figure."""
    groups = configs.strata(axis)
    values = configs.sorted_values(axis)
    pairs = {(a, b): _comparable_pairs(configs, groups, axis.key, figure, a, b) for a, b in combinations(values, 2)}
    known = [pair for pair, members in pairs.items() if members]
    missed = tuple(config for group in groups for config in group if figure.better < 0 and config.missed_target)
    if not known:
        return AxisRanking(axis.key, axis.label, figure.key, missed, why_not=_reason_unranked(configs, groups, figure))
    ranked = _rank_values(values, pairs, figure)
    winner = ranked[0]
    comparable = [value for value in ranked[1:] if _pairs_between(pairs, winner, value)]  # a value may be comparable only with others
    second, last = comparable[0], comparable[-1]
    members = _pairs_between(pairs, winner, second)
    first = _ratio(members, figure)
    other_axes = configs.other_axes(axis)
    repeats = None if first.sure or first.open_by_contention else repeats_that_would_tell(_figures(members, figure))
    beyond = _pairs_between(pairs, winner, last) if last != second else []
    return AxisRanking(
        axis.key,
        axis.label,
        figure.key,
        missed,
        bare_value_text(axis, winner),
        bare_value_text(axis, second),
        first,
        tuple(_ratio([pair], figure) for pair in members),
        tuple(values_label(other_axes, config.values) for config, _ in members) if other_axes else (),
        repeats,
        bare_value_text(axis, last) if beyond else None,
        _ratio(beyond, figure) if beyond else None,
    )


def _comparable_pairs(
    configs: ConfigurationSet, groups: Sequence[Sequence[Configuration]], key: str, figure: Figure, value: Any, other_value: Any
) -> Pairs:
    ranked = [[config for config in group if config.figures(figure) and configs.is_ranked(config)] for group in groups]
    return [
        (first, second)
        for group in ranked
        for first in group
        if first.values[key] == value
        for second in group
        if second.values[key] == other_value
        if configs.comparable(first, second, figure.group) and not (key == "nodes" and configs.is_superlinear(first, second))
    ]


def _pairs_between(pairs: Mapping[tuple[Any, Any], Pairs], value: Any, other_value: Any) -> Pairs:
    return pairs.get((value, other_value)) or [(second, first) for first, second in pairs.get((other_value, value), [])]


def _figures(members: Pairs, figure: Figure) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    sides = [(first.figures(figure), second.figures(figure)) for first, second in members]
    return sides if figure.better > 0 else [(second, first) for first, second in sides]


def _ratio(members: Pairs, figure: Figure) -> Ratio:
    return better_by([(first.sample(figure), second.sample(figure)) for first, second in members], figure.better)


def _rank_values(values: Sequence[Any], pairs: Mapping[tuple[Any, Any], Pairs], figure: Figure) -> list[Any]:
    ratios = {pair: math.log(_ratio(members, figure).ratio) for pair, members in pairs.items() if members}
    logs = grouped(entry for (first, second), ratio in ratios.items() for entry in ((first, ratio), (second, -ratio)))
    return sorted((value for value in values if value in logs), key=lambda value: -fmean(logs[value]))


def _reason_unranked(configs: ConfigurationSet, groups: Sequence[Sequence[Configuration]], figure: Figure) -> str:
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    if not pairs:
        return "no pair differs only in this setting"
    measured = [pair for pair in pairs if all(config.figures(figure) for config in pair)]
    if not measured:
        return _why_not_measured(pairs, figure)
    if not any(configs.is_ranked(first) and configs.is_ranked(second) for first, second in measured):
        return _why_not_ranked(configs, measured)
    if all(configs.is_superlinear(*pair) for pair in measured):
        return "the speed-up exceeds the ideal, so a measurement is wrong"
    reasons = [fault.label for first, second in measured for fault in configs.faults(first, second, figure.group)]
    return f"it is confounded with {', '.join(dict.fromkeys(reasons))}"


def _why_not_measured(pairs: Sequence[tuple[Configuration, Configuration]], figure: Figure) -> str:
    members = {config.index: config for pair in pairs for config in pair}.values()
    contended = [run.name for config in members if not timed_runs(config.runs) for run in config.runs]
    if contended and (figure.better > 0 or all(config.row.all_converged for config in members)):
        return f"CPU contention from other programs voids speeds; repeat {some_of(contended)}"
    return "no pair differing only in this setting reached the target in every run" if figure.better < 0 else "it is unknown"


def _why_not_ranked(configs: ConfigurationSet, pairs: Sequence[tuple[Configuration, Configuration]]) -> str:
    places = {config.index for pair in pairs for config in pair}
    if places & configs.quality.diverged.keys():
        return "one of the two diverged"
    assert configs.quality.info is not None
    if places & configs.quality.worse:
        return f"test {configs.quality.info.label} differs significantly"
    outside = [config for pair in pairs for config in pair if config.index not in configs.quality.judged]
    faults = [fault for config in outside for fault in configs.why_not_judged(config)]
    return f"test {configs.quality.info.label} is not comparable{differences_text(faults)}"


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
            "not_surely_worse": [config.label for config in self.rivals],
        }


@dataclass(frozen=True, slots=True)
class ConfigurationDiagnosis:
    """The bottleneck of a configuration, by its typical run's calibration."""

    configuration: Configuration
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The conclusion from several runs."""

    configurations: ConfigurationSet
    best: tuple[Best, ...]  # by each of the `figures`
    rankings: tuple[AxisRanking, ...]  # by axis and each of the `figures`
    diagnoses: tuple[ConfigurationDiagnosis, ...]  # bottlenecks of the best and the worst
    advice: tuple[Advice, ...]  # for the best
    losses: tuple[LossAgreement, ...] = ()  # of runs that should train alike
    figures: tuple[Figure, ...] = FIGURES  # to rank by

    @property
    def is_conclusive(self) -> bool:
        """Whether there are several runs to conclude from."""
        return sum(len(config.runs) for config in self.configurations.all) > 1

    def to_json(self, sentences: Sequence[str] = ()) -> dict[str, Any]:
        """Return it as a JSON object, with its sentences."""
        document = {
            "sentences": list(sentences),
            "set_ups": [{"label": config.label, "runs": [run.name for run in config.runs]} for config in self.configurations.all],
            "best": [entry.to_json() for entry in self.best],
            "axes": [entry.to_json() for entry in self.rankings],
            "limits": [
                {"set_up": diagnosed.configuration.label, "run": diagnosed.diagnosis.evidence.name, "verdict": diagnosed.diagnosis.verdict}
                for diagnosed in self.diagnoses
            ],
            "next": [{name: getattr(entry, name) for name in ("option", "speedup", "bound", "reason")} for entry in self.advice],
            "losses": [asdict(entry) for entry in self.losses],
            "quality": self.configurations.quality.to_json([config.label for config in self.configurations.all]),
            "left_out": [
                {"run": run.name, "starved_fraction": starvation.fraction, "foreign_cores": starvation.foreign_cores}
                for run in self.configurations.contended_runs
                if (starvation := cpu_starvation(run.summary)) is not None
            ],
        }
        plain: dict[str, Any] = finite_json(document)
        return plain


def conclude(runs: Sequence[Run], swept: Sequence[Factor] = (), figures: Sequence[Figure] = FIGURES) -> Conclusion:
    """Return the conclusion from runs with figures, ranked by `figures`.

    `swept`: see `configuration_set`.
    """
    configs = configuration_set(labelled(runs), swept)
    best = [entry for figure in figures if (entry := _find_best(configs, figure)) is not None]
    # a target ranks an axis only if two configurations always reached it
    ranked = [figure for figure in figures if figure.better > 0 or sum(bool(config.figures(figure)) for config in configs.all) > 1]
    rankings = [rank_axis(configs, axis, figure) for axis in configs.axes for figure in ranked]
    every = [run for config in configs.all for run in config.runs]
    diagnoses = _diagnoses(configs, best) if figures and len(every) > 1 else []
    advice = advise(diagnoses[0].diagnosis) if diagnoses and not configs.quality.undecided else []
    advice = [entry for entry in advice if entry.speedup is not None][:MAX_ADVICE]
    losses = loss_agreements(every)
    return Conclusion(configs, tuple(best), tuple(rankings), tuple(diagnoses), tuple(advice), tuple(losses), tuple(figures))


def _find_best(configs: ConfigurationSet, figure: Figure) -> Best | None:
    comparable = configs.all_comparable(figure)
    if not comparable or (len(comparable) == 1 and (len(configs.all) == 1 or figure.better > 0)):
        return None
    missed = [
        config.missed_target and configs.comparable(comparable[0], config, figure.group)
        for config in configs.all
        if config is not comparable[0]
    ]
    if len(comparable) == 1 and not all(missed):  # alone it is only the best if it alone reached the target
        return None
    ordered = sorted(comparable, key=lambda config: -figure.better * geometric_mean(config.figures(figure)))
    first, worst = ordered[0], ordered[-1] if len(ordered) > 1 else None
    over_worst = None if worst is None else speedup(first, worst, figure)
    left = sum(bool(config.figures(figure)) and configs.is_ranked(config) for config in configs.all) - len(comparable)
    rivals = (
        [config for config in ordered[1:-1] if not speedup(first, config, figure).sure]
        if over_worst is not None and over_worst.known
        else []
    )
    value = geometric_mean(first.figures(figure))
    return Best(first, figure, value, first.interval(figure), worst, over_worst, len(comparable), left, tuple(rivals))


def _diagnoses(configs: ConfigurationSet, best: Sequence[Best]) -> list[ConfigurationDiagnosis]:
    place = configs.quality.best if configs.quality.best is not None else 0 if len(configs.all) == 1 else None
    single = () if place is None or not configs.quality.is_ranked(place) else (configs.all[place],)
    explained = (best[0].configuration, best[0].worst) if best else single
    return [
        ConfigurationDiagnosis(config, diagnose(config.median_run))
        for config in explained
        if config is not None and config.median_run.calibration is not None
    ]


MAX_SUPERLINEAR = 3
MAX_STARTS = 3
MIN_START = 0.1  # from this fraction of the time to target on, start-up may change the ranking


def render_caveats(conclusion: Conclusion) -> Iterator[str]:
    """Yield the caveats, a sentence each."""
    configurations = conclusion.configurations
    summaries = [run.summary for config in configurations.all for run in config.runs]
    if any((summary.get("nodes_sharing_cores") or 1) > 1 for summary in summaries):
        yield "Nodes share cores: results do not predict separate machines."
    yield from _target_times(conclusion)
    for more, fewer, times in configurations.superlinear_pairs[:MAX_SUPERLINEAR]:
        ideal = int(more.values["nodes"]) / int(fewer.values["nodes"])
        yield (
            f"{more.label} is {times_text(times.ratio)} as fast as {fewer.label}, above the ideal {ideal:.3g} ×: a measurement is wrong or "
            "another advantage helped, so this pair does not count for the effect of nodes; measure both again."
        )
    yield from _contention(configurations)
    if any(summary.get("synthetic") for summary in summaries):
        yield "The data is synthetic, so quality has no meaning."


def _target_times(conclusion: Conclusion) -> Iterator[str]:
    best = next((entry for entry in conclusion.best if entry.figure is TARGET), None)
    if best is None:
        return
    configs = [best.configuration, *best.rivals, *([] if best.worst is None else [best.worst])]
    seconds_by_config = [(config, [number(run.summary.get("init_seconds")) for run in config.runs]) for config in configs]
    starts = [(config, fmean(known)) for config, seconds in seconds_by_config if (known := [s for s in seconds if s is not None])]
    if any(seconds >= MIN_START * geometric_mean(config.figures(TARGET)) for config, seconds in starts):
        named = ", ".join(f"{duration_text(seconds)} with {config.label}" for config, seconds in starts[:MAX_STARTS])
        yield f"Time to target excludes start-up: {named}."
    measured = [config for config in conclusion.configurations.all if config.figures(TARGET)]
    if gaps := coarse_gaps(measured):
        apart = duration_text(gaps[0]) if gaps[0] == gaps[-1] else f"{duration_text(gaps[0])} to {duration_text(gaps[-1])}"
        every = {str(run.job.get("eval_every")) for config in measured for run in config.runs}
        now = f" (--eval-every {every.pop()})" if len(every) == 1 else ""
        yield f"Time to target has the resolution of evaluations{now}, {apart} here; evaluate more often for a finer one."


def _contention(configurations: ConfigurationSet) -> Iterator[str]:
    every, contended_runs = configurations.all, configurations.contended_runs
    for run in contended_runs[:MAX_NAMED]:
        starvation = cpu_starvation(run.summary)
        assert starvation is not None
        taken = f"other programs took {percent(starvation.fraction)} of the CPU time that {run.name} needed"
        yield f"CPU contention: {taken}; its speed and times are not used."
    if (more := len(contended_runs) - MAX_NAMED) > 0:
        yield f"CPU contention: the speed and times of {count_with_noun(more, 'more run')} are not used either."
    ranked = [config for config in every if configurations.is_ranked(config)]
    slowed = [config for config in ranked if len(ranked) > 1 and config.contended]
    if slowed:
        named = some_of([f"{config.label} up to {times_text(config.contention_factor)} as fast" for config in slowed])
        widened = any(config.interval(SPEED_FIGURE) for config in slowed)
        what = "* Widened for CPU contention" if widened else "CPU contention may have reduced throughput"
        yield f"{what}; without it: {named}."
    unjudged = [run.name for config in every for run in config.runs if not contention_judged(run.summary)]
    if unjudged:
        yield f"CPU contention was not measured (run under 2 s, or no samples): {some_of(unjudged)}."
    if any(run.summary["mode"] == "async" for run in contended_runs):
        yield "CPU contention changes the staleness of async updates, and so the quality of async runs."
