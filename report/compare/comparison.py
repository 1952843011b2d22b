"""A comparison of runs: rows and comparable figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import UsageError
from ...core.setting import SPEED
from ...records.store.jsonl import finite_json
from ..runs.columns import COLUMNS, row
from ..runs.cpu_starvation import timed_runs
from ..runs.run import Run, labelled, measurements, number
from .caveats import changed_on_resume
from .cells import relative_to_first
from .comparability import Comparability, compare_settings
from .factors import CHOSEN, RULES, Factor, setting_text
from .ratios import Ratio, ratio
from .rows import Row, is_distinguishing, make_entries

Kind = Literal["strong", "weak"]

_BATCH: dict[Kind, str] = {"strong": "global_batch_size", "weak": "batch_size"}


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A row of the comparison, by its index, on `nodes` nodes.

    `speedup` is relative to the first point of the series, `efficiency` that over the ratio of the nodes; None if a speed is unknown, the
    efficiency also if either run changed its nodes. `too_fast`: the efficiency is significantly above 1, which more nodes do not explain.
    """

    entry: int
    nodes: int
    speedup: float | None
    efficiency: float | None
    too_fast: bool = False


@dataclass(frozen=True, slots=True)
class ScalingSeries:
    """Rows with a fixed global (``strong``) or worker (``weak``) batch, by their nodes."""

    kind: Kind
    batch: int
    points: tuple[ScalingPoint, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; ``row`` counts the rows of the comparison from 0."""
        points = [
            {
                "row": point.entry,
                "nodes": point.nodes,
                "speedup": point.speedup,
                "parallel_efficiency": point.efficiency,
                "beyond_ideal": point.too_fast,
            }
            for point in self.points
        ]
        return {"scaling": self.kind, _BATCH[self.kind]: self.batch, "points": points}


def scaling(entries: Sequence[Row], series: Callable[[Row], Any]) -> tuple[list[ScalingSeries], list[int]]:
    """Return the series of some rows, and the indices of the rows in none.

    A series has at least two numbers of nodes. `series` returns a key of all that may not differ in a series but the batch. A row may be in
    a series of each kind.
    """
    all_series: list[ScalingSeries] = []
    for kind, batch in _BATCH.items():
        groups: dict[Any, list[int]] = {}
        for index, entry in enumerate(entries):
            groups.setdefault((series(entry), entry.figures[batch]), []).append(index)
        for key, members in groups.items():
            if len({entries[index].figures["nodes"] for index in members}) > 1:
                members.sort(key=lambda index: entries[index].figures["nodes"])
                points = tuple(_point(index, entries[index], entries[members[0]]) for index in members)
                all_series.append(ScalingSeries(kind, key[1], points))
    inside = {point.entry for scaling_series in all_series for point in scaling_series.points}
    return all_series, [index for index in range(len(entries)) if index not in inside]


def families(entries: Sequence[Row], series: Callable[[Row], Any]) -> list[tuple[int, int, int]]:
    """Return a sort key for each row: series by batch, then rows in no series.

    A row in two series counts for the kind with more rows, strong scaling if equal.
    """
    all_series, _ = scaling(entries, series)
    kinds = sorted(
        _BATCH, key=lambda kind: -sum(len(scaling_series.points) for scaling_series in all_series if scaling_series.kind == kind)
    )
    places: dict[int, tuple[int, int, int]] = {}
    for place, scaling_series in sorted(enumerate(all_series), key=lambda pair: kinds.index(pair[1].kind)):
        for point in scaling_series.points:
            places.setdefault(point.entry, (kinds.index(scaling_series.kind), scaling_series.batch, place))
    return [places.get(index, (len(kinds), entry.figures["global_batch_size"], 0)) for index, entry in enumerate(entries)]


def _point(index: int, row: Row, first_row: Row) -> ScalingPoint:
    figures, first = row.figures, first_row.figures
    mine, base = figures["examples_per_second"], first["examples_per_second"]
    speedup = mine / base if mine is not None and base else None
    steady = not any("nodes" in changed_on_resume(run) for run in (*row.runs, *first_row.runs))
    efficiency = speedup / (figures["nodes"] / first["nodes"]) if speedup is not None and steady else None
    times = _times(row, first_row) if efficiency is not None and row is not first_row else None
    return ScalingPoint(
        index, figures["nodes"], speedup, efficiency, times is not None and times.is_above(figures["nodes"] / first["nodes"])
    )


def _times(row: Row, base: Row) -> Ratio | None:
    """Return the speed-up of one row over another, None if a run has no speed."""
    sides = [[number(run.summary["examples_per_second"]) for run in timed_runs(compared.runs)] for compared in (row, base)]
    known = [[value for value in side if value is not None and 0 < value < math.inf] for side in sides]
    return ratio([(known[0], known[1])]) if all(known) and [len(side) for side in known] == [len(side) for side in sides] else None


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
}  # other names of settings
_CONTEXT = ("backend", "mode", "nodes", "workers", "ps", "global_batch_size", "batch_size")
_GROW_WITH_NODES = frozenset({"workers", "global_batch_size", "batch_size"})
_FOLLOW_NODES = frozenset({"threads", "sharing", "network", "bandwidth", "link", "distributed", "exchange"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of runs."""

    runs: tuple[Run, ...]
    entries: tuple[Row, ...]
    comparability: Comparability
    marks: tuple[frozenset[str], ...]  # by entry, kinds of figures (`core.setting.GROUPS`) that do not compare with the first entry's
    settings: tuple[Mapping[str, str], ...]  # by entry, its run's name, or with ``--by`` the distinguishing settings, label → value
    copies: tuple[tuple[str, ...], ...] = ()  # names of runs that are copies of one measurement
    scaling: tuple[ScalingSeries, ...] | None = None  # None unless grouped by nodes
    fits_neither: tuple[int, ...] = ()  # indices of entries in no series

    def to_json(self) -> dict[str, Any]:
        """Return a JSON document: ``runs`` has a row per run, ``rows`` a row of means per table row."""
        ratios = {column.relative_key: relative_to_first(self.entries, column) for column in COLUMNS if column.better}
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
                    **{key: values[index] for key, values in ratios.items()},
                    "figures": dict(entry.figures),
                    "sigma": dict(entry.sigmas),
                    "counts": dict(entry.counts),
                }
                for index, (entry, settings) in enumerate(zip(self.entries, self.settings, strict=True))
            ],
            "comparability": self.comparability.to_json(),
            "copies": [list(names) for names in self.copies],
        }
        if self.scaling is not None:
            document["scaling"] = [series.to_json() for series in self.scaling]
            document["in_no_scaling_series"] = list(self.fits_neither)
        json_document: dict[str, Any] = finite_json(document)
        return json_document


