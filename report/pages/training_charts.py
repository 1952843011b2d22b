"""Charts of the loss, the test metrics and the speed, over steps and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...core.units import Target
from ...metrics import LOSS, MetricInfo
from ...records.summary import FINAL_LOSS_UPDATES
from ...records.text import duration_text, figure_text, number_text, rate_text
from ..runs.run import Run
from ..runs.series import (
    WINDOWS,
    XY,
    Spread,
    on_a_grid,
    one_by_one,
    pace,
    pauses,
    running_median,
    smoothed,
    smoothing_weight,
)
from ..runs.series_arrays import Floats, StepSeries
from ..runs.translation_scores import measured_on
from .figure import Band, Curve, Kind, Line, Lines, Panel, Picture, curve, visible_bands

_STEPS, _SECONDS = "updates", "wall-clock time (s)"
_SMOOTHED = "Exponential moving average with a time constant of 1 % of the updates (at least 10)."
_RAW = " Pale: each update."
_MEDIAN_SHARE = 20
_SPEED = (
    f"Training time (without evaluations and checkpoint pauses) is divided into {WINDOWS} intervals; pale: their values. Line: running "
    f"median over 1/{_MEDIAN_SHARE} of the run. The axis is cut 10 % above the 98th percentile of the medians."
)
_RATES = "As recorded with each update."
_ACROSS_MODES = " An update is of the global batch in sync mode, and of one worker's batch in async mode"
_MAX_SHARE_OF_POINTS = 98.0
_MAX_CROSSES = 100
Drawn = tuple[list[Curve], list[Band]]


@dataclass(frozen=True, slots=True)
class _Trained:
    loss: tuple[XY, XY]
    speed: tuple[XY, XY]
    rates: XY
    loss_text: str
    speed_text: str
    timed: bool  # without CPU contention


def training(lines: Lines) -> list[Picture]:
    """Return the pictures of loss, metrics and speed. Raises DamagedRunError."""
    trained = {
        line.number: trained_runs
        for line in lines.all
        if (trained_runs := [trained_run for run in line.runs if (trained_run := _trained(run, line)) is not None])
    }
    if not trained:
        return []
    words = [
        f"{line.label}: {'; '.join(trained_run.loss_text for trained_run in trained[line.number])}"
        for line in lines.all
        if line.number in trained
    ]
    timed = {
        number: uncontended
        for number, trained_runs in trained.items()
        if (uncontended := [trained_run for trained_run in trained_runs if trained_run.timed])
    }
    speeds = [
        f"{line.label}: {'; '.join(trained_run.speed_text for trained_run in timed[line.number])}"
        for line in lines.all
        if line.number in timed
    ]
    drawn = [
        _losses(lines, trained, ". ".join(words)),
        *(
            _evaluation(lines, info, f"metric-{info.name}" if info.name in _OTHER_PICTURES else info.name, "best")
            for info in all_metrics(lines)
        ),
        _evaluation(lines, LOSS, "test-loss", "last"),
        _speed(lines, timed, ". ".join(speeds)),
        *_learning_rates(lines, trained),
    ]
    return [replace(picture, note=f"{picture.note} {lines.note}".strip()) for picture in drawn]


_OTHER_PICTURES = frozenset({"decision", "learning-rate", "loss", "resources", "speed"})


def _trained(run: Run, line: Line) -> _Trained | None:
    series = run.step_series(learning_rates=True)
    if not len(series) or series.learning_rate is None:
        return None
    in_time = series.in_time()
    speed = pace(series, pauses(run.evals, run.events))
    losses = (series.step + 1).astype(np.float64), series.loss.astype(np.float64)
    return _Trained(
        (losses, (series.time_seconds[in_time], losses[1][in_time])),
        ((speed.steps, speed.steps_per_second), (speed.seconds, speed.examples_per_second)),
        (losses[0], series.learning_rate),
        *_described(run, series),
        any(run is timed_run for timed_run in line.timed),
    )


def _described(run: Run, series: StepSeries) -> tuple[str, str]:
    finite = series.loss[np.isfinite(series.loss)]
    bad = len(series) - len(finite)
    span = f"in {len(series):,} updates and {duration_text(float(series.time_seconds.max()))}"
    ends = "was never finite"
    if len(finite):
        known = run.summary["final_train_loss"] if run.has_summary else None
        last = float(finite[-FINAL_LOSS_UPDATES:].mean()) if known is None else known
        ends = f"from {number_text(float(finite[0]))} to {number_text(last)}"
    loss = f"{ends} {span}{f', {bad:,} of them not finite' if bad else ''}"
    if not run.has_summary:
        return loss, "no figures, for the run has not ended well"
    steps, examples = (rate_text(run.summary[name], "") for name in ("steps_per_second", "examples_per_second"))
    return loss, f"{steps} steps and {examples} examples per second"


def draw_line(line: Line, curves: Sequence[XY], kind: Kind, together: Callable[[Sequence[XY]], Spread | None]) -> Drawn:
    """Return a line's curve, or each of its curves if `together` cannot combine them."""
    spread, name = together(curves) if len(curves) > 1 else None, line.named(len(curves))
    if spread is None:
        return [curve(name, line.stroke, x, y, line.number, kind) for x, y in curves], []
    beyond = [curve(name, line.stroke, *rest, line.number, "faint") for rest in spread.beyond]
    mean = curve(name, line.stroke, spread.x, spread.mean, line.number, kind)
    return [*beyond, mean], visible_bands(line.stroke, spread.x, spread.low, spread.high, line.number)


