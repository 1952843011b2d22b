"""What configurations have learnt: which is best, which are significantly worse, and which have diverged.

A value is that of the headline metric in a run's last evaluation on the test split. Values of sync runs of one seed are one value, as such
runs train alike. Two means differ significantly by Welch's test at 95 %; of single values the significance is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from ...metrics import LOSS, MetricInfo
from ...metrics.base import SHARES_OF_EXAMPLES
from ...records.text.numbers import figure_text
from ..catalog.divergence import diverged
from ..catalog.run import Run
from ..catalog.summary_rows import number
from ..comparison.factors import LOSS as LOSSES
from ..comparison.factors import METRICS, RULES, TRANSLATIONS
from ..comparison.ratios import CONFIDENCE, interval_of_arithmetic_mean, mean_difference

__all__ = ["Quality", "judge_quality"]

_SIGMAS = 1.96
"""Quantile of the normal distribution that bounds the middle 95 %."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What there is to say of the quality of some configurations, which it knows by their places.

    `values` are of the metric `info`, a value a seed in sync mode and a run otherwise; empty where a run was not evaluated. `diverged` says
    why of each configuration with a run that has. `learnt`: whether any run has learnt something; `idle` are configurations that have not.
    `judged` are those whose values compare with each other. `leads`: whether quality comes before throughput, since the judged ones train
    differently and reached no target. Then `best` is the best of them, `worse` are significantly worse than another one, and of the
    `unknown` that is not known. `undecided`: whether what trains differently cannot be told apart in quality, so that none is recommended.
    `kind` is that of the metric (`factors.GROUPS`).
    """

    info: MetricInfo | None = None
    values: tuple[tuple[float, ...], ...] = ()
    diverged: Mapping[int, str] = field(default_factory=dict)
    learnt: bool = True
    idle: frozenset[int] = frozenset()
    judged: frozenset[int] = frozenset()
    leads: bool = False
    best: int | None = None
    worse: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()
    undecided: bool = False
    kind: str = METRICS

    def ranks(self, place: int) -> bool:
        """Return whether a configuration is ranked by speed: it has not diverged, and where quality leads it is judged and not worse."""
        return place not in self.diverged and (not self.leads or (place in self.judged and place not in self.worse))

    def mean(self, place: int) -> float | None:
        """Return the mean of a configuration's values, None where it has none."""
        values = self.values[place] if self.values else ()
        return math.fsum(values) / len(values) if values else None

    def interval(self, place: int) -> tuple[float, float] | None:
        """Return the interval of 95 % of a configuration's mean by Student's t, None for one value alone."""
        return interval_of_arithmetic_mean(self.values[place])

    def text(self, place: int, interval: str = "") -> str:
        """Return a configuration's mean in words: ``0.9500 (n = 3)``; `interval` stands before the n."""
        mean = self.mean(place)
        assert mean is not None
        assert self.info is not None
        return f"{figure_text(self.info.name, mean)} ({interval}n = {len(self.values[place])})"

    def to_json(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return it as a JSON object; `labels` are what the configurations are called."""
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


Comparable = Callable[[str, Sequence[int]], Sequence[int]]
"""Returns, of a kind of figures and the places of configurations, the largest set of these that all compare with each other."""


def judge_quality(groups: Sequence[Sequence[Run]], keys: Sequence[Hashable], comparable: Comparable) -> Quality:
    """Return what there is to say of the quality of some configurations, each given by its runs.

    `keys` are equal for configurations that differ in nothing that was chosen, such as the runs of one that diverged and its others.
    """
    places = range(len(groups))
    info = _headline(groups)
    broken = {place: why for place in places if (why := _not_finite(groups[place], info)) is not None}
    if info is None:
        return Quality(diverged=_with_the_same_key(broken, keys))
    known = [place for place in places if _has(groups[place], info)]
    values = tuple(_values(groups[place], info) if place in known and place not in broken else () for place in places)
    trained = [place for place in known if values[place]]
    translated = bool(known) and info.name in groups[known[0]][0].translation_metrics
    kind = LOSSES if info == LOSS else TRANSLATIONS if translated else METRICS
    alike = _of_one_measure(groups, comparable(kind, trained), translated=translated)
    idle = {place: [_not_learnt(run, info) for run in groups[place]] for place in trained}
    learnt = not trained or any(why is None for place in trained for why in idle[place])
    whys = {place: own for place in alike if (own := _behind(groups, values, idle, alike, place, info))}
    found = {**broken, **{place: _of_how_many(own, len(groups[place])) for place, own in whys.items()}}
    found = _with_the_same_key(found, keys)
    still = frozenset(place for place in trained if all(idle[place]))
    rest = [place for place in alike if place not in found]
    others = [place for place in places if place not in found]
    open_ended = bool(trained) and learnt and not any(run.summary.get("target_reached") for group in groups for run in group)
    differ = _train_differently([groups[place][0] for place in others])
    if not (open_ended and rest and len(alike) > 1 and (differ or len(rest) == 1)):
        return Quality(info, values, found, learnt, still, frozenset(rest), undecided=open_ended and differ and len(others) > 1, kind=kind)
    ordered = sorted(rest, key=lambda place: math.fsum(values[place]) / len(values[place]), reverse=info.better == "higher")
    worse, unknown = _significance(groups, values, ordered, info)
    return Quality(info, values, found, learnt, still, frozenset(rest), True, ordered[0], worse, unknown, bool(unknown), kind)


def _significance(
    groups: Sequence[Sequence[Run]], values: Sequence[Sequence[float]], ordered: Sequence[int], info: MetricInfo
) -> tuple[frozenset[int], frozenset[int]]:
    """Return which of some configurations, best first, are significantly worse than another, and of which that is not known.

    Each is held against the best, and against the best that has repeats. As many pairs could have been the best and another, so many tests
    share the error of 5 % (Bonferroni).
    """
    repeated = next((place for place in ordered if len(values[place]) > 1), ordered[0])
    tests = max(1, len(ordered) * (len(ordered) - 1) // 2)
    worse, unknown = set(), set()
    for rank, place in enumerate(ordered[1:], start=1):
        ahead = {ordered[0], *([repeated] if repeated in ordered[:rank] else [])}
        results = [_significant(groups, values, other, place, info, tests) for other in ahead]
        if True in results:
            worse.add(place)
        elif None in results:
            unknown.add(place)
    return frozenset(worse), frozenset(unknown)


def _headline(groups: Sequence[Sequence[Run]]) -> MetricInfo | None:
    """Return the metric that most configurations have in the first place, of equally many the first; None where none has one."""
    found = [group[0].metrics[0] for group in groups if group[0].metrics]
    return max(dict.fromkeys(found), key=found.count, default=None)


def _has(group: Sequence[Run], info: MetricInfo) -> bool:
    """Return whether a configuration is judged by a metric at all: random data has nothing to learn."""
    return all(run.metrics and run.metrics[0] == info and not run.summary.get("synthetic") for run in group)


def _of_one_measure(groups: Sequence[Sequence[Run]], places: Sequence[int], *, translated: bool) -> list[int]:
    """Return those of some configurations whose metric is measured on the data of most of them, and as theirs is.

    Where what is compared differs in that itself, nothing else says that their figures are others.
    """
    keys = {"data", "digest", "test_size", *(["translation_signature"] if translated else [])}
    rules = [rule for rule in RULES if rule.key in keys]
    data = {place: tuple(rule.value(groups[place][0]) for rule in rules) for place in places}
    found = list(data.values())
    most = max(dict.fromkeys(found), key=found.count, default=None)
    return [place for place in places if data[place] == most]


def _final(run: Run, info: MetricInfo) -> float | None:
    return number((run.summary.get("eval") or {}).get(info.name))


def _values(group: Sequence[Run], info: MetricInfo) -> tuple[float, ...]:
    known = [value for run in group if (value := _final(run, info)) is not None]
    if len(known) < len(group):
        return ()
    if group[0].summary["mode"] != "sync":
        return tuple(known)
    by_seed: dict[Any, list[float]] = {}
    for run, value in zip(group, known, strict=True):
        by_seed.setdefault(run.summary["seed"], []).append(value)
    return tuple(math.fsum(own) / len(own) for own in by_seed.values())


def _not_finite(group: Sequence[Run], info: MetricInfo | None) -> str | None:
    """Return why some run has no finite loss, or no finite value of the metric, at its end; None where all have."""
    for run in group:
        if (since := diverged(run.summary)) is not None:
            return f"the loss is not finite {since}"
        for name in ("loss", *([] if info is None else [info.name])):
            value = number((run.summary.get("eval") or {}).get(name))
            if value is not None and not math.isfinite(value):
                return f"the {name} is not finite at the last evaluation"
    return None


def _not_learnt(run: Run, info: MetricInfo) -> str | None:
    """Return why a run seems to have learnt nothing; None where it has."""
    last = _final(run, info)
    assert last is not None
    shown = f"test {info.label} {figure_text(info.name, last)} at the end"
    chance = _chance(run) if info.name in SHARES_OF_EXAMPLES else None
    if chance is not None and last <= chance + _SIGMAS * math.sqrt(chance * (1 - chance) / _examples(run)):
        return f"{shown}, no better than guessing the most common class"
    tests = sorted(run.tests, key=lambda record: record.step)
    if len(tests) > 1 and not info.improves(last, first := tests[0].figure(info.name)):
        return f"{shown}, no better than {figure_text(info.name, first)} at the first evaluation"
    return None


def _chance(run: Run) -> float | None:
    """Return the accuracy of who always guesses the commonest class of the test split; of earlier releases at least 1 / classes."""
    dataset = run.job.get("dataset") or {}
    fraction, classes = number(dataset.get("commonest_class_fraction")), dataset.get("classes")
    return fraction if fraction is not None else 1.0 / classes if classes else None


def _examples(run: Run) -> int:
    return max(1, int((run.summary.get("eval") or {}).get("examples") or 1))


def _behind(
    groups: Sequence[Sequence[Run]],
    values: Sequence[Sequence[float]],
    idle: Mapping[int, Sequence[str | None]],
    alike: Sequence[int],
    place: int,
    info: MetricInfo,
) -> list[str]:
    """Return why runs of a configuration have learnt nothing, of those that another run is significantly better than.

    Shares of the test examples can be tested one by one (two proportions); a run that has come more than half of the way from guessing to
    the best has learnt, though it may have got worse since. Of other metrics repeats are needed: none of this configuration's has learnt,
    and another one is significantly better, or each of its runs is better than all of this one's.
    """
    suspects = [(run, why) for run, why in zip(groups[place], idle[place], strict=True) if why is not None]
    if not suspects:
        return []
    if info.name in SHARES_OF_EXAMPLES:
        best = max((run for other in alike for run in groups[other]), key=lambda run: _final(run, info) or 0.0)
        return [why for run, why in suspects if _better_share(best, run, info) and _less_than_half_learnt(run, best, info)]
    if len(suspects) < len(groups[place]):
        return []
    for other in alike:
        mine, theirs = values[place], values[other]
        if other == place or not info.improves(math.fsum(theirs) / len(theirs), math.fsum(mine) / len(mine)):
            continue
        apart = min(len(mine), len(theirs)) > 1 and all(info.improves(one, each) for one in theirs for each in mine)
        if apart or _significant(groups, values, other, place, info, 1):
            return [why for _, why in suspects]
    return []


def _less_than_half_learnt(run: Run, best: Run, info: MetricInfo) -> bool:
    chance = _chance(run) or 0.0
    return (_final(run, info) or 0.0) < (chance + (_final(best, info) or 0.0)) / 2


def _better_share(one: Run, other: Run, info: MetricInfo) -> bool:
    """Return whether a share of the test examples is significantly larger in one run than in another."""
    larger, smaller = _final(one, info) or 0.0, _final(other, info) or 0.0
    return larger - smaller > _standard_error(larger, smaller, min(_examples(one), _examples(other))) * _SIGMAS


def _standard_error(one: float, other: float, examples: int) -> float:
    """Return that of the difference of two shares of so many examples each."""
    together = min(max((one + other) / 2, 0.0), 1.0)
    return math.sqrt(2 * together * (1 - together) / examples)


def _significant(
    groups: Sequence[Sequence[Run]], values: Sequence[Sequence[float]], one: int, other: int, info: MetricInfo, tests: int
) -> bool | None:
    """Return whether two means differ significantly, None where that is not known.

    Repeats without any scatter say nothing of it; of shares of the test examples that of two proportions is known.
    """
    ours, theirs = values[one], values[other]
    difference, half = mean_difference(ours, theirs, tests)
    if half is None:
        return None
    if half == 0.0:
        if info.name not in SHARES_OF_EXAMPLES:
            return None if difference else False
        examples = min(_examples(groups[one][0]), _examples(groups[other][0]))
        half = NormalDist().inv_cdf(1.0 - (1.0 - CONFIDENCE) / tests / 2) * _standard_error(ours[0], theirs[0], examples)
    return abs(difference) > half


def _train_differently(firsts: Sequence[Run]) -> bool:
    """Return whether runs differ in anything that changes what is learnt; in async mode so does the number of workers."""
    asynchronous = any(run.summary["mode"] == "async" for run in firsts)
    rules = [rule for rule in RULES if rule.key != "seed" and (rule.changes_learning(*firsts) or (asynchronous and rule.key == "workers"))]
    return any(len({value for run in firsts if (value := rule.value(run)) is not None}) > 1 for rule in rules)


def _with_the_same_key(found: Mapping[int, str], keys: Sequence[Hashable]) -> dict[int, str]:
    """Return the configurations that have diverged with those that are the same but for that: repeats of one that did not."""
    spoilt = {keys[place]: why for place, why in found.items()}
    return {place: found.get(place, spoilt[key]) for place, key in enumerate(keys) if key in spoilt}


def _of_how_many(whys: Sequence[str], runs: int) -> str:
    """Return why some of a configuration's runs have diverged, and how many of them."""
    return whys[0] if runs == 1 else f"{len(whys)} of {runs} runs: {whys[0]}"
