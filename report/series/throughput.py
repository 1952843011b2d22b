"""How fast was a run over its course? Updates and examples per second of training, window by window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from ...records.schema import EvalRecord, EventRecord
from .arrays import Floats, Integers, StepSeries

__all__ = ["WINDOWS", "Pace", "checkpoint_pauses", "end_translations", "pace", "pauses", "training_clock"]

WINDOWS = 200
"""Most windows that a run is cut into: enough to see a dip at the end of each of a hundred epochs."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed in windows of a run [windows]. `steps` and `seconds` are updates done and run clock at a window's end.

    Rates are over the time in training, as those of a summary: evaluations, pauses for checkpoints and what was profiled are left out.
    """

    steps: Floats
    seconds: Floats
    steps_per_second: Floats
    examples_per_second: Floats


def pauses(evals: Iterable[EvalRecord], events: Iterable[EventRecord]) -> list[tuple[float, float]]:
    """Return when (from, to, on the run clock) training stood still, or what it did was lost.

    That is for an evaluation, for the copy that a checkpoint is written from, and between a checkpoint and a restart that goes on from it.
    """
    known = list(events)
    found = [(record.time_seconds - record.seconds, record.time_seconds) for record in evals]
    return sorted([*found, *checkpoint_pauses(known), *_lost_by_restarts(known)])


def _lost_by_restarts(events: Iterable[EventRecord]) -> list[tuple[float, float]]:
    found = []
    for event in events:
        lost = event.detail.get("seconds_lost")
        if event.event == "run_restarted" and _is_duration(lost):
            found.append((event.time_seconds - lost, event.time_seconds))
    return found


def checkpoint_pauses(events: Iterable[EventRecord]) -> list[tuple[float, float]]:
    """Return when training stood still for a checkpoint's copy, one for each that was saved, in their order.

    Passes over an event that does not say how long: what is in its detail is checked by no schema.
    """
    found = []
    for event in events:
        seconds, stall = event.detail.get("seconds"), event.detail.get("stall_seconds")
        if event.event == "checkpoint_saved" and _is_duration(seconds) and _is_duration(stall):
            copied = event.time_seconds - seconds
            found.append((copied - stall, copied))
    return found


def end_translations(events: Iterable[EventRecord]) -> list[tuple[float, float]]:
    """Return when (from, to) all test sentences were translated at the end of a run, or of a part of it; without a duration none counts."""
    found = []
    for event in events:
        seconds = event.detail.get("seconds")
        if event.event == "translated" and _is_duration(seconds):
            found.append((event.time_seconds - seconds, event.time_seconds))
    return found


def _is_duration(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_SECONDS


_MOST_SECONDS = 1e12  # as `records.schema.Seconds` has it


def training_clock(seconds: Floats, stops: Sequence[tuple[float, float]]) -> Floats:
    """Return how much of the run clock up to each of `seconds` was training: without `stops` (sorted; they may overlap)."""
    trained = seconds.copy()
    until = -np.inf
    for start, end in stops:
        start = max(start, until)
        if end > start:
            trained -= np.clip(seconds, start, end) - start
            until = end
    return trained


def pace(series: StepSeries, stops: Sequence[tuple[float, float]], windows: int = WINDOWS) -> Pace:
    """Return the speed in at most `windows` windows of equal training time; there are no more than groups of updates.

    The updates of a group are spread over the time that it took: of async workers' groups, which overlap, each window gets its share.
    """
    n = len(series)
    if not n:
        nothing = np.zeros(0)
        return Pace(nothing, nothing, nothing, nothing)
    in_time = series.in_time()
    seconds = series.time_seconds[in_time]
    trained = np.maximum.accumulate(training_clock(seconds, sorted([*stops, *series.profile_pauses()])))
    counts = ~series.profiled[in_time]
    each = np.diff(series.examples, prepend=0)[in_time] * counts
    edges = np.linspace(0.0, trained[-1], min(windows, len(series.count)) + 1)
    steps, examples = _until(edges, trained, np.cumsum(counts)), _until(edges, trained, np.cumsum(each))
    spent = np.diff(edges) if counts.any() and trained[-1] > 0 else np.full(len(edges) - 1, np.nan)
    done = _until(edges, trained, np.arange(1, n + 1))[1:]
    return Pace(done, np.interp(edges[1:], trained, seconds), np.diff(steps) / spent, np.diff(examples) / spent)


def _until(edges: Floats, trained: Floats, done: Integers) -> Floats:
    """Return how much was `done` [n] at each of the `edges`; between two updates it grows evenly."""
    return np.interp(edges, np.concatenate([[0.0], trained]), np.concatenate([[0], done]).astype(np.float64))