def compare_runs(runs: Sequence[Run], *, fold: bool = True, by: Sequence[str | Factor] = (), by_confounds: bool = False) -> Comparison:
    """Compare one or more runs. Raises UsageError for an unknown setting."""
    # With `fold`, runs of one job are one row, whatever their seeds. `by` has settings, or rules: they order the rows and confound no
    # figures unless `by_confounds`.
    runs = labelled(runs)
    rules = [setting_rule(setting) if isinstance(setting, str) else setting for setting in by]
    entries = _labelled_by_difference(make_entries(runs, fold=fold, by=rules))
    settings: list[dict[str, str]] = [{"run": entry.label} for entry in entries]
    if rules:
        entries, settings = _grouped(entries, rules)
    independent = set() if by_confounds else {rule.key for rule in rules}
    comparability = compare_settings(
        [entry.runs[0] for entry in entries],
        names=[entry.label for entry in entries],
        seeds=[entry.seeds for entry in entries],
        independent=independent,
        repeats=[entry.runs for entry in entries],
    )
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


def _labelled_by_difference(entries: list[Row]) -> list[Row]:
    rules: list[Factor] = []
    for rule in CHOSEN if any(len(entry.runs) > 1 for entry in entries) else ():
        if rule.key != "seed" and is_distinguishing(entries, rules, rule):
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
    """Return the key of a setting's rule; the name itself if unknown."""
    name = text.strip().lower().replace("-", "_")
    return _MEANT.get(name, name)


def setting_rule(text: str) -> Factor:
    """Return the rule of a setting. Raises UsageError for an unknown one."""
    key = setting_name(text)
    if key not in _RULES:
        raise UsageError.of("--by", text, f"a setting, such as {', '.join(_CONTEXT)}, lr or precision", [*_RULES, *_MEANT])
    return _RULES[key]


def _grouped(entries: Sequence[Row], by: Sequence[Factor]) -> tuple[list[Row], list[dict[str, str]]]:
    columns = [*by]
    for rule in RULES:
        if rule not in columns and rule.key != "seed" and is_distinguishing(entries, columns, rule):
            columns.append(rule)
    order = _in_order(entries, by, columns[len(by) :])
    settings = [{rule.label: _shown(rule, entry) for rule in columns} for entry in order]
    if any(len(entry.runs) > 1 for entry in order):
        settings = [{**values, "runs": str(len(entry.runs))} for values, entry in zip(settings, order, strict=True)]
    order_of_rules = {rule.key: place for place, rule in enumerate(RULES)}  # as in a conclusion
    called = [rule.label for rule in sorted(columns, key=lambda rule: order_of_rules.get(rule.key, len(RULES)))]
    labels = [", ".join(setting_text(label, values[label]) for label in called) for values in settings]
    unique = len(set(labels)) == len(labels)
    named = [entry.relabelled(label if unique else f"{label} ({entry.label})") for entry, label in zip(order, labels, strict=True)]
    if not unique:
        settings = [{**values, "run": entry.label} for values, entry in zip(settings, order, strict=True)]
    return named, settings


def _in_order(entries: Sequence[Row], by: Sequence[Factor], further: Sequence[Factor]) -> list[Row]:
    grows = [rule for rule in further if rule.key in _GROW_WITH_NODES] if any(rule.key == "nodes" for rule in by) else []
    apart = [rule for rule in further if rule not in grows]
    series = families(entries, _series_key) if grows else [()] * len(entries)
    keys = [
        (_places(entry, apart), family, _places(entry, by), _places(entry, grows)) for entry, family in zip(entries, series, strict=True)
    ]
    return [entries[index] for index in sorted(range(len(entries)), key=keys.__getitem__)]


def _places(entry: Row, rules: Sequence[Factor]) -> list[tuple[Any, ...]]:
    values = [(rule, rule.value(entry.runs[0])) for rule in rules]
    return [() if value is None else (rule.order(value),) for rule, value in values]


def _shown(rule: Factor, entry: Row) -> str:
    value = rule.value(entry.runs[0])
    return "-" if value is None else rule.show(value)


def _series_key(entry: Row) -> tuple[Any, ...]:
    run = entry.runs[0]
    rules = [rule for rule in RULES if SPEED in rule.confounds and rule.key not in _FOLLOW_NODES]
    settings = (run.summary["backend"], run.summary["mode"], run.summary["parameter_servers"], run.job.get("bandwidth"))
    return (*settings, run.summary["workers"] / run.summary["nodes"], *(rule.value(run) for rule in rules))
