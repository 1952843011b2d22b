"""Which figures of several runs can be compared, and why the others cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...metrics import LOSS, MetricInfo
from ..catalog.run import Run
from .caveats import CAVEATS
from .factors import AT_THE_END, GROUPS, METRICS, NOTHING, RULES, TRANSLATIONS, Factor

__all__ = ["Comparability", "Difference", "alike", "compare_settings", "setting_key"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting in which runs differ, or what is wrong with some of them.

    `values` has one text a run, None where it was not recorded or does not apply. `confounds` are the kinds of figures (`factors.GROUPS`)
    that it makes not comparable, in their order; `why` is the reason.
    """

    key: str
    label: str
    values: tuple[str | None, ...]
    confounds: tuple[str, ...]
    why: str


class Comparability:
    """What several runs differ in, and which of their figures compare; marks (†) are relative to the first run."""

    def __init__(
        self, runs: Sequence[Run], values: Sequence[Mapping[str, Any]], rules: Sequence[Factor], repeats: Sequence[Sequence[Run]]
    ) -> None:
        """`values` has a mapping a run, from the key of a rule to its value; `repeats` the runs that each run stands for."""
        self.names = [run.name for run in runs]
        self._runs = runs
        self._repeats = repeats
        self._values = values
        self._rules = rules

    @cached_property
    def independent(self) -> list[Difference]:
        """What is compared: differences that are wanted."""
        return [self._difference(rule) for rule in self._rules if rule.independent and self._differs_anywhere(rule)]

    @cached_property
    def faults(self) -> list[Difference]:
        """Other differences, and what is wrong with single runs."""
        judged = [rule for rule in self._rules if rule.matters and not rule.independent]
        found = [self._difference(rule) for rule in judged if self._differs_anywhere(rule)]
        for fault in CAVEATS:
            texts = tuple(map(fault.text, self._repeats))
            if any(texts):
                found.append(Difference(fault.key, fault.label, texts, _ordered(fault.confounds), fault.why))
        return found

    @cached_property
    def beside(self) -> list[Difference]:
        """Differences on which no figure depends; runs that differ in them are still not folded into one row."""
        idle = [rule for rule in self._rules if not rule.matters and not rule.independent]
        return [self._difference(rule) for rule in idle if self._differs_anywhere(rule)]

    @cached_property
    def unrecorded(self) -> dict[str, list[str]]:
        """What should be known of every run, and the runs that it is not known of."""
        lacking = {
            rule.label: [name for name, known in zip(self.names, self._values, strict=True) if known[rule.key] is None]
            for rule in self._rules
            if rule.expected
        }
        return {label: names for label, names in lacking.items() if names}

    def confounded(self, one: int, other: int, ignoring: Collection[str] = ()) -> frozenset[str]:
        """Return the kinds of figures in which two runs cannot be compared, for other reasons than the caveats of these keys."""
        runs = self._runs[one], self._runs[other]
        pair = {group for rule in self._rules if self._differ(rule, one, other) for group in rule.spoils(*runs)}
        faults = [fault for fault in CAVEATS if fault.key not in ignoring]
        own = (fault.confounds for fault in faults for run in (one, other) if fault.text(self._repeats[run]) is not None)
        return frozenset(pair).union(*own)

    def marks(self, run: int) -> frozenset[str]:
        """Return the kinds of figures of a run that do not compare with the first's; of the first, those that its own caveats rule out."""
        return self.confounded(0, run)

    def comparable(self, group: str, among: Collection[int], ignoring: Collection[str] = ()) -> list[int]:
        """Return the largest set of runs, of those `among`, that all compare with each other in a kind of figures.

        A set with the first run and another one comes before a larger one without it. The set is found greedily, class by class.
        """
        classes: dict[tuple[Any, ...], list[int]] = {}
        rules = [rule for rule in self._rules if group in rule.spoils(*self._runs)]
        for run in sorted(among):
            if group not in self.confounded(run, run, ignoring):
                classes.setdefault(tuple(self._values[run][rule.key] for rule in rules), []).append(run)
        circles = [sorted(run for one in circle for run in classes[one]) for circle in self._circles(group, classes, ignoring)]
        return max(circles, key=lambda circle: (0 in circle and len(circle) > 1, len(circle)), default=[])

    def _circles(
        self, group: str, classes: Mapping[tuple[Any, ...], list[int]], ignoring: Collection[str]
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield for each class of like runs a set grown from it: each further class is added that compares with all in the set."""
        for centre in classes:
            circle = [centre]
            for other in classes:
                if other != centre and all(group not in self.confounded(classes[one][0], classes[other][0], ignoring) for one in circle):
                    circle.append(other)
            yield circle

    def _differs_anywhere(self, rule: Factor) -> bool:
        found: dict[Any, set[Any]] = {}
        for known in self._values:
            if known[rule.key] is not None:
                found.setdefault(rule.given and known[rule.given], set()).add(known[rule.key])
        return any(len(values) > 1 for values in found.values())

    def _differ(self, rule: Factor, one: int, other: int) -> bool:
        mine, theirs = self._values[one], self._values[other]
        if mine[rule.key] is None or theirs[rule.key] is None or mine[rule.key] == theirs[rule.key]:
            return False
        return rule.given is None or mine[rule.given] == theirs[rule.given]

    def _difference(self, rule: Factor) -> Difference:
        values = (known[rule.key] for known in self._values)
        shown = tuple(None if value is None else rule.show(value) for value in values)
        return Difference(rule.key, rule.label, shown, _ordered(rule.spoils(*self._runs)), rule.why)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as a JSON object; each difference has a value a run, in the order of ``runs``."""
        return {
            "runs": self.names,
            "compared": [self._json(difference) for difference in self.independent],
            "differences": [self._json(difference) for difference in self.faults],
            "not_recorded": self.unrecorded,
            "not_comparable_with_the_first": [self._keys(self.marks(run)) for run in range(len(self.names))],
        }

    def _json(self, one: Difference) -> dict[str, Any]:
        return {
            "setting": one.key,
            "label": one.label,
            "values": list(one.values),
            "makes_not_comparable": self._keys(one.confounds),
            "reason": one.why,
        }

    def called(self, groups: Collection[str]) -> list[str]:
        """Return what kinds of figures are called, in their order: for each kind of metrics the label of each that the runs have."""
        return [name for group in _ordered(groups) for name in self._metrics(group, "{0.label}", "{0.label} at the end")]

    def _keys(self, groups: Collection[str]) -> list[str]:
        """Return kinds of figures as programs know them: for the metrics the name of each."""
        return [name for group in _ordered(groups) for name in self._metrics(group, "{0.name}", "end_{0.name}")]

    def _metrics(self, group: str, called: str, at_the_end: str) -> list[str]:
        """Return the kind of figures itself, or, of one of metrics, what each that the runs have is `called`, once."""
        infos: Iterator[MetricInfo]
        if group == METRICS:
            infos = (info for run in self._runs for info in run.metrics if info != LOSS and info.name not in run.translation_metrics)
        elif group == TRANSLATIONS:
            infos = (info for run in self._runs for info in run.metrics if info.name in run.translation_metrics)
        elif group == AT_THE_END:
            infos, called = (info for run in self._runs for info in run.metrics_at_the_end), at_the_end
        else:
            return [group]
        return list(dict.fromkeys(called.format(info) for info in infos))


def _ordered(groups: Collection[str]) -> tuple[str, ...]:
    return tuple(group for group in GROUPS if group in groups)


def compare_settings(
    runs: Sequence[Run],
    *,
    seeds: Sequence[tuple[int, ...]] | None = None,
    independent: Collection[str] = (),
    repeats: Sequence[Sequence[Run]] | None = None,
) -> Comparability:
    """Return what runs differ in.

    `repeats` are the runs that each stands for, where it stands for several that differ in nothing else, `seeds` their seeds, where these
    are told. `independent` names further settings
    (keys of `RULES`) whose difference is wanted: it makes nothing incomparable, save where a factor is independent anyway.
    """
    wanted = {rule.key for rule in RULES if rule.key in independent and not rule.independent}
    rules = [replace(rule, independent=True, confounds=NOTHING, also=None) if rule.key in wanted else rule for rule in RULES]
    values = [{rule.key: rule.value(run) for rule in RULES} for run in runs]
    for known, own in zip(values, seeds or (), strict=bool(seeds)):
        known["seed"] = own
    return Comparability(runs, values, rules, repeats or [[run] for run in runs])


def setting_key(run: Run, *, without: Collection[str] = ()) -> tuple[Any, ...]:
    """Return what makes a run alike to another, save the settings `without` (keys of `RULES`): equal keys, equal circumstances."""
    faults = tuple(fault.found(run) for fault in CAVEATS if fault.repeats == "alike")
    return (*(rule.value(run) for rule in RULES if rule.key not in without), *faults)


def alike(runs: Sequence[Run], *, without: Collection[str] = (), by: Sequence[Factor] = ()) -> list[list[Run]]:
    """Return the runs in groups of equal `setting_key` and equal values of the rules in `by`, both in the order of first appearance."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((*setting_key(run, without=without), *(rule.value(run) for rule in by)), []).append(run)
    return list(groups.values())
