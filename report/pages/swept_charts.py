"""Charts of figures over a numeric setting, such as the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...metrics import MetricInfo
from ...records.text import number_text
from ..analysis.set_ups import SetUp, SetUps, called
from ..compare.factors import Factor
from ..runs.cpu_starvation import timed_runs
from ..runs.run import Run, number
from ..runs.series import UNEVEN_NOTE, differ
from ..runs.series_arrays import Floats
from ..runs.summary_rows import reach, searched
from .figure import NEUTRAL, Band, Curve, Panel, Picture, Stroke, Unit, band, curve, stroke
from .lines import Line, Lines, counts_something, values_of
from .training_charts import metrics_of_all

LEAST_VALUES = 3  # a table suffices for two values
_LOGARITHMIC_FROM = 8.0  # ratio of the largest to the smallest value


@dataclass(frozen=True, slots=True)
class _Measure:
    title: str
    unit: Unit
    values: Callable[[Run], list[float]]
    y_title: str
    from_zero: bool = True
    timed: bool = True  # not of contended runs


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    stroke: Stroke
    line: int
    set_ups: tuple[SetUp, ...]


def over_settings(lines: Lines) -> list[Picture]:
    """Return a picture for each axis of at least three numbers (two for nodes)."""
    found = lines.set_ups
    if found is None:
        return []
    return [
        _picture(lines, found, axis)
        for axis in found.axes
        if counts_something(values := values_of(found, axis)) and len(values) >= (2 if axis.key == "nodes" else LEAST_VALUES)
    ]


def _picture(lines: Lines, found: SetUps, axis: Factor) -> Picture:
    values = values_of(found, axis)
    rows = _rows(lines, found, axis)
    logarithmic = values[0] > 0 and values[-1] >= _LOGARITHMIC_FROM * values[0]
    measures = _measures(metrics_of_all(lines), lines.runs)
    runs = [run for row in rows for one in row.set_ups for run in one.runs]
    uneven = {measure.title for measure in measures if any(differ(measure.values(run)) for run in runs)}
    panels = [_panel(axis, measure, rows, logarithmic, uneven=measure.title in uneven) for measure in measures]
    words = "; ".join(_said(axis, row) for row in rows)
    note = lines.note
    if uneven:
        named = ", ".join(measure.title for measure in measures if measure.title in uneven)
        note = f"{note} {named}: {UNEVEN_NOTE}, so that there is a line for the lowest and one for the highest node.".strip()
    if axis.key == "nodes":
        panels += _scaling(axis, rows)
        note = f"{note} Speed-up and efficiency are against the fewest nodes of a line, which count as ideal; dotted: the ideal.".strip()
    title = f"Over {axis.label}"
    return Picture(f"over-{axis.key}", title, note, words, tuple(panel for panel in panels if panel.curves))


def _rows(lines: Lines, found: SetUps, axis: Factor) -> list[_Row]:
    others = found.others(axis)
    by_id = {id(line.set_up): line for line in lines.all if line.set_up is not None}
    rows = []
    for place, group in enumerate(found.strata(axis)):
        members = tuple(sorted(group, key=lambda one: axis.order(one.values[axis.key])))
        line = by_id[id(members[0])]
        rows.append(_Row(called(others, members[0].values) or "all runs", _stroke(lines, axis, line, place), line.number, members))
    return (
        rows
        if len({row.stroke for row in rows}) == len(rows)
        else [_Row(row.label, stroke(place), row.line, row.set_ups) for place, row in enumerate(rows)]
    )


def _stroke(lines: Lines, axis: Factor, line: Line, place: int) -> Stroke:
    if lines.coloured is None:
        return stroke(place)
    return Stroke(
        -1 if lines.coloured == axis.key else line.stroke.colour,
        0 if lines.dashed == axis.key else line.stroke.dash,
    )


def _measures(metrics: Sequence[MetricInfo], runs: Sequence[Run]) -> list[_Measure]:
    learnt = [
        _Measure(
            f"Test {info.label}{of} at the {'last evaluation' if of else 'end'}",
            "",
            _of_run("eval", info.name),
            f"test {info.label}",
            from_zero=False,
            timed=False,
        )
        for info in metrics[:1]
        for of in [searched(info, runs)]
    ]
    return [
        _Measure("Examples per second", "", _throughput, "examples per second"),
        _Measure("Time to the target", "s", _time_to_target, "seconds"),
        *learnt,
        _Measure("CPU", "", _of_nodes("cpu_cores_used", "mean"), "cores used by a node"),
        _Measure("Sent", "B/s", _of_nodes("network_sent_bytes_per_train_second"), "by a node, per second of training"),
        _Measure("Memory", "B", _of_nodes("memory_rss_bytes", "max"), "RSS of a node, at most", timed=False),
    ]


def _of_run(*path: str) -> Callable[[Run], list[float]]:
    return lambda run: [] if (value := number(reach(run.summary, path))) is None else [value]


_throughput = _of_run("examples_per_second")


def _time_to_target(run: Run) -> list[float]:
    return _of_run("time_to_target_seconds")(run) if run.summary.get("target_reached") else []


def _of_nodes(*path: str) -> Callable[[Run], list[float]]:
    def values(run: Run) -> list[float]:
        found = [number(reach(node, path)) for node in run.summary["per_node"]]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else []

    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _points(
    axis: Factor,
    row: _Row,
    values: Callable[[Run], list[float]],
    of: Callable[[Sequence[float]], float] = _mean,
    *,
    timed: bool = True,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return x, mean, lowest and highest [configurations]; `timed` excludes contended runs."""
    table = []
    for one in row.set_ups:
        found = [values(run) for run in (timed_runs(one.runs) if timed else one.runs)]
        known = [value for each in found if each and math.isfinite(value := of(each))]
        nothing = not known or len(known) < len(found)
        mean = math.nan if nothing else sum(known) / len(known)
        table.append((float(one.values[axis.key]), mean, math.nan if nothing else min(known), math.nan if nothing else max(known)))
    x, mean, low, high = np.array(table, np.float64).T
    return x, mean, low, high


