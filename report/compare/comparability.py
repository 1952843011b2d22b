"""Comparability of the figures of several runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...core.setting import AT_THE_END, GROUPS, METRICS, TRANSLATIONS
from ...metrics import LOSS, MetricInfo
from ..runs.run import Run
from .caveats import CAVEATS
from .factors import RULES, Factor


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting in which runs differ, or a caveat of some of them."""

    key: str
    label: str
    values: tuple[str | None, ...]  # one per run, None if unrecorded or not applicable
    confounds: tuple[str, ...]  # `core.setting.GROUPS`, in order
    why: str

    @property
    def known(self) -> list[str]:
        """The recorded values, each once."""
        return list(dict.fromkeys(value for value in self.values if value is not None))


@dataclass(eq=False)
class Comparability:
    """Differences between runs, and comparable figures; marks (†) are relative to the first run."""

    names: Sequence[str]
    _runs: Sequence[Run]
    _repeats: Sequence[Sequence[Run]]  # the runs behind each row
    _values: Sequence[Mapping[str, Any]]  # by the keys of the rules, for each run
    _rules: Sequence[Factor]

    @cached_property
    def independent(self) -> list[Difference]:
        """The intended differences."""
        return self._differences(rule for rule in self._rules if rule.independent)

    @cached_property
    def faults(self) -> list[Difference]:
        """Confounding differences, and the caveats of single runs."""
        differences = self._differences(rule for rule in self._rules if rule.matters and not rule.independent)
        for caveat in CAVEATS:
            texts = tuple(map(caveat.of_repeats, self._repeats))
            if any(texts):
                differences.append(Difference(caveat.key, caveat.label, texts, _ordered(caveat.confounds), caveat.why))
        return differences

    @cached_property
    def without_effect(self) -> list[Difference]:
        """Differences that affect no figure, but prevent folding runs into one row."""
        return self._differences(rule for rule in self._rules if not rule.matters and not rule.independent)

    @cached_property
    def unrecorded(self) -> dict[str, list[str]]:
        """Expected values that were not recorded, by label, with the names of the runs."""
        missing = {
            rule.label: [name for name, known in zip(self.names, self._values, strict=True) if known[rule.key] is None]
            for rule in self._rules
            if rule.expected
        }
        return {label: names for label, names in missing.items() if names}

    def confounded(self, first: int, second: int, ignoring: Collection[str] = ()) -> frozenset[str]:
        """Return the incomparable kinds of figures of two runs, without the caveats `ignoring`."""
        runs = self._runs[first], self._runs[second]
        pair = {group for rule in self._rules if self._differ(rule, first, second) for group in rule.confounded_groups(*runs)}
        faults = [fault for fault in CAVEATS if fault.key not in ignoring]
        caveats = (fault.confounds for fault in faults for run in (first, second) if fault.of_repeats(self._repeats[run]) is not None)
        return frozenset(pair).union(*caveats)

    def marks(self, run: int) -> frozenset[str]:
        """Return the kinds of figures that do not compare with the first run's."""
        return self.confounded(0, run)

    def comparable(self, group: str, among: Collection[int], ignoring: Collection[str] = ()) -> list[int]:
        """Return the largest set of comparable runs `among` some; greedily, preferring the first."""
        classes: dict[tuple[Any, ...], list[int]] = {}
        rules = [rule for rule in self._rules if group in rule.confounded_groups(*self._runs)]
        for run in sorted(among):
            if group not in self.confounded(run, run, ignoring):
                classes.setdefault(tuple(self._values[run][rule.key] for rule in rules), []).append(run)
        circles = [sorted(run for settings in circle for run in classes[settings]) for circle in self._circles(group, classes, ignoring)]
        return max(circles, key=lambda circle: (0 in circle and len(circle) > 1, len(circle)), default=[])

    def _circles(
        self, group: str, classes: Mapping[tuple[Any, ...], list[int]], ignoring: Collection[str]
    ) -> Iterator[list[tuple[Any, ...]]]:
        for centre in classes:
            circle = [centre]
            for candidate in classes:
                if candidate != centre and all(
                    group not in self.confounded(classes[member][0], classes[candidate][0], ignoring) for member in circle
                ):
                    circle.append(candidate)
            yield circle

    def _differs_anywhere(self, rule: Factor) -> bool:
        values_by_condition: dict[Any, set[Any]] = {}
        for known in self._values:
            if known[rule.key] is not None:
                values_by_condition.setdefault(rule.given and known[rule.given], set()).add(known[rule.key])
        return any(len(values) > 1 for values in values_by_condition.values())

    def _differ(self, rule: Factor, first: int, second: int) -> bool:
        mine, theirs = self._values[first], self._values[second]
        if mine[rule.key] is None or theirs[rule.key] is None or mine[rule.key] == theirs[rule.key]:
            return False
        return rule.given is None or mine[rule.given] == theirs[rule.given]

    def _differences(self, rules: Iterable[Factor]) -> list[Difference]:
        return [self._difference(rule) for rule in rules if self._differs_anywhere(rule)]

    def _difference(self, rule: Factor) -> Difference:
        values = (known[rule.key] for known in self._values)
        shown = tuple(None if value is None else rule.show(value) for value in values)
        return Difference(rule.key, rule.label, shown, _ordered(rule.confounded_groups(*self._runs)), rule.why)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; each difference has a value per run, in the order of ``runs``."""
        return {
            "runs": self.names,
            "compared": [self._json(difference) for difference in self.independent],
            "differences": [self._json(difference) for difference in self.faults],
            "not_recorded": self.unrecorded,
            "not_comparable_with_the_first": [self._keys(self.marks(run)) for run in range(len(self.names))],
        }

    def _json(self, difference: Difference) -> dict[str, Any]:
        return {
            "setting": difference.key,
            "label": difference.label,
            "values": list(difference.values),
            "makes_not_comparable": self._keys(difference.confounds),
            "reason": difference.why,
        }

    def called(self, groups: Collection[str]) -> list[str]:
        """Return the labels of kinds of figures, with each metric in place of kinds of metrics."""
        return [name for group in _ordered(groups) for name in self._metrics(group, "{0.label}", "{0.label} at the end")]

    def _keys(self, groups: Collection[str]) -> list[str]:
        return [name for group in _ordered(groups) for name in self._metrics(group, "{0.name}", "end_{0.name}")]

    def _metrics(self, group: str, called: str, at_the_end: str) -> list[str]:
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
    names: Sequence[str] | None = None,
    seeds: Sequence[tuple[int, ...]] | None = None,
    independent: Collection[str] = (),
    repeats: Sequence[Sequence[Run]] | None = None,
) -> Comparability:
    """Return the differences between runs."""
    # `repeats` are the runs behind each row, and `seeds` their seeds. Differences in `independent` settings (keys of `RULES`) are intended,
    # and confound only what the factor always does.
    wanted = {rule.key for rule in RULES if rule.key in independent and not rule.independent}
    rules = [replace(rule, independent=True, confounds=rule.always, also=None) if rule.key in wanted else rule for rule in RULES]
    values = [{rule.key: rule.value(run) for rule in RULES} for run in runs]
    for known, row_seeds in zip(values, seeds or (), strict=bool(seeds)):
        known["seed"] = row_seeds
    return Comparability(names or [run.name for run in runs], runs, repeats or [[run] for run in runs], values, rules)


def setting_key(run: Run, *, without: Collection[str] = ()) -> tuple[Any, ...]:
    """Return a key that is equal for runs of equal settings, except those in `without`."""
    return (*(rule.value(run) for rule in RULES if rule.key not in without), *(fault.identity(run) for fault in CAVEATS))


def group_equal_runs(runs: Sequence[Run], *, without: Collection[str] = (), by: Sequence[Factor] = ()) -> list[list[Run]]:
    """Group runs by `setting_key` and the values of the rules `by`, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((*setting_key(run, without=without), *(rule.value(run) for rule in by)), []).append(run)
    return list(groups.values())
