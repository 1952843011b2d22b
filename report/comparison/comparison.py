"""A comparison of runs: its rows, and which figures can be compared; what ``trainer compare`` prints in any form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...records.store.jsonl import finite_json
from ..catalog.copies import measurements
from ..catalog.run import Run, finished_run, labelled
from ..catalog.summary_rows import row
from .comparability import Comparability, compare_settings
from .factors import CHOSEN, RULES, SPEED, Factor
from .names import setting_text
from .rows import Row, make_entries, tells_apart
from .scaling import ScalingSeries, families, relative_speed, relative_target, scaling

__all__ = ["Comparison", "compare_paths", "compare_runs", "setting_name", "setting_rule"]

_RULES: Mapping[str, Factor] = {rule.key: rule for rule in RULES}

_MEANT = {
    "checkpoint_every": "checkpoints",
    "epochs": "budget",
    "examples": "budget",
    "network_source": "network",
    "parameter_servers": "ps",
    "procs_per_node": "workers",
    "steps": "budget",
    "target": "until",
}
"""Other names of settings."""

_CONTEXT = ("backend", "mode", "nodes", "workers", "ps", "global_batch_size", "batch_size")
_GROW_WITH_NODES = frozenset({"workers", "global_batch_size", "batch_size"})
_FOLLOW_NODES = frozenset({"threads", "sharing", "network", "bandwidth", "link", "distributed", "exchange"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """What there is to say about some runs.

    `marks` are the kinds of figures (`factors.GROUPS`) of each entry that cannot be compared with the first one's.
    `settings` has for each entry what it is called by: its run's name, or with ``--by`` the settings that tell it apart, label → value.
    `copies` are the names of runs that are copies of one, in groups: they are one measurement.
    `scaling` is there where it is grouped by nodes; `fits_neither` are the entries (by index) that are in no series then.
    """

    runs: tuple[Run, ...]
    entries: tuple[Row, ...]
    comparability: Comparability
    marks: tuple[frozenset[str], ...]
    settings: tuple[Mapping[str, str], ...]
    copies: tuple[tuple[str, ...], ...] = ()
    scaling: tuple[ScalingSeries, ...] | None = None
    fits_neither: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return everything as one JSON document: ``runs`` has a flat row a run, ``rows`` a flat row of means for each row of the table."""
        rows = zip(self.entries, self.settings, relative_speed(self.entries), relative_target(self.entries), strict=True)
        document: dict[str, Any] = {
            "runs": [{**row(run.summary), "run": run.name} for run in self.runs],
            "rows": [
                {
                    "label": entry.label,
                    "settings": dict(settings),
                    "runs": [run.name for run in entry.runs],
                    "seeds": list(entry.seeds),
                    "left_out": list(entry.left_out),
                    "reached_target": entry.converged,
                    "relative_examples_per_second": speed,
                    "relative_time_to_target": target,
                    "figures": dict(entry.figures),
                    "sigma": dict(entry.sigmas),
                    "counts": dict(entry.counts),
                }
                for entry, settings, speed, target in rows
            ],
            "comparability": self.comparability.to_json(),
            "copies": [list(names) for names in self.copies],
        }
        if self.scaling is not None:
            document["scaling"] = [series.to_json() for series in self.scaling]
            document["in_no_scaling_series"] = list(self.fits_neither)
        found: dict[str, Any] = finite_json(document)
        return found


def compare_paths(
    paths: Sequence[Path | str], *, fold: bool = True, by: Sequence[str | Factor] = (), by_confounds: bool = False
) -> Comparison:
    """Compare the runs in some directories; raises what `finished_run` and `compare_runs` raise."""
    return compare_runs([finished_run(path) for path in paths], fold=fold, by=by, by_confounds=by_confounds)


def compare_runs(runs: Sequence[Run], *, fold: bool = True, by: Sequence[str | Factor] = (), by_confounds: bool = False) -> Comparison:
    """Compare runs, at least one.

    With `fold`, runs of one job are one row, whatever their seeds. `by` names settings, or has rules that read their values in another way:
    there is a row for each of their values then, in order, and repeats are folded. That they differ is what is compared then, and makes no
    figures incomparable, save `by_confounds`. Raises UsageError for a setting that there is not.
    """
    runs = labelled(runs)
    rules = [setting_rule(one) if isinstance(one, str) else one for one in by]
    entries = _called_by_difference(make_entries(runs, fold=fold, by=rules))
    settings: list[dict[str, str]] = [{"run": entry.label} for entry in entries]
    if rules:
        entries, settings = _grouped(entries, rules)
    independent = set() if by_confounds else {rule.key for rule in rules}
    comparability = _comparability(entries, independent)
    series, neither = scaling(entries, _series_key) if "nodes" in {rule.key for rule in rules} else (None, [])
    return Comparison(
        tuple(runs),
        tuple(entries),
        comparability,
        tuple(comparability.marks(index) for index in range(len(entries))),
        tuple(settings),
        tuple(tuple(run.name for run in copies) for copies in measurements(runs) if len(copies) > 1),
        None if series is None else tuple(series),
        tuple(neither),
    )


