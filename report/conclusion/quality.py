"""What configurations have learnt: which is best, which are significantly worse, and which have diverged.

A value is that of the headline metric in a run's last evaluation on the test split. Values of sync runs of one seed are one value, as such
runs train alike. Two means differ significantly by Welch's test at 95 %; of single values that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...metrics import LOSS, MetricInfo
from ...metrics.base import SHARES_OF_EXAMPLES
from ...records.text.numbers import figure_text
from ..catalog.divergence import diverged
from ..catalog.run import Run
from ..catalog.summary_rows import number
from ..comparison.factors import LOSS as LOSSES
from ..comparison.factors import METRICS, RULES, TRANSLATIONS
from ..comparison.ratios import interval_of_arithmetic_mean, mean_difference

__all__ = ["Quality", "judge_quality"]

_SIGMAS = 1.96
"""Quantile of the normal distribution that bounds the middle 95 %."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What there is to say of the quality of some configurations, which it knows by their places.

    `values` are of the metric `info`, a value a seed in sync mode and a run otherwise; empty where a run was not evaluated. `diverged` says
    why of each configuration with a run that has. `learnt`: whether any run has learnt something. `alike`: whether the values of those that
    have not diverged compare. `leads`: whether quality comes before throughput, since they train differently and have no target. Then
    `best` is the best of those that have not diverged, `worse` are significantly worse than it, and of the `unknown` that is not known.
    """

    info: MetricInfo | None = None
    values: tuple[tuple[float, ...], ...] = ()
    diverged: Mapping[int, str] = field(default_factory=dict)
    learnt: bool = True
    alike: bool = False
    leads: bool = False
    best: int | None = None
    worse: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()

    def ranks(self, place: int) -> bool:
        """Return whether a configuration is ranked by its speed: it has not diverged, and is not significantly worse than the best."""
        return place not in self.diverged and not (self.leads and place in self.worse)

    def mean(self, place: int) -> float | None:
        """Return the mean of a configuration's values, None where it has none."""
        values = self.values[place] if self.values else ()
        return math.fsum(values) / len(values) if values else None

    def interval(self, place: int) -> tuple[float, float] | None:
        """Return the interval of 95 % of a configuration's mean by Student's t, None for one value alone."""
        return interval_of_arithmetic_mean(self.values[place])

    def text(self, place: int) -> str:
        """Return a configuration's mean in words: ``0.9500 (n = 3)``."""
        mean = self.mean(place)
        assert mean is not None
        assert self.info is not None
        return f"{figure_text(self.info.name, mean)} (n = {len(self.values[place])})"

    def to_json(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return it as a JSON object; `labels` are what the configurations are called."""
        values = [
            {
                "set_up": label,
                "values": list(self.values[place]) if self.values else [],
                "mean": self.mean(place),
                "diverged": self.diverged.get(place),
                "significantly_worse": None if self.best is None or place in self.unknown else place in self.worse,
            }
            for place, label in enumerate(labels)
        ]
        return {
            "metric": None if self.info is None else self.info.name,
            "leads": self.leads,
            "learnt": self.learnt,
            "best": None if self.best is None else labels[self.best],
            "set_ups": values,
        }


def judge_quality(groups: Sequence[Sequence[Run]], keys: Sequence[Hashable], comparable: Callable[[int, int, str], bool]) -> Quality:
    """Return what there is to say of the quality of some configurations, each given by its runs.

    `keys` are equal for configurations that differ in nothing that was chosen, such as the runs of one that diverged and its others.
    `comparable` says of two, by their places, whether figures of a kind compare.
    """
    runs = [run for group in groups for run in group]
    broken = {place: f"the loss is not finite {since}" for place, group in enumerate(groups) if (since := _not_finite(group))}
    info = _headline(runs)
    if info is None or any(run.summary.get("synthetic") for run in runs):
        return Quality(diverged=_with_the_same_key(broken, keys))
    kind = LOSSES if info == LOSS else TRANSLATIONS if any(info.name in run.translation_metrics for run in runs) else METRICS
    among = [place for place in range(len(groups)) if place not in broken]
    finals = [[_final(run, info) for run in group] for group in groups]
    values = tuple(_values(group, found) for group, found in zip(groups, finals, strict=True))
    idle = {place: [_not_learnt(run, info) for run in groups[place]] for place in among}
    trained = [place for place in among if values[place]]
    learnt = not trained or any(why is None for place in trained for why in idle[place])
    whys: dict[int, list[str]] = {}
    for place in trained:
        others = [other for other in trained if other == place or _alike_data(groups[place][0], groups[other][0])]
        others = [other for other in others if other == place or comparable(place, other, kind)]
        for run, why in zip(groups[place], idle[place], strict=True):
            if why is not None and any(_better(info, groups, values, other, place, run) for other in others):
                whys.setdefault(place, []).append(why)
    found = {**broken, **{place: _of_how_many(own, len(groups[place])) for place, own in whys.items()}}
    found = _with_the_same_key(found, keys)
    rest = [place for place in trained if place not in found]
    alike = all(comparable(rest[0], place, kind) and _alike_data(groups[rest[0]][0], groups[place][0]) for place in rest[1:])
    target = any(run.summary.get("target") is not None for run in runs)
    leads = learnt and not target and len(trained) > 1 and bool(rest) and alike and _train_differently([group[0] for group in groups])
    if not leads:
        return Quality(info, values, found, learnt, alike)
    means = {place: math.fsum(values[place]) / len(values[place]) for place in rest}
    best = (max if info.better == "higher" else min)(rest, key=means.__getitem__)
    significance = {place: _significant(values[best], values[place]) for place in rest if place != best}
    worse = frozenset(place for place, significant in significance.items() if significant)
    unknown = frozenset(place for place, significant in significance.items() if significant is None)
    return Quality(info, values, found, learnt, alike, leads, best, worse, unknown)


def _of_how_many(whys: Sequence[str], runs: int) -> str:
    """Return why some of a configuration's runs have diverged, and how many of them."""
    return whys[0] if runs == 1 else f"{len(whys)} of {runs} runs: {whys[0]}"


def _headline(runs: Sequence[Run]) -> MetricInfo | None:
    """Return the metric that all runs have in the first place, None where that is not one."""
    found = {run.metrics[0] for run in runs if run.metrics}
    return found.pop() if len(found) == 1 and all(run.metrics for run in runs) else None


def _final(run: Run, info: MetricInfo) -> float | None:
    value = number((run.summary.get("eval") or {}).get(info.name))
    return value if value is not None and math.isfinite(value) else None


def _values(group: Sequence[Run], finals: Sequence[float | None]) -> tuple[float, ...]:
    known = [value for value in finals if value is not None]
    if len(known) < len(group):
        return ()
    if group[0].summary["mode"] != "sync":
        return tuple(known)
    by_seed: dict[Any, list[float]] = {}
    for run, value in zip(group, known, strict=True):
        by_seed.setdefault(run.summary["seed"], []).append(value)
    return tuple(math.fsum(own) / len(own) for own in by_seed.values())


def _not_finite(group: Sequence[Run]) -> str | None:
    """Return since when the loss of some run was not finite to its end, or at its last evaluation."""
    for run in group:
        loss = number((run.summary.get("eval") or {}).get("loss"))
        if (since := diverged(run.summary)) is not None:
            return since
        if loss is not None and not math.isfinite(loss):
            return "at the last evaluation"
    return None


def _not_learnt(run: Run, info: MetricInfo) -> str | None:
    """Return why a run seems to have learnt nothing; None where it has, or was not evaluated."""
    last = _final(run, info)
    if last is None:
        return None
    shown = f"test {info.label} {figure_text(info.name, last)} at the end"
    chance = _chance(run) if info.name in SHARES_OF_EXAMPLES else None
    if chance is not None and last <= chance + _SIGMAS * math.sqrt(chance * (1 - chance) / _examples(run)):
        return f"{shown}, no better than guessing the commonest class"
    tests = [record.figure(info.name) for record in run.tests]
    if len(tests) > 1 and not info.improves(last, tests[0]):
        return f"{shown}, no better than {figure_text(info.name, tests[0])} at the first evaluation"
    return None


def _chance(run: Run) -> float | None:
    """Return the accuracy of who always guesses the commonest class of the test split; of earlier releases at least 1 / classes."""
    dataset = run.job.get("dataset") or {}
    fraction, classes = number(dataset.get("commonest_class_fraction")), dataset.get("classes")
    return fraction if fraction is not None else 1.0 / classes if classes else None


def _examples(run: Run) -> int:
    return max(1, int((run.summary.get("eval") or {}).get("examples") or 1))


def _better(info: MetricInfo, groups: Sequence[Sequence[Run]], values: Sequence[Sequence[float]], other: int, place: int, run: Run) -> bool:
    """Return whether a run of another configuration, or a repeat, is significantly better than a run.

    Accuracies are shares of the test examples, so that single ones can be tested (two proportions); of other metrics repeats are needed.
    """
    mine = _final(run, info)
    assert mine is not None
    if info.name not in SHARES_OF_EXAMPLES:
        theirs = math.fsum(values[other]) / len(values[other])
        return other != place and info.improves(theirs, mine) and bool(_significant(values[other], values[place]))
    for each in groups[other]:
        theirs, count = _final(each, info) or 0.0, min(_examples(run), _examples(each))
        together = min(max((mine + theirs) / 2, 0.0), 1.0)
        if theirs - mine > _SIGMAS * math.sqrt(2 * together * (1 - together) / count):
            return True
    return False


def _significant(ours: Sequence[float], theirs: Sequence[float]) -> bool | None:
    difference, half = mean_difference(ours, theirs)
    return None if half is None else abs(difference) > half


def _alike_data(one: Run, other: Run) -> bool:
    return all(rule.value(one) == rule.value(other) for rule in RULES if rule.key in ("data", "digest"))


def _train_differently(firsts: Sequence[Run]) -> bool:
    """Return whether runs differ in anything that changes what is learnt; in async mode so does the number of workers."""
    asynchronous = any(run.summary["mode"] == "async" for run in firsts)
    rules = [rule for rule in RULES if rule.key != "seed" and (rule.changes_learning or (asynchronous and rule.key == "workers"))]
    return any(len({value for run in firsts if (value := rule.value(run)) is not None}) > 1 for rule in rules)


def _with_the_same_key(found: Mapping[int, str], keys: Sequence[Hashable]) -> dict[int, str]:
    """Return the configurations that have diverged with those that are the same but for that: repeats of one that did not."""
    spoilt = {keys[place]: why for place, why in found.items()}
    return {place: found.get(place, spoilt[key]) for place, key in enumerate(keys) if key in spoilt}