def _panels(
    lines: Lines, title: str, height: str, drawn: tuple[Mapping[int, Drawn], Mapping[int, Drawn]], *, from_zero: bool = False
) -> tuple[Panel, ...]:
    panels = []
    for part in lines.parts:
        members = [line.number for line in lines.all if line.part == part]
        for over, x_title, source, counts in (("steps", _STEPS, drawn[0], True), ("time", _SECONDS, drawn[1], False)):
            if part and counts:
                continue
            curves, bands = _merge_drawn(source[number] for number in members if number in source)
            panels.append(Panel(part or f"{title} over {over}", x_title, height, curves, bands=bands, counts=counts, from_zero=from_zero))
    return tuple(panel for panel in panels if panel.curves)


def _merge_drawn(drawn: Iterable[Drawn]) -> tuple[tuple[Curve, ...], tuple[Band, ...]]:
    drawn = [*drawn]
    curves = sorted((curve for curves, _ in drawn for curve in curves), key=lambda curve: curve.kind != "faint")
    return tuple(curves), tuple(band for _, bands in drawn for band in bands)


def _draw(
    lines: Lines, curves: Callable[[Line, int], Sequence[XY]], draw: Callable[[Line, Sequence[XY]], Drawn]
) -> tuple[dict[int, Drawn], dict[int, Drawn]]:
    """Draw each line with curves, over steps and over time.

    `curves` takes a line and the axis: 0 for steps, 1 for time.
    """
    over_steps, over_time = (
        {line.number: draw(line, line_curves) for line in lines.all if (line_curves := curves(line, axis))} for axis in (0, 1)
    )
    return over_steps, over_time


def _losses(lines: Lines, trained: Mapping[int, Sequence[_Trained]], words: str) -> Picture:
    is_single = len(lines.all) == 1 and not lines.repeated

    def curves(line: Line, axis: int) -> list[XY]:
        return [trained_run.loss[axis] for trained_run in trained.get(line.number, ()) if axis == 0 or trained_run.timed]

    panels = _panels(lines, "Training loss", "mean loss of a batch", _draw(lines, curves, partial(_loss_curves, raw=is_single)))
    note = _SMOOTHED + (_RAW if is_single else "") + (f"{_ACROSS_MODES}: across modes, compare over seconds." if _both_modes(lines) else "")
    if any(drawn_curve.kind == "crosses" for panel in panels for drawn_curve in panel.curves):
        note += " Crosses and gaps: a loss that is NaN or infinite, at the height of the last one that was finite."
    return Picture("loss", "Training loss", note, words, panels)


