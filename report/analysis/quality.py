"""Quality of configurations: ranking, significance, divergence, and agreement of losses.

A value is the headline metric of the last test evaluation, averaged over sync runs of one seed, which train equally. Means are compared
by Welch's test at 95 %; for single values the significance is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.setting import LOSS as LOSSES
from ...core.setting import METRICS, TRANSLATIONS
from ...metrics import LOSS, MetricInfo
from ...metrics.base import SHARES_OF_EXAMPLES
from ...records.text import figure_text
from ..compare.caveats import changed_on_resume
from ..compare.factors import RULES
from ..compare.ratios import CONFIDENCE, interval_of_arithmetic_mean, mean_difference
from ..runs.run import Run, diverged, number

_SIGMAS = 1.96  # quantile of the normal distribution that bounds the middle 95 %
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Group items by their keys, both in the order of `pairs`."""
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of configurations, by their index."""

    info: MetricInfo | None = None
    values: tuple[tuple[float, ...], ...] = ()  # of `info`, per seed in sync mode, else per run; empty if not evaluated
    diverged: Mapping[int, str] = field(default_factory=dict)  # reason by index
    learnt: bool = True  # whether any run has learnt
    idle: frozenset[int] = frozenset()  # have not learnt
    judged: frozenset[int] = frozenset()  # have comparable values
    leads: bool = False  # quality ranks before throughput: `judged` ones train differently and reached no target
    best: int | None = None  # only if quality `leads`, as the next two
    worse: frozenset[int] = frozenset()  # significantly
    unknown: frozenset[int] = frozenset()  # of unknown significance
    undecided: bool = False  # configurations train differently without a known difference in quality: none is recommended
    kind: str = METRICS  # of the metric (`core.setting.GROUPS`)

    def is_ranked(self, place: int) -> bool:
        """Return whether a configuration is ranked by speed: not diverged, and in quality not worse."""
        return place not in self.diverged and (not self.leads or (place in self.judged and place not in self.worse))

    def mean(self, place: int) -> float | None:
        """Return the mean of a configuration's values, if any."""
        return fmean(self.values[place]) if self.values and self.values[place] else None

    def interval(self, place: int) -> tuple[float, float] | None:
        """Return the 95 % interval of a configuration's mean (Student's t), None for a single value."""
        return interval_of_arithmetic_mean(self.values[place])

    def text(self, place: int, interval: str = "") -> str:
        """Return a configuration's mean as text: ``0.9500 (n = 3)``; `interval` comes before the n."""
        assert self.info is not None
        return f"{figure_text(self.info.name, fmean(self.values[place]))} ({interval}n = {len(self.values[place])})"

    def to_json(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return a JSON object; `labels` name the configurations."""
        values = [
            {
                "set_up": label,
                "values": list(self.values[place]) if self.values else [],
                "mean": self.mean(place),
                "diverged": self.diverged.get(place),
                "significantly_worse": place in self.worse if self.leads and place in self.judged - self.unknown else None,
            }
            for place, label in enumerate(labels)
        ]
        return {
            "metric": None if self.info is None else self.info.name,
            "leads": self.leads,
            "learnt": self.learnt,
            "undecided": self.undecided,
            "best": None if self.best is None else labels[self.best],
            "set_ups": values,
        }


def assess_quality(
    groups: Sequence[Sequence[Run]], keys: Sequence[Hashable], comparable: Callable[[str, Sequence[int]], Sequence[int]]
) -> Quality:
    """Return the quality of configurations, each given by its runs."""
    # `keys` are equal for equal settings; `comparable` returns the largest comparable set in a kind of figures among some configurations.
    places = range(len(groups))
    headlines = [group[0].metrics[0] for group in groups if group[0].metrics]
    info = max(dict.fromkeys(headlines), key=headlines.count, default=None)
    broken = {place: why for place in places if (why := _not_finite(groups[place], info)) is not None}
    if info is None:
        return Quality(diverged=_with_equal_keys(broken, keys))
    learnable = [all(run.metrics[:1] == (info,) and not run.summary.get("synthetic") for run in group) for group in groups]
    known = [place for place in places if learnable[place]]
    values = tuple(_values(groups[place], info) if place in known and place not in broken else () for place in places)
    trained = [place for place in known if values[place]]
    translated = bool(known) and info.name in groups[known[0]][0].translation_metrics
    kind = LOSSES if info == LOSS else TRANSLATIONS if translated else METRICS
    comparable_places = _with_common_measure(groups, comparable(kind, trained), translated=translated)
    idle = {place: [_not_learnt(run, info) for run in groups[place]] for place in trained}
    every = [run for place in trained for run in groups[place]]  # the first evaluation may come late: above guessing is learnt, too
    learnt = not trained or any(why is None for place in trained for why in idle[place]) or any(_above_guessing(run, info) for run in every)
    finals = _Finals(groups, values, info)
    whys = {place: finals.idle_reasons(place, comparable_places, idle[place]) for place in comparable_places}
    behind = {
        place: why[0] if len(groups[place]) == 1 else f"{len(why)} of {len(groups[place])} runs: {why[0]}"
        for place, why in whys.items()
        if why
    }
    diverged_or_idle = _with_equal_keys({**broken, **behind}, keys)
    still = frozenset(place for place in trained if all(idle[place]))
    rest = [place for place in comparable_places if place not in diverged_or_idle]
    remaining = [place for place in places if place not in diverged_or_idle]
    open_ended = bool(trained) and learnt and not any(run.summary.get("target_reached") for group in groups for run in group)
    differs_significantly = _train_differently([groups[place][0] for place in remaining])
    undecided = open_ended and differs_significantly and len(remaining) > 1
    quality = Quality(info, values, diverged_or_idle, learnt, still, frozenset(rest), undecided=undecided, kind=kind)
    if not (open_ended and rest and len(comparable_places) > 1 and (differs_significantly or len(rest) == 1)):
        return quality
    ordered = sorted(rest, key=lambda place: fmean(values[place]), reverse=info.better == "higher")
    worse, unknown = finals.compare_with_best(ordered)
    return replace(quality, leads=True, best=ordered[0], worse=worse, unknown=unknown, undecided=bool(unknown))


@dataclass(frozen=True, slots=True)
class _Finals:
    """The final `values` of `info`, by configuration."""

    groups: Sequence[Sequence[Run]]
    values: Sequence[Sequence[float]]
    info: MetricInfo

    def differs_significantly(self, place_a: int, place_b: int, tests: int = 1) -> bool | None:
        """Return whether two configurations differ significantly; None if unknown."""
        ours, theirs = self.values[place_a], self.values[place_b]
        difference, half = mean_difference(ours, theirs, tests)
        if half is None:
            return None
        if half == 0.0:
            if self.info.name not in SHARES_OF_EXAMPLES:
                return None if difference else False
            examples = min(_examples(self.groups[place][0]) for place in (place_a, place_b))
            sigmas = NormalDist().inv_cdf(1.0 - (1.0 - CONFIDENCE) / tests / 2)
            half = sigmas * _standard_error_of_difference(ours[0], theirs[0], examples)
        return abs(difference) > half

    def compare_with_best(self, ordered: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return which are significantly worse than the best, and of which that is unknown."""
        repeated = next((place for place in ordered if len(self.values[place]) > 1), ordered[0])
        tests = max(1, len(ordered) * (len(ordered) - 1) // 2)
        worse, unknown = set(), set()
        for rank, place in enumerate(ordered[1:], start=1):
            ahead = {ordered[0], *([repeated] if repeated in ordered[:rank] else [])}
            results = [self.differs_significantly(leader, place, tests) for leader in ahead]
            if True in results:
                worse.add(place)
            elif None in results:
                unknown.add(place)
        return frozenset(worse), frozenset(unknown)

    def idle_reasons(self, place: int, among: Sequence[int], idle: Sequence[str | None]) -> list[str]:
        """Return why runs of a configuration have learnt nothing, if others are better."""
        # Shares of the test examples are tested per run (two proportions); a run more than half-way from guessing to the best has learnt.
        # For other metrics no repeat may have learnt, and another configuration or all of its runs must be better.
        suspects = [(run, why) for run, why in zip(self.groups[place], idle, strict=True) if why is not None]
        if suspects and self.info.name in SHARES_OF_EXAMPLES:
            best = max((run for rival in among for run in self.groups[rival]), key=lambda run: _final(run, self.info) or 0.0)
            return [why for run, why in suspects if _behind_best(run, best, self.info)]
        if not suspects or len(suspects) < len(self.groups[place]):
            return []
        mine = self.values[place]
        for rival in among:
            theirs = self.values[rival]
            if rival == place or not self.info.improves(fmean(theirs), fmean(mine)):
                continue
            apart = min(len(mine), len(theirs)) > 1 and all(
                self.info.improves(theirs_value, mine_value) for theirs_value in theirs for mine_value in mine
            )
            if apart or self.differs_significantly(rival, place):
                return [why for _, why in suspects]
        return []


def _with_common_measure(groups: Sequence[Sequence[Run]], places: Sequence[int], *, translated: bool) -> list[int]:
    keys = {"data", "digest", "test_size", *(["translation_signature"] if translated else [])}
    rules = [rule for rule in RULES if rule.key in keys]
    data = {place: tuple(rule.value(groups[place][0]) for rule in rules) for place in places}
    measures = list(data.values())
    most = max(dict.fromkeys(measures), key=measures.count, default=None)
    return [place for place in places if data[place] == most]


def _final(run: Run, info: MetricInfo) -> float | None:
    return number((run.summary.get("eval") or {}).get(info.name))


def _values(group: Sequence[Run], info: MetricInfo) -> tuple[float, ...]:
    known = [value for run in group if (value := _final(run, info)) is not None]
    if len(known) < len(group):
        return ()
    if group[0].summary["mode"] != "sync":
        return tuple(known)
    return tuple(map(fmean, grouped((run.summary["seed"], value) for run, value in zip(group, known, strict=True)).values()))


def _not_finite(group: Sequence[Run], info: MetricInfo | None) -> str | None:
    for run in group:
        if (since := diverged(run.summary)) is not None:
            return f"the loss is not finite {since}"
        for name in ("loss", *([] if info is None else [info.name])):
            value = number((run.summary.get("eval") or {}).get(name))
            if value is not None and not math.isfinite(value):
                return f"the {name} is not finite at the last evaluation"
    return None


def _not_learnt(run: Run, info: MetricInfo) -> str | None:
    last = _final(run, info)
    assert last is not None
    shown = f"test {info.label} {figure_text(info.name, last)} at the end"
    if _above_guessing(run, info) is False:
        return f"{shown}, no better than guessing the most common class"
    tests = sorted(run.tests, key=lambda record: record.step)
    if len(tests) > 1 and not info.improves(last, first := tests[0].figure(info.name)):
        return f"{shown}, no better than {figure_text(info.name, first)} at the first evaluation"
    return None


def _above_guessing(run: Run, info: MetricInfo) -> bool | None:
    """Return whether a share of test examples is above guessing; None for other metrics."""
    chance = _chance(run) if info.name in SHARES_OF_EXAMPLES else None
    if chance is None:
        return None
    return (_final(run, info) or 0.0) > chance + _SIGMAS * math.sqrt(chance * (1 - chance) / _examples(run))


def _chance(run: Run) -> float | None:
    """Return the accuracy of always guessing the most common class; 1 / classes in older runs."""
    dataset = run.job.get("dataset") or {}
    fraction, classes = number(dataset.get("commonest_class_fraction")), dataset.get("classes")
    return fraction if fraction is not None else 1.0 / classes if classes else None


def _examples(run: Run) -> int:
    return max(1, int((run.summary.get("eval") or {}).get("examples") or 1))


def _behind_best(run: Run, best: Run, info: MetricInfo) -> bool:
    larger, smaller = _final(best, info) or 0.0, _final(run, info) or 0.0
    error = _standard_error_of_difference(larger, smaller, min(_examples(best), _examples(run)))
    return larger - smaller > error * _SIGMAS and smaller < ((_chance(run) or 0.0) + larger) / 2


def _standard_error_of_difference(first: float, second: float, examples: int) -> float:
    pooled = min(max((first + second) / 2, 0.0), 1.0)
    return math.sqrt(2 * pooled * (1 - pooled) / examples)


def _train_differently(firsts: Sequence[Run]) -> bool:
    asynchronous = any(run.summary["mode"] == "async" for run in firsts)
    rules = [rule for rule in RULES if rule.key != "seed" and (rule.changes_learning(*firsts) or (asynchronous and rule.key == "workers"))]
    differing = {rule.key for rule in rules if len({value for run in firsts if (value := rule.value(run)) is not None}) > 1}
    if differing == {"batch_size"} and not asynchronous:  # parts of equal global batches, which batch normalisation alone notices
        return any(agreement.parts_at is not None for agreement in loss_agreements(firsts))
    return bool(differing)


def _with_equal_keys(reasons: Mapping[int, str], keys: Sequence[Hashable]) -> dict[int, str]:
    spoilt = {keys[place]: why for place, why in reasons.items()}
    return {place: reasons.get(place, spoilt[key]) for place, key in enumerate(keys) if key in spoilt}


EQUAL_WITHIN = 1e-4  # relative difference of equal losses: the effect of other kernels and orders of summation
MAX_PAIRS = 20
_MAY_DIFFER = frozenset({"budget", "until", "patience", "trainer"})  # settings without effect on the updates that two runs have in common
_DECIDING = [rule for rule in RULES if (LOSSES in rule.confounds or rule.key == "global_batch_size") and rule.key not in _MAY_DIFFER]


@dataclass(frozen=True, slots=True)
class LossAgreement:
    """Agreement of the losses of two runs."""

    run: str
    other: str
    updates: int  # common to both
    identical: bool
    largest: float  # largest relative difference
    parts_at: int | None  # first update, from 1, with a difference above `EQUAL_WITHIN`, if any
    losses: tuple[float, float] | None  # of both at that update


def loss_agreements(runs: Sequence[Run]) -> list[LossAgreement]:
    """Return how sync runs agree with the first one of equal loss settings and seed."""
    comparable = [run for run in runs if run.summary["mode"] == "sync" and not _changed_course(run)]
    groups = grouped((tuple(rule.value(run) for rule in _DECIDING), run) for run in comparable)
    agreements: list[LossAgreement] = []
    for first, *rest in groups.values():
        compared = rest[: MAX_PAIRS - len(agreements)]
        losses = first.step_series().loss if compared else np.zeros(0, np.float32)
        agreements += filter(None, [_agreement(first.name, losses, run) for run in compared])
    return agreements


def _changed_course(run: Run) -> bool:
    """Return whether a resume changed loss settings: the job has only the last ones."""
    batch = {"global_batch_size", "accumulate"}
    if run.job.get("global_batch_size") is None:
        batch |= {"batch_size", "nodes", "procs_per_node"}
    return not batch.union(["mode"], (rule.key for rule in _DECIDING)).isdisjoint(changed_on_resume(run))


def _agreement(name: str, mine: NDArray[np.float32], run: Run) -> LossAgreement | None:
    theirs = run.step_series().loss
    updates = min(len(mine), len(theirs))
    if not updates:
        return None
    ours, its = mine[:updates].astype(np.float64), theirs[:updates].astype(np.float64)
    same = (ours == its) | (np.isnan(ours) & np.isnan(its))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(ours - its) / np.maximum(np.abs(ours), np.abs(its))
    relative = np.where(same, 0.0, np.where(np.isfinite(relative), relative, np.inf))
    apart = np.flatnonzero(relative > EQUAL_WITHIN)
    identical, largest = bool(same.all()), float(relative.max())
    if not len(apart):
        return LossAgreement(run.name, name, updates, identical, largest, None, None)
    first = int(apart[0])
    return LossAgreement(run.name, name, updates, identical, largest, first + 1, (float(ours[first]), float(its[first])))