def _panel(axis: Factor, measure: _Measure, rows: Sequence[_Row], logarithmic: bool, *, uneven: bool) -> Panel:
    curves: list[Curve] = []
    bands: list[Band] = []
    ways: tuple[Callable[[Sequence[float]], float], ...] = (min, max) if uneven else (_mean,)
    for row in rows:
        own = [_points(axis, row, measure.values, of, timed=measure.timed) for of in ways]
        x, (_, _, low, _), (_, _, _, high) = own[0][0], own[0], own[-1]
        curves += [curve(row.label, row.stroke, x, mean, row.line, "points") for _, mean, _, _ in own if np.isfinite(mean).any()]
        pale = band(row.stroke, x, low, high, row.line)
        bands += [] if pale is None else [pale]
    ticks = {float(one.values[axis.key]) for row in rows for one in row.set_ups}
    return Panel(
        f"{measure.title}, lowest and highest node" if uneven else measure.title,
        axis.label,
        measure.y_title,
        tuple(curves),
        measure.unit,
        from_zero=measure.from_zero,
        bands=tuple(bands),
        logarithmic=logarithmic,
        ticks=tuple(sorted(ticks)),
    )


def _scaling(axis: Factor, rows: Sequence[_Row]) -> list[Panel]:
    speedups: list[Curve] = []
    efficiencies: list[Curve] = []
    nodes: set[float] = set()
    for row in rows:
        x, mean, _, _ = _points(axis, row, _throughput)
        if len(x) < 2 or not np.isfinite(mean[0]) or not mean[0] > 0:
            continue
        nodes |= set(x.tolist())
        speedup = x[0] * mean / mean[0]
        speedups.append(curve(row.label, row.stroke, x, speedup, row.line, "points"))
        efficiencies.append(curve(row.label, row.stroke, x, 100.0 * speedup / x, row.line, "points"))
    if not speedups:
        return []
    ticks = tuple(sorted(nodes))
    ends = np.array(ticks, np.float64)
    speedups.append(Curve("ideal", NEUTRAL, ends, ends, -1))
    efficiencies.append(Curve("ideal", NEUTRAL, ends, np.full(len(ends), 100.0), -1))
    return [
        Panel("Speed-up", axis.label, "as many ideal nodes", tuple(speedups), from_zero=True, ticks=ticks),
        Panel("Efficiency", axis.label, "of the ideal", tuple(efficiencies), "%", from_zero=True, ticks=ticks),
    ]


def _said(axis: Factor, row: _Row) -> str:
    x, mean, _, _ = _points(axis, row, _throughput)
    known = [f"{number_text(value, 6)}: {number_text(speed)}" for value, speed in zip(x.tolist(), mean.tolist(), strict=True)]
    return f"{row.label}, examples per second by {axis.label}: {', '.join(known)}"
