"""The charts of the report's page and of `trainer plot`; here those of configurations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...metrics import MetricInfo
from ...records.text import duration_text, number_text, rate_text
from ..analysis.configurations import FIGURES, Configuration, ConfigurationSet, Figure, values_label
from ..compare.factors import Factor
from ..compare.ratios import geometric_mean
from ..runs.columns import reach
from ..runs.cpu_starvation import timed_runs
from ..runs.run import Run, number
from ..runs.series import UNEVEN_NOTE, differ, one_by_one
from ..runs.series_arrays import Floats
from ..runs.translation_scores import searched
from .figure import (
    COLOURS,
    NEUTRAL,
    Band,
    Bars,
    Curve,
    Dots,
    Line,
    Lines,
    Panel,
    Picture,
    Place,
    Stroke,
    Unit,
    are_numbers,
    curve,
    make_lines,
    stroke,
    visible_bands,
)
from .lockstep_charts import diverged
from .resource_charts import resources, time_shares
from .training_charts import all_metrics, draw_line, evaluations, shared_goal, training

MAX_ROWS = 12  # readable on a first screen
TARGET, _ = FIGURES


def decision(lines: Lines) -> Picture | None:
    """Return the picture; None for one configuration, or without any of the figures."""
    configured = [line for line in lines.all if line.configuration is not None]
    if lines.configurations is None or len(configured) < 2:
        return None
    by_figure = ((entry, lines.configurations.all_comparable(entry)) for entry in FIGURES)
    figure, among = next(((entry, members) for entry, members in by_figure if members), (None, []))
    if figure is None:
        return None
    comparable = {id(entry) for entry in among}
    ranked = sorted(configured, key=lambda line: _rank(_configuration(line), figure, id(line.configuration) in comparable))
    rows = ranked[:MAX_ROWS]
    panels: list[Panel | Dots] = [_dots(lines, rows, figure, len(ranked), comparable)]
    if (quality_panel := _quality_panel(lines, ranked)) is not None:
        panels.append(quality_panel)
    widened = any(_configuration(line).contended for line in rows if id(line.configuration) in comparable)
    bar = f" Tick: geometric mean. Bar: its 95 % confidence interval{', widened for CPU contention' * widened}."
    note = f"Dot: a run.{bar * lines.repeated} "
    words = "; ".join(_words_of_line(lines, line, figure, comparable) for line in rows)
    title = "Fastest first, no recommendation" if lines.configurations.quality.undecided and figure is not TARGET else "Best first"
    return Picture("decision", title, (note + lines.note).strip(), words, tuple(panels), place="first")


def _configuration(line: Line) -> Configuration:
    assert line.configuration is not None
    return line.configuration


def _rank(config: Configuration, figure: Figure, comparable: bool) -> tuple[bool, float, float]:
    if comparable:
        return False, 0.0, -figure.better * geometric_mean(config.figures(figure))
    return True, -(config.row.converged or 0) / len(config.runs), 0.0


def _dots(lines: Lines, rows: list[Line], figure: Figure, total: int, comparable: Collection[int]) -> Dots:
    values = [_configuration(line).figures(figure) if id(line.configuration) in comparable else () for line in rows]
    title = f"Time to {_configuration(rows[0]).row.figures['target']}" if figure is TARGET else "Examples per second"
    if total > len(rows):
        title += f", the best {len(rows)} of {total} configurations"
    return Dots(
        title,
        "seconds, less is better" if figure is TARGET else "examples per second, more is better",
        tuple(line.named(len(line_values) or len(line.runs)) for line, line_values in zip(rows, values, strict=True)),
        tuple(values),
        tuple(geometric_mean(line_values) if line_values else None for line_values in values),
        tuple(_configuration(line).interval(figure) if line_values else None for line, line_values in zip(rows, values, strict=True)),
        tuple(line.stroke for line in rows),
        tuple(line.number for line in rows),
        tuple("" if line_values else _missing(lines, _configuration(line), figure) for line, line_values in zip(rows, values, strict=True)),
    )


def _missing(lines: Lines, config: Configuration, figure: Figure) -> str:
    assert lines.configurations is not None
    quality, place = lines.configurations.quality, config.index
    if place in quality.diverged:
        return f"diverged: {quality.diverged[place]}"
    if not quality.is_ranked(place) and place not in quality.judged:
        why = [fault.label for fault in lines.configurations.why_not_judged(config)]
        return f"not ranked: other {' and '.join(why)}" if why else "not ranked: quality not comparable"
    if not quality.is_ranked(place) and quality.info is not None:
        return f"test {quality.info.label} significantly worse: {quality.text(place)}"
    if not timed_runs(config.runs):
        return "CPU contention from other programs"
    if config.figures(figure):
        return "not comparable with those above"
    if figure is TARGET and config.row.converged is not None:
        return f"{config.row.converged} of {len(config.runs)} reached {config.row.figures['target']}"
    return "no target" if figure is TARGET else "speed not known"


def _quality_panel(lines: Lines, ranked: list[Line]) -> Panel | None:
    metrics = all_metrics(lines)
    if not metrics:
        return None
    info = next((metric for metric in metrics if shared_goal(lines, metric.name) is not None), metrics[0])
    some = len(lines.parts) > 1 or len(ranked) > MAX_ROWS
    curves, bands = [], []
    for place, line in enumerate(ranked[: len(COLOURS)] if some else ranked):
        known = evaluations(line.timed, info)
        if known:
            drawn_as = replace(line, stroke=stroke(place)) if some else line
            line_curves, pale = draw_line(drawn_as, [(seconds, values) for _, seconds, values in known], "points", one_by_one)
            curves += line_curves
            bands += pale
    if not curves:
        return None
    search = searched(info, lines.runs)
    title = f"Test {info.label}{search} over time" + (f", the best {len(curves)} configurations" if some else "")
    return Panel(title, "wall-clock time (s)", f"test {info.label}", tuple(curves), level=shared_goal(lines, info.name), bands=tuple(bands))


def _words_of_line(lines: Lines, line: Line, figure: Figure, comparable: Collection[int]) -> str:
    values = _configuration(line).figures(figure)
    if not values or id(line.configuration) not in comparable:
        return f"{line.label}: {_missing(lines, _configuration(line), figure)}"
    show = duration_text if figure is TARGET else rate_text
    scatter = _configuration(line).interval(figure)
    within = "" if scatter is None else f" (95 % CI {' to '.join(map(show, scatter))})"
    return (
        f"{line.label}: {show(geometric_mean(values))}{within} in {number_text(len(values), 0)} runs"
        if len(values) > 1
        else (f"{line.label}: {show(values[0])}")
    )


MIN_VALUES = 3  # a table suffices for two values
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
    configurations: tuple[Configuration, ...]


def over_settings(lines: Lines) -> list[Picture]:
    """Return a picture for each axis of at least three numbers (two for nodes)."""
    configs = lines.configurations
    if configs is None:
        return []
    return [
        _picture(lines, configs, axis)
        for axis in configs.axes
        if are_numbers(values := configs.sorted_values(axis)) and len(values) >= (2 if axis.key == "nodes" else MIN_VALUES)
    ]


def _picture(lines: Lines, configs: ConfigurationSet, axis: Factor) -> Picture:
    values = configs.sorted_values(axis)
    rows = _rows(lines, configs, axis)
    logarithmic = values[0] > 0 and values[-1] >= _LOGARITHMIC_FROM * values[0]
    measures = _measures(all_metrics(lines), lines.runs)
    runs = [run for row in rows for config in row.configurations for run in config.runs]
    uneven = {measure.title for measure in measures if any(differ(measure.values(run)) for run in runs)}
    panels = [_panel(axis, measure, rows, logarithmic, uneven=measure.title in uneven) for measure in measures]
    words = "; ".join(_words_of_row(axis, row) for row in rows)
    note = lines.note
    if uneven:
        named = ", ".join(measure.title for measure in measures if measure.title in uneven)
        note = f"{note} {named}: {UNEVEN_NOTE}, so that there is a line for the lowest and one for the highest node.".strip()
    if axis.key == "nodes":
        panels += _scaling(axis, rows)
        note = f"{note} Speed-up and efficiency are against the fewest nodes of a line, which count as ideal; dotted: the ideal.".strip()
    title = f"Over {axis.label}"
    return Picture(f"over-{axis.key}", title, note, words, tuple(panel for panel in panels if panel.curves))


def _rows(lines: Lines, configs: ConfigurationSet, axis: Factor) -> list[_Row]:
    other_axes = configs.other_axes(axis)
    by_id = {id(line.configuration): line for line in lines.all if line.configuration is not None}
    groups = [tuple(sorted(group, key=lambda config: axis.order(config.values[axis.key]))) for group in configs.strata(axis)]
    first = [by_id[id(members[0])] for members in groups]
    coloured, dashed = lines.coloured == axis.key, lines.dashed == axis.key
    strokes = [Stroke(-1 if coloured else line.stroke.colour, 0 if dashed else line.stroke.dash) for line in first]
    if lines.coloured is None or len(set(strokes)) < len(strokes):
        strokes = [stroke(place) for place in range(len(groups))]
    return [
        _Row(values_label(other_axes, members[0].values) or "all runs", row_stroke, line.number, members)
        for members, row_stroke, line in zip(groups, strokes, first, strict=True)
    ]


def _measures(metrics: Sequence[MetricInfo], runs: Sequence[Run]) -> list[_Measure]:
    learnt = []
    for info in metrics[:1]:
        of = searched(info, runs)
        title = f"Test {info.label}{of} at the {'last evaluation' if of else 'end'}"
        learnt.append(_Measure(title, "", _summary_value("eval", info.name), f"test {info.label}", from_zero=False, timed=False))
    return [
        _SPEED,
        _Measure("Time to the target", "s", _time_to_target, "seconds"),
        *learnt,
        _Measure("CPU", "", _node_values("cpu_cores_used", "mean"), "cores used by a node"),
        _Measure("Sent", "B/s", _node_values("network_sent_bytes_per_train_second"), "by a node, per second of training"),
        _Measure("Memory", "B", _node_values("memory_rss_bytes", "max"), "RSS of a node, at most", timed=False),
    ]


def _summary_value(*path: str) -> Callable[[Run], list[float]]:
    return lambda run: [] if (value := number(reach(run.summary, path))) is None else [value]


_SPEED = _Measure("Examples per second", "", _summary_value("examples_per_second"), "examples per second")


def _time_to_target(run: Run) -> list[float]:
    return _summary_value("time_to_target_seconds")(run) if run.summary.get("target_reached") else []


def _node_values(*path: str) -> Callable[[Run], list[float]]:
    def values(run: Run) -> list[float]:
        figures = [number(reach(node, path)) for node in run.summary["per_node"]]
        known = [value for value in figures if value is not None]
        return known if len(known) == len(figures) else []

    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _points(axis: Factor, row: _Row, measure: _Measure, statistic: Callable[[Sequence[float]], float] = _mean) -> tuple[Floats, ...]:
    """Return x, mean, lowest and highest [configurations]."""
    table = []
    for config in row.configurations:
        run_values = [measure.values(run) for run in (timed_runs(config.runs) if measure.timed else config.runs)]
        known = [value for figures in run_values if figures and math.isfinite(value := statistic(figures))]
        nothing = not known or len(known) < len(run_values)
        mean = math.nan if nothing else sum(known) / len(known)
        table.append((float(config.values[axis.key]), mean, math.nan if nothing else min(known), math.nan if nothing else max(known)))
    return tuple(np.array(table, np.float64).T)


def _panel(axis: Factor, measure: _Measure, rows: Sequence[_Row], logarithmic: bool, *, uneven: bool) -> Panel:
    curves: list[Curve] = []
    bands: list[Band] = []
    ways: tuple[Callable[[Sequence[float]], float], ...] = (min, max) if uneven else (_mean,)
    for row in rows:
        ranges = [_points(axis, row, measure, statistic) for statistic in ways]
        x, (_, _, low, _), (_, _, _, high) = ranges[0][0], ranges[0], ranges[-1]
        curves += [curve(row.label, row.stroke, x, mean, row.line, "points") for _, mean, _, _ in ranges if np.isfinite(mean).any()]
        bands += visible_bands(row.stroke, x, low, high, row.line)
    ticks = {float(config.values[axis.key]) for row in rows for config in row.configurations}
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
        x, mean, _, _ = _points(axis, row, _SPEED)
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


def _words_of_row(axis: Factor, row: _Row) -> str:
    x, mean, _, _ = _points(axis, row, _SPEED)
    known = [f"{number_text(value, 6)}: {number_text(speed)}" for value, speed in zip(x.tolist(), mean.tolist(), strict=True)]
    return f"{row.label}, examples per second by {axis.label}: {', '.join(known)}"


_MAIN = ("loss", "speed")  # not behind a click if there are several lines; of small multiples only the first


def pictures(runs: Sequence[Run], lines: Lines | None = None) -> list[Picture]:
    """Return the non-empty pictures of labelled runs. Raises DamagedRunError."""
    lines = lines or make_lines(runs)
    drawn = [*filter(None, [decision(lines)]), *over_settings(lines)]
    for picture in (*training(lines), time_shares(lines)):
        shown = _MAIN if len(lines.parts) == 1 else _MAIN[:1]
        place: Place = "more" if len(lines.all) > 1 and picture.name not in shown else "plots"
        drawn.append(replace(picture, place=place))
    drawn += diverged(runs)
    drawn += resources(runs, [run.node_series() for run in runs])
    return [picture for picture in drawn if any(isinstance(panel, Bars | Dots) or panel.curves for panel in picture.panels)]
