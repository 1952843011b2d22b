"""Charts of the components of each run's clock, and of a step on each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...records.text import duration_text, ends_of
from ..analysis.time_shares import BESIDE_TRAINING, calibrated_segment, idle_fraction
from ..runs.run import Run
from .figure import COLOURS, INK, Bars, Picture, Segment
from .lines import Line, Lines

NOT_CALIBRATED = "not calibrated"
_NO_UPDATES = "made no updates"
_CLOCK_COMPONENTS = {
    "training": ("train_seconds", COLOURS[0]),
    "training, workers idle": ("idle_seconds", COLOURS[1]),
    "evaluation": ("eval_seconds", COLOURS[5]),
    "translation at the end": ("translate_seconds", COLOURS[2]),
    "checkpoints": ("checkpoint_seconds", COLOURS[4]),
    "profiling": ("profile_seconds", COLOURS[3]),
    "coordination": ("other_seconds", INK),
}
_SELDOM = ("idle_seconds", "translate_seconds", "profile_seconds")  # shown if some run has it
_STEP_COMPONENTS = {
    "data": ("data_seconds", COLOURS[4]),
    "computing": ("compute_seconds", COLOURS[0]),
    "waiting for peers": ("peers_seconds", COLOURS[3]),
    "communicating": ("communicate_seconds", COLOURS[1]),
}
_NOTE = (
    "Steps: from the calibration at a run's end, when the workers repeat the parts of a step. Communicating is what the exchange adds "
    "beyond what computing hides. In async mode workers may have no steps for a part of training, nobody waits for peers, and queueing "
    "at the parameter server is part of communicating. Of a run that was resumed the steps are those of its last part."
)
_SOME = " Of many nodes those are shown that wait least for their peers, and those that wait most."
_MEAN = " Of several nodes the mean."
_TYPICAL = " With repeats: the most typical run (step breakdown closest to the median)."
_MOST_NODES = 12  # with more nodes in all, a bar is the mean of a configuration's nodes


def time_shares(lines: Lines) -> Picture:
    """Return bars for each configuration with figures, and for its nodes unless too many."""
    representatives = [(line, line.runs[0] if line.set_up is None else line.set_up.typical_run) for line in lines.all]
    ended = [(line, run) for line, run in representatives if run.has_summary]
    clocks = [_clock(run.summary) for _, run in ended]
    each = len(ended) == 1 or sum(len(_nodes(run)) for _, run in ended) <= _MOST_NODES
    nodes: list[tuple[str, Mapping[str, Any] | None]] = []
    some = False
    for line, run in ended:
        shown, left_out = ends_of(_nodes(run), _waited)
        some = some or (left_out and each)
        if each:
            nodes += [(_row(line, node, figures, alone=len(ended) == 1), figures) for node, figures in shown]
        else:
            nodes.append((line.label, _mean(figures for _, figures in _nodes(run))))
    note = _NOTE + _SOME * some + _MEAN * (not each) + _TYPICAL * lines.repeated
    note = f"{note} {lines.left_out_note}".strip()
    panels = (
        Bars(
            "Where each run's clock went",
            "seconds",
            tuple(line.label for line, _ in ended),
            tuple(
                Segment(_named(name, clocks), np.array([clock.get(key, 0.0) for clock in clocks], np.float64), colour)
                for name, (key, colour) in _CLOCK_COMPONENTS.items()
                if any(_has(clock, key) for clock in clocks)
            ),
            "s",
            ("",) * len(ended),
        ),
        Bars(
            "Where a training step went",
            "% of the step",
            tuple(row for row, _ in nodes),
            tuple(
                Segment(name, np.array([_percent(figures, key) for _, figures in nodes], np.float64), colour)
                for name, (key, colour) in _STEP_COMPONENTS.items()
            ),
            "%",
            tuple(NOT_CALIBRATED if figures is None else _NO_UPDATES for _, figures in nodes),
        ),
    )
    words = ". ".join(_said(line, run, clock) for (line, run), clock in zip(ended, clocks, strict=True))
    return Picture("time-shares", "Where the time went", note, words, tuple(panel for panel in panels if panel.rows))


def _mean(nodes: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    known = [figures for figures in nodes if figures is not None and figures["step_seconds"]]
    if not known:
        return None
    keys = ["step_seconds", *(key for key, _ in _STEP_COMPONENTS.values())]
    values = {key: [figures[key] for figures in known if figures[key] is not None] for key in keys}
    return {key: sum(found) / len(found) if found else None for key, found in values.items()}


def _clock(summary: Mapping[str, Any]) -> dict[str, float]:
    segment, measured = calibrated_segment(summary), ("train_seconds", *BESIDE_TRAINING.values())
    shares = summary.get("time_shares")
    if shares is not None and not shares.get("part_began_seconds"):
        clock = {key: float(shares["run"][key]) for key in (*measured, "other_seconds")}
    else:
        clock = {key: float(summary[key]) for key in measured}
        clock["other_seconds"] = max(0.0, float(summary["run_seconds"]) - sum(clock.values()))
    idle = idle_fraction(summary) * (clock if segment is summary else segment)["train_seconds"]
    return {**clock, "train_seconds": clock["train_seconds"] - idle, "idle_seconds": idle}


def _nodes(run: Run) -> list[tuple[int, Mapping[str, Any] | None]]:
    if not run.has_summary:
        return []
    shares = run.summary.get("time_shares")
    if shares is None:
        return [(node, None) for node in range(len(run.summary["per_node"]))]
    return [(figures["node"], figures) for figures in shares["nodes"]]


def _waited(node: tuple[int, Mapping[str, Any] | None]) -> float | None:
    seconds: float | None = None if node[1] is None else node[1]["peers_seconds"]
    return seconds


def _percent(figures: Mapping[str, Any] | None, key: str) -> float:
    if figures is None or figures[key] is None or not figures["step_seconds"]:
        return float("nan")
    return 100.0 * float(figures[key]) / float(figures["step_seconds"])


def _row(line: Line, node: int, figures: Mapping[str, Any] | None, *, alone: bool) -> str:
    name = f"node {node}" if alone else f"{line.label}, node {node}"
    return name if figures is None or figures["step_seconds"] is None else f"{name} ({_short(figures['step_seconds'])})"


def _short(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else duration_text(seconds)


def _has(clock: Mapping[str, float], key: str) -> bool:
    return bool(clock.get(key)) if key in _SELDOM else key in clock


def _named(name: str, clocks: Sequence[Mapping[str, float]]) -> str:
    return f"{name}, workers busy" if name == "training" and any(_has(clock, "idle_seconds") for clock in clocks) else name


def _said(line: Line, run: Run, clock: Mapping[str, float]) -> str:
    known = [(_named(name, [clock]), key) for name, (key, _) in _CLOCK_COMPONENTS.items() if _has(clock, key)]
    spent = ", ".join(f"{name} {duration_text(clock[key])}" for name, key in known)
    steps = []
    for node, figures in ends_of(_nodes(run), _waited)[0]:
        parts = [f"{name} {value:.0f} %" for name, (key, _) in _STEP_COMPONENTS.items() if np.isfinite(value := _percent(figures, key))]
        if parts:
            steps.append(f"a step on node {node}: {', '.join(parts)}")
    return f"{line.label}: {'; '.join([spent, *steps]) if steps else f'{spent}, steps {NOT_CALIBRATED}'}"
