"""Charts of where the time went: the components of each run's clock, and of a training step on each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...records.text.many_nodes import ends_of
from ...records.text.numbers import duration_text
from ..catalog.run import Run
from ..diagnosis.time_shares import calibrated_segment, idle_fraction
from .figure import COLOURS, INK, Bars, Picture, Segment

__all__ = ["NOT_CALIBRATED", "time_shares"]

NOT_CALIBRATED = "not calibrated"
_NO_UPDATES = "made no updates"

_CLOCK_COMPONENTS = {
    "training": ("train_seconds", COLOURS[0]),
    "evaluation": ("eval_seconds", COLOURS[5]),
    "translation at the end": ("translate_seconds", COLOURS[2]),
    "checkpoints": ("checkpoint_seconds", COLOURS[4]),
    "between commands": ("other_seconds", INK),
}
_SELDOM = ("translate_seconds",)
"""Shown where some run has it: most models translate nothing."""

_STEP_COMPONENTS = {
    "data": ("data_seconds", COLOURS[4]),
    "computing": ("compute_seconds", COLOURS[0]),
    "waiting for peers": ("peers_seconds", COLOURS[3]),
    "communicating": ("communicate_seconds", COLOURS[1]),
}
_NOTE = (
    "Steps: from the calibration at a run's end, when the workers repeat the parts of a step. Communicating is what the exchange adds "
    "beyond what computing hides. In async mode workers may have nothing to do between two commands, nobody waits for peers, and queueing "
    "at the parameter server is part of communicating. Of a run that was resumed the steps are those of its last part."
)

_SOME = " Of many nodes those are shown that wait least for their peers, and those that wait most."


def time_shares(runs: Sequence[Run]) -> Picture:
    """Return bars for each run that has a summary, and for each of its nodes."""
    ended = [run for run in runs if run.has_summary]
    clocks = [_clock(run.summary) for run in ended]
    nodes, some = [], False
    for run in ended:
        shown, left_out = ends_of(_nodes(run), _waited)
        nodes += [(run, node, figures) for node, figures in shown]
        some = some or left_out
    panels = (
        Bars(
            "Where each run's clock went",
            "seconds",
            tuple(run.name for run in ended),
            tuple(
                Segment(name, np.array([clock.get(key, 0.0) for clock in clocks], np.float64), colour)
                for name, (key, colour) in _CLOCK_COMPONENTS.items()
                if any(_has(clock, key) for clock in clocks)
            ),
            "s",
            ("",) * len(ended),
        ),
        Bars(
            "Where a training step went",
            "% of the step",
            tuple(_row(run, node, figures, alone=len(runs) == 1) for run, node, figures in nodes),
            tuple(
                Segment(name, np.array([_percent(figures, key) for _, _, figures in nodes], np.float64), colour)
                for name, (key, colour) in _STEP_COMPONENTS.items()
            ),
            "%",
            tuple(NOT_CALIBRATED if figures is None else _NO_UPDATES for _, _, figures in nodes),
        ),
    )
    words = "; ".join(_said(run, clock) for run, clock in zip(ended, clocks, strict=True))
    return Picture("time-shares", "Where the time went", _NOTE + _SOME * some, words, tuple(panel for panel in panels if panel.rows))


def _clock(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the components of the whole run's clock: those of the calibration where it is of the whole run, else the clock's own.

    What is known of the time in which workers had nothing to do is no training.
    """
    segment, measured = calibrated_segment(summary), ("train_seconds", "eval_seconds", "translate_seconds", "checkpoint_seconds")
    shares = summary.get("time_shares")
    if shares is not None and segment is summary:
        clock = {key: float(shares["run"][key]) for key in (*measured, "other_seconds")}
    else:
        clock = {key: float(summary[key]) for key in measured}
        clock["other_seconds"] = max(0.0, float(summary["run_seconds"]) - sum(clock.values()))
    idle = idle_fraction(summary) * (clock if segment is summary else segment)["train_seconds"]
    return {**clock, "train_seconds": clock["train_seconds"] - idle, "other_seconds": clock["other_seconds"] + idle}


def _nodes(run: Run) -> list[tuple[int, Mapping[str, Any] | None]]:
    if not run.has_summary:
        return []
    shares = run.summary.get("time_shares")
    if shares is None:
        return [(node, None) for node in range(len(run.summary["per_node"]))]
    return [(figures["node"], figures) for figures in shares["nodes"]]


def _waited(node: tuple[int, Mapping[str, Any] | None]) -> float | None:
    """How long a node waits for its peers in a step, in seconds."""
    seconds: float | None = None if node[1] is None else node[1]["peers_seconds"]
    return seconds


def _percent(figures: Mapping[str, Any] | None, key: str) -> float:
    if figures is None or figures[key] is None or not figures["step_seconds"]:
        return float("nan")
    return 100.0 * float(figures[key]) / float(figures["step_seconds"])


def _row(run: Run, node: int, figures: Mapping[str, Any] | None, *, alone: bool) -> str:
    name = f"node {node}" if alone else f"{run.name}, node {node}"
    return name if figures is None or figures["step_seconds"] is None else f"{name} ({_short(figures['step_seconds'])})"


def _short(seconds: float) -> str:
    """Return the length of a step: steps of small models take microseconds."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else duration_text(seconds)


def _has(clock: Mapping[str, float], key: str) -> bool:
    return bool(clock.get(key)) if key in _SELDOM else key in clock


def _said(run: Run, clock: Mapping[str, float]) -> str:
    spent = ", ".join(f"{name} {duration_text(clock[key])}" for name, (key, _) in _CLOCK_COMPONENTS.items() if _has(clock, key))
    steps = []
    for node, figures in ends_of(_nodes(run), _waited)[0]:
        parts = [f"{name} {value:.0f} %" for name, (key, _) in _STEP_COMPONENTS.items() if np.isfinite(value := _percent(figures, key))]
        if parts:
            steps.append(f"a step on node {node}: {', '.join(parts)}")
    return f"{run.name}: {'; '.join([spent, *steps]) if steps else f'{spent}, steps {NOT_CALIBRATED}'}"
