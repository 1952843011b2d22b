"""The list of charts of runs side by side, and those of training itself: what the report's page and `trainer plot` draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...core.units import Target
from ...metrics import LOSS, MetricInfo
from ...records.summary.summary import FINAL_LOSS_UPDATES
from ...records.text.numbers import duration_text, figure_text, number_text, rate_text
from ..catalog.run import Run
from ..series.arrays import Floats, Integers, StepSeries
from ..series.downsample import smoothed, smoothing_weight
from ..series.throughput import pace, pauses
from .figure import Bars, Curve, Panel, Picture, curve
from .resource_charts import resources
from .time_share_charts import time_shares

__all__ = ["pictures"]

_STEPS, _SECONDS = "updates", "run clock in seconds"
_SMOOTHED = "Pale: each update. Strong: averaged exponentially over a hundredth of the run's updates (at least 10)."
_SPEED = (
    "In windows of training, without evaluations and pauses for checkpoints. A step is an update of the global batch in sync mode, and "
    "of one worker's batch in async mode: across modes, compare examples per second."
)
_MOST_CROSSES = 100


def pictures(runs: Sequence[Run]) -> list[Picture]:
    """Return the pictures of the runs, in the order in which they are shown; those that none of the runs has figures for are left out.

    Raises DamagedRunError where records cannot be read.
    """
    losses: list[tuple[list[Curve], list[Curve]]] = []
    speeds: list[tuple[list[Curve], list[Curve]]] = []
    words: list[tuple[str, str]] = []
    for run in runs:
        series = run.step_series()
        if len(series):
            losses.append(_losses(run, series))
            speeds.append(_speeds(run, series))
            words.append(_described(run, series))
    found = []
    if losses:
        found = [
            _pair("loss", "Training loss", "mean loss of a batch", losses, _SMOOTHED, "; ".join(loss for loss, _ in words)),
            *_evaluations(runs),
            _speed(speeds, "; ".join(speed for _, speed in words)),
        ]
    found += [time_shares(runs)]
    found += resources(runs, [run.node_series() for run in runs])
    return [picture for picture in found if any(isinstance(panel, Bars) or panel.curves for panel in picture.panels)]


def _losses(run: Run, series: StepSeries) -> tuple[list[Curve], list[Curve]]:
    """Return the curves over steps and those over seconds."""
    weight = smoothing_weight(len(series))
    in_time = series.in_time()
    return (
        _loss_curves(run, (series.step + 1).astype(np.float64), series.loss.astype(np.float64), weight),
        _loss_curves(run, series.time_seconds[in_time], series.loss[in_time].astype(np.float64), weight),
    )


def _loss_curves(run: Run, x: Floats, loss: Floats, weight: float) -> list[Curve]:
    drawn = [
        curve(run.name, run.number, x, loss, run.number, "faint"),
        curve(run.name, run.number, x, smoothed(loss, weight), run.number),
    ]
    bad = np.flatnonzero(~np.isfinite(loss))
    if len(bad):
        picked = bad[:: -(-len(bad) // _MOST_CROSSES)]
        drawn.append(Curve(run.name, run.number, x[picked], _height_before(loss, picked), run.number, "crosses"))
    return drawn


def _height_before(loss: Floats, picked: Integers) -> Floats:
    """Return the last finite loss before each of the entries `picked`; 0 where there is none."""
    latest = np.maximum.accumulate(np.where(np.isfinite(loss), np.arange(len(loss)), -1))[picked]
    return np.where(latest >= 0, loss[np.maximum(latest, 0)], 0.0)


def _speeds(run: Run, series: StepSeries) -> tuple[list[Curve], list[Curve]]:
    speed = pace(series, pauses(run.evals, run.events))
    return (
        [curve(run.name, run.number, speed.steps, speed.steps_per_second, run.number)],
        [curve(run.name, run.number, speed.seconds, speed.examples_per_second, run.number)],
    )


def _described(run: Run, series: StepSeries) -> tuple[str, str]:
    """Say the course of the loss and the speed of a run in words."""
    finite = series.loss[np.isfinite(series.loss)]
    bad = len(series) - len(finite)
    span = f"in {len(series):,} updates and {duration_text(float(series.time_seconds.max()))}"
    ends = "was never finite"
    if len(finite):
        known = run.summary["final_train_loss"] if run.has_summary else None
        last = float(finite[-FINAL_LOSS_UPDATES:].mean()) if known is None else known
        ends = f"from {number_text(float(finite[0]))} to {number_text(last)}"
    loss = f"{run.name}: {ends} {span}{f', {bad:,} of them not finite' if bad else ''}"
    if not run.has_summary:
        return loss, f"{run.name}: no figures, for the run has not ended well"
    steps, examples = (rate_text(run.summary[name]) for name in ("steps_per_second", "examples_per_second"))
    return loss, f"{run.name}: {steps.removesuffix('/s')} steps and {examples.removesuffix('/s')} examples per second"


def _pair(name: str, title: str, height: str, curves: Sequence[tuple[list[Curve], list[Curve]]], note: str, words: str) -> Picture:
    """Return a picture of two panels: over steps, over seconds."""
    over_steps = _faint_first(drawn for pair in curves for drawn in pair[0])
    over_seconds = _faint_first(drawn for pair in curves for drawn in pair[1])
    panels = (
        Panel(f"{title} over steps", _STEPS, height, over_steps),
        Panel(f"{title} over time", _SECONDS, height, over_seconds),
    )
    if any(drawn.kind == "crosses" for drawn in (*over_steps, *over_seconds)):
        note += " Crosses and gaps: a loss that is NaN or infinite, at the height of the last one that was finite."
    return Picture(name, title, note, words, panels)


def _faint_first(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """Return the curves so that no run's single figures cover another's averages: what comes later is drawn above."""
    return tuple(sorted(curves, key=lambda drawn: drawn.kind != "faint"))


def _speed(curves: Sequence[tuple[list[Curve], list[Curve]]], words: str) -> Picture:
    steps = Panel("Steps per second over steps", _STEPS, "steps per second", tuple(c for pair in curves for c in pair[0]), from_zero=True)
    examples = Panel(
        "Examples per second over time", _SECONDS, "examples per second", tuple(c for pair in curves for c in pair[1]), from_zero=True
    )
    return Picture("speed", "Speed", _SPEED, words, (steps, examples))


def _evaluations(runs: Sequence[Run]) -> list[Picture]:
    return [
        *(_evaluation(runs, info, info.name, "best") for info in _metrics(runs)),
        _evaluation(runs, LOSS, "test-loss", "last"),
    ]


def _metrics(runs: Sequence[Run]) -> list[MetricInfo]:
    """Return the metrics that any of the runs has, each once."""
    return list(dict.fromkeys(info for run in runs for info in run.metrics if info != LOSS))


def _evaluation(runs: Sequence[Run], info: MetricInfo, name: str, told: str) -> Picture:
    """Return a metric or the loss on the test split, over steps and over seconds, with the goal where all runs have the same one."""
    title = f"Test {info.label}"
    curves, words = [], []
    for run in runs:
        if not run.tests or info not in run.metrics:
            continue
        values = np.array([record.figure(info.name) for record in run.tests], np.float64)
        steps = np.array([record.step for record in run.tests], np.float64)
        seconds = np.array([record.time_seconds for record in run.tests], np.float64)
        curves.append(
            (
                [curve(run.name, run.number, steps, values, run.number, "points")],
                [curve(run.name, run.number, seconds, values, run.number, "points")],
            )
        )
        best = info.best(values.tolist()) if told == "best" and np.isfinite(values).any() else float(values[-1])
        words.append(f"{run.name}: {told} {figure_text(info.name, best)}, last at {duration_text(float(seconds[-1]))} of the run clock")
    picture = _pair(name, title, title[:1].lower() + title[1:], curves, "Over the whole test split, every example once.", "; ".join(words))
    return _with_goal(picture, runs, info.name)


def _with_goal(picture: Picture, runs: Sequence[Run], metric: str) -> Picture:
    goals = {run.job.get("until") for run in runs}
    goal = goals.pop() if len(goals) == 1 else None
    target = Target.parse(goal) if goal else None
    if target is None or target.metric != metric:
        return picture
    level = (target.value, f"goal {goal}")
    panels = tuple(
        Panel(panel.title, panel.x_title, panel.y_title, panel.curves, level=level) for panel in picture.panels if isinstance(panel, Panel)
    )
    return Picture(picture.name, picture.title, picture.note, picture.words, panels)