def _loss_curves(line: Line, curves: Sequence[XY], *, raw: bool) -> Drawn:
    averaged = [(x, smoothed(loss, smoothing_weight(len(loss)))) for x, loss in curves]
    drawn, bands = draw_line(line, averaged, "line", on_a_grid)
    if raw:
        drawn.insert(0, curve(line.label, line.stroke, *curves[0], line.number, "faint"))
    for x, loss in curves:
        bad = np.flatnonzero(~np.isfinite(loss))
        if len(bad):
            picked = bad[:: -(-len(bad) // _MAX_CROSSES)]
            latest = np.maximum.accumulate(np.where(np.isfinite(loss), np.arange(len(loss)), -1))[picked]
            heights = np.where(latest >= 0, loss[np.maximum(latest, 0)], 0.0)
            drawn.append(Curve(line.named(len(curves)), line.stroke, x[picked], heights, line.number, "crosses"))
    return drawn, bands


def _speed(lines: Lines, trained: Mapping[int, Sequence[_Trained]], words: str) -> Picture:
    steps, examples = _draw(
        lines, lambda line, axis: [trained_run.speed[axis] for trained_run in trained.get(line.number, ())], _speed_curves
    )
    panels = []
    for name, drawn, both in (("steps", steps, (steps, {})), ("examples", examples, ({}, examples))):
        top = _top([drawn_curve.y for curves, _ in drawn.values() for drawn_curve in curves if drawn_curve.kind != "faint"])
        speed_panels = _panels(lines, f"{name.capitalize()} per second", f"{name} per second", both, from_zero=True)
        panels += [replace(panel, top=top) for panel in speed_panels]
    note = _SPEED + (f"{_ACROSS_MODES}: across modes, compare examples per second." if _both_modes(lines) else "")
    return Picture("speed", "Speed", note, words, tuple(panels))


def _speed_curves(line: Line, curves: Sequence[XY]) -> Drawn:
    width = [2 * (len(y) // (2 * _MEDIAN_SHARE)) + 1 for _, y in curves]
    drawn, bands = draw_line(line, [(x, running_median(y, wide)) for (x, y), wide in zip(curves, width, strict=True)], "line", on_a_grid)
    together = on_a_grid(curves) if len(curves) > 1 else None
    if together is not None:
        return drawn, visible_bands(line.stroke, together.x, together.low, together.high, line.number)
    return [*(curve(line.named(len(curves)), line.stroke, x, y, line.number, "faint") for x, y in curves), *drawn], bands


def _learning_rates(lines: Lines, trained: Mapping[int, Sequence[_Trained]]) -> list[Picture]:
    rates = {number: [trained_run.rates for trained_run in line_rates] for number, line_rates in trained.items()}
    every = np.concatenate([values[np.isfinite(values)] for line_rates in rates.values() for _, values in line_rates])
    if not len(every) or every.min() == every.max():
        return []
    drawn, words = {}, []
    for line in (line for line in lines.all if line.number in rates):
        first, *rest = line_rates = rates[line.number]
        known = first[1][np.isfinite(first[1])]
        if not len(known):
            continue
        are_equal = all(
            np.array_equal(values_a, values_b, equal_nan=True)
            for rates_of_run in rest
            for values_a, values_b in zip(rates_of_run, first, strict=True)
        )
        drawn[line.number] = draw_line(
            replace(line, label=line.named(len(line_rates)), repeated=False), [first] if are_equal else line_rates, "line", on_a_grid
        )
        begin, end, most = (number_text(float(rate)) for rate in (known[0], known[-1], known.max()))
        words.append(f"{line.label}: from {begin} to {end}, at most {most}")
    panels = []
    for part in lines.parts:
        curves, bands = _merge_drawn(drawn[line.number] for line in lines.all if line.part == part and line.number in drawn)
        panels.append(Panel(part or "Learning rate over updates", _STEPS, "learning rate", curves, bands=bands, counts=True))
    return [Picture("learning-rate", "Learning rate", _RATES, "; ".join(words), tuple(panel for panel in panels if panel.curves))]


def _both_modes(lines: Lines) -> bool:
    return len({run.summary["mode"] for line in lines.all for run in line.runs if run.has_summary}) > 1


def _top(heights: Sequence[Floats]) -> float | None:
    """Return the upper limit of a speed axis, so that a spike does not flatten the rest."""
    known = np.concatenate([values[np.isfinite(values)] for values in heights]) if heights else np.zeros(0)
    top = 1.1 * float(np.percentile(known, _MAX_SHARE_OF_POINTS)) if len(known) else 0.0
    return top or None


def all_metrics(lines: Lines) -> list[MetricInfo]:
    """Return the metrics of any of the runs, each name once, as the first run has it."""
    by_name: dict[str, MetricInfo] = {}
    for info in (info for line in lines.all for run in line.runs for info in run.metrics if info != LOSS):
        by_name.setdefault(info.name, info)
    return list(by_name.values())


def evaluations(runs: Iterable[Run], info: MetricInfo) -> list[tuple[Floats, Floats, Floats]]:
    """Return steps, seconds and test values [evaluations] of a metric, for each run with any."""
    measured = [run.tests for run in runs if run.tests and info.name in {metric.name for metric in run.metrics}]
    return [
        (
            np.array([record.step for record in tests], np.float64),
            np.array([record.time_seconds for record in tests], np.float64),
            np.array([record.figure(info.name) for record in tests], np.float64),
        )
        for tests in measured
    ]


def _evaluation(lines: Lines, info: MetricInfo, name: str, shown: str) -> Picture:
    title = f"Test {info.label}"

    def curves(line: Line, axis: int) -> list[XY]:
        return [(record[axis], record[2]) for record in evaluations(line.runs if axis == 0 else line.timed, info)]

    words = []
    for line in lines.all:
        known = evaluations(line.runs, info)
        ends = [
            info.best(record[2].tolist()) if shown == "best" and np.isfinite(record[2]).any() else float(record[2][-1]) for record in known
        ]
        last = [
            f"{figure_text(info.name, end)} (last at {duration_text(float(record[1][-1]))})"
            for end, record in zip(ends, known, strict=True)
        ]
        words += [f"{line.label}: {shown} {'; '.join(last)}"] if known else []
    drawn = _draw(lines, curves, lambda line, record: draw_line(line, record, "points", one_by_one))
    level = shared_goal(lines, info.name)
    panels = tuple(replace(panel, level=level) for panel in _panels(lines, title, title[:1].lower() + title[1:], drawn))
    return Picture(name, title, measured_on(info, lines.runs), ". ".join(words), panels)


def shared_goal(lines: Lines, metric: str) -> tuple[float, str] | None:
    """Return the goal that all runs share for a metric, with its name, if any."""
    goals = {run.job.get("until") for line in lines.all for run in line.runs}
    text = goals.pop() if len(goals) == 1 else None
    target = Target.parse(text) if text else None
    return None if target is None or target.metric != metric else (target.value, f"goal {target.value:g}")