def _comparability(entries: Sequence[Row], independent: Collection[str]) -> Comparability:
    firsts, repeats = [entry.runs[0] for entry in entries], [entry.runs for entry in entries]
    found = compare_settings(firsts, seeds=[entry.seeds for entry in entries], independent=independent, repeats=repeats)
    found.names = [entry.label for entry in entries]
    return found


def _called_by_difference(entries: list[Row]) -> list[Row]:
    """Call repeats by the chosen settings in which the rows differ, as a conclusion does.

    Where there is none, or two rows would be called alike, all keep their names.
    """
    rules: list[Factor] = []
    for rule in CHOSEN if any(len(entry.runs) > 1 for entry in entries) else ():
        if rule.key != "seed" and tells_apart(entries, rules, rule):
            rules.append(rule)
    if not rules:
        return entries
    named = [
        entry.relabelled(f"{', '.join(setting_text(rule.label, _shown(rule, entry)) for rule in rules)} ×{len(entry.runs)}")
        if len(entry.runs) > 1
        else entry
        for entry in entries
    ]
    return named if len({entry.label for entry in named}) == len(named) else entries


def setting_name(text: str) -> str:
    """Return the key of the rule for the setting that `text` names; its own name where there is none."""
    name = text.strip().lower().replace("-", "_")
    return _MEANT.get(name, name)


def setting_rule(text: str) -> Factor:
    """Return the rule for the setting that `text` names. Raises UsageError for a setting that there is not."""
    key = setting_name(text)
    if key not in _RULES:
        raise UsageError.of("--by", text, f"a setting, such as {', '.join(_CONTEXT)}, lr or precision", [*_RULES, *_MEANT])
    return _RULES[key]


def _grouped(entries: Sequence[Row], by: Sequence[Factor]) -> tuple[list[Row], list[dict[str, str]]]:
    """Return the entries by the values of some settings, named by them, and by what else tells them apart."""
    columns = [*by]
    for rule in RULES:
        if rule in columns or rule.key == "seed":
            continue
        if tells_apart(entries, columns, rule):
            columns.append(rule)
    order = _in_order(entries, by, columns[len(by) :])
    settings = [{rule.label: _shown(rule, entry) for rule in columns} for entry in order]
    if any(len(entry.runs) > 1 for entry in order):
        settings = [{**one, "runs": str(len(entry.runs))} for one, entry in zip(settings, order, strict=True)]
    order_of_rules = {rule.key: place for place, rule in enumerate(RULES)}  # in which a conclusion names them
    called = [rule.label for rule in sorted(columns, key=lambda rule: order_of_rules.get(rule.key, len(RULES)))]
    labels = [", ".join(setting_text(label, one[label]) for label in called) for one in settings]
    unique = len(set(labels)) == len(labels)
    named = [entry.relabelled(label if unique else f"{label} ({entry.label})") for entry, label in zip(order, labels, strict=True)]
    if not unique:
        settings = [{**one, "run": entry.label} for one, entry in zip(settings, order, strict=True)]
    return named, settings


def _in_order(entries: Sequence[Row], by: Sequence[Factor], others: Sequence[Factor]) -> list[Row]:
    """Return the entries by what else tells them apart, then by the settings asked for; rows of one series of nodes stand together."""
    grows = [rule for rule in others if rule.key in _GROW_WITH_NODES] if any(rule.key == "nodes" for rule in by) else []
    apart = [rule for rule in others if rule not in grows]
    series = families(entries, _series_key) if grows else [()] * len(entries)
    keys = [
        (_places(entry, apart), family, _places(entry, by), _places(entry, grows)) for entry, family in zip(entries, series, strict=True)
    ]
    return [entries[index] for index in sorted(range(len(entries)), key=keys.__getitem__)]


def _places(entry: Row, rules: Sequence[Factor]) -> list[tuple[Any, ...]]:
    """Return what puts rows in the order of some settings; one that was not recorded or does not apply comes first."""
    values = [(rule, rule.value(entry.runs[0])) for rule in rules]
    return [() if value is None else (rule.order(value),) for rule, value in values]


def _shown(rule: Factor, entry: Row) -> str:
    value = rule.value(entry.runs[0])
    return "-" if value is None else rule.show(value)


def _series_key(entry: Row) -> tuple[Any, ...]:
    """Return what rows have in common that differ by their number of nodes and their batch: what else there is that sets the speed."""
    run = entry.runs[0]
    rules = [rule for rule in RULES if SPEED in rule.confounds and rule.key not in _FOLLOW_NODES]
    asked = (run.summary["backend"], run.summary["mode"], run.summary["parameter_servers"], run.job.get("bandwidth"))
    return (*asked, run.summary["workers"] / run.summary["nodes"], *(rule.value(run) for rule in rules))
