"""Time series of a run: training time, speed, and thinned, smoothed and combined curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ...records.store.schema import EvalRecord, EventRecord
from .series_arrays import Floats, Integers, NodeSeries, StepSeries

WINDOWS = 200  # resolves a dip at the end of each of a hundred epochs


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed over training time [windows]; `steps` and `seconds` are at the windows' ends."""

    steps: Floats
    seconds: Floats
    steps_per_second: Floats
    examples_per_second: Floats


def pauses(evals: Iterable[EvalRecord], events: Iterable[EventRecord]) -> list[tuple[float, float]]:
    """Return when (from, to, on the run clock) training paused, or its work was lost."""
    known = list(events)
    evaluations = [(record.time_seconds - record.seconds, record.time_seconds) for record in evals]
    return sorted([*evaluations, *checkpoint_pauses(known), *_durations(known, "run_restarted", "seconds_lost")])


def _durations(events: Iterable[EventRecord], kind: str, key: str) -> list[tuple[float, float]]:
    durations = [(event.time_seconds, event.detail.get(key)) for event in events if event.event == kind]
    return [(end - seconds, end) for end, seconds in durations if _is_duration(seconds)]


def checkpoint_pauses(events: Iterable[EventRecord]) -> list[tuple[float, float]]:
    """Return the pauses for saved checkpoints; events without a duration are skipped."""
    spans = []
    for event in events:
        seconds, stall = event.detail.get("seconds"), event.detail.get("stall_seconds")
        if event.event == "checkpoint_saved" and _is_duration(seconds) and _is_duration(stall):
            copied = event.time_seconds - seconds
            spans.append((copied - stall, copied))
    return spans


def end_translations(events: Iterable[EventRecord]) -> list[tuple[float, float]]:
    """Return when (from, to) the test sentences were translated, where recorded."""
    return _durations(events, "translated", "seconds")


def _is_duration(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_SECONDS


_MAX_SECONDS = 1e12  # as `records.schema.Seconds` has it


def training_clock(seconds: Floats, stops: Sequence[tuple[float, float]]) -> Floats:
    """Return the training time up to each of `seconds`, without `stops` (sorted; may overlap)."""
    trained = seconds.copy()
    until = -np.inf
    for start, end in stops:
        start = max(start, until)
        if end > start:
            trained -= np.clip(seconds, start, end) - start
            until = end
    return trained


def pace(series: StepSeries, stops: Sequence[tuple[float, float]], windows: int = WINDOWS) -> Pace:
    """Return the speed in windows of equal training time; groups are spread over their duration."""
    n = len(series)
    if not n:
        nothing = np.zeros(0)
        return Pace(nothing, nothing, nothing, nothing)
    in_time = series.in_time()
    seconds = series.time_seconds[in_time]
    trained = np.maximum.accumulate(training_clock(seconds, sorted([*stops, *series.profile_pauses()])))
    counts = ~series.profiled[in_time]
    timed_examples = np.diff(series.examples, prepend=0)[in_time] * counts
    edges = np.linspace(0.0, trained[-1], min(windows, len(series.count)) + 1)
    steps, examples = _updates_until(edges, trained, np.cumsum(counts)), _updates_until(edges, trained, np.cumsum(timed_examples))
    spent = np.diff(edges) if counts.any() and trained[-1] > 0 else np.full(len(edges) - 1, np.nan)
    done = _updates_until(edges, trained, np.arange(1, n + 1))[1:]
    return Pace(done, np.interp(edges[1:], trained, seconds), np.diff(steps) / spent, np.diff(examples) / spent)


def _updates_until(edges: Floats, trained: Floats, done: Integers) -> Floats:
    return np.interp(edges, np.concatenate([[0.0], trained]), np.concatenate([[0], done]).astype(np.float64))


POINTS = 2000  # of a curve: about one for each pixel of a wide screen
_WINDOW_SHARE = 0.01
_MIN_WINDOW = 10


def thinned(values: Floats | NDArray[np.float32], points: int = POINTS) -> Integers:
    """Return which entries of `values` [n] to draw: at most about `points`, in order."""
    # Each of equal buckets keeps its minimum, its maximum and one non-finite entry, so that peaks and gaps remain.
    n = len(values)
    if n <= points:
        return np.arange(n)
    size = math.ceil(2 * n / points)
    buckets = math.ceil(n / size)
    padded = np.full(buckets * size, np.nan)
    padded[:n] = values
    table = padded.reshape(buckets, size)
    finite = np.isfinite(table)
    starts = np.arange(buckets) * size
    lowest = starts + np.argmin(np.where(finite, table, np.inf), axis=1)
    highest = starts + np.argmax(np.where(finite, table, -np.inf), axis=1)
    missing = ~finite
    missing.reshape(-1)[n:] = False
    gaps = (starts + np.argmax(missing, axis=1))[missing.any(axis=1)]
    return np.unique(np.concatenate([lowest, highest, gaps, [0, n - 1]]))


def running_median(values: Floats, width: int) -> Floats:
    """Return the running median of `width` (odd) values [n]; NaN if not finite."""
    n, known = len(values), np.isfinite(values)
    medians = np.full(n, np.nan)
    if known.any():
        width = min(width, n)
        windows = np.lib.stride_tricks.sliding_window_view(np.where(known, values, np.nan), width)
        medians[known] = np.nanmedian(windows[np.clip(np.arange(n) - width // 2, 0, n - width)[known]], axis=1)
    return medians


def smoothing_weight(n: int) -> float:
    """Return the weight that averages over about a hundredth of `n` values, at least 10."""
    return 1 - 1 / max(_MIN_WINDOW, n * _WINDOW_SHARE)


def smoothed(values: Floats | NDArray[np.float32], weight: float) -> Floats:
    """Return the bias-corrected moving average of `values` [n]; NaN if not finite."""
    # Entry i is Σ weight^(i−j)·v_j over Σ weight^(i−j), for j up to i, with 0 ≤ `weight` < 1.
    if not 0 <= weight < 1:
        raise ValueError(f"weight: got {weight!r}; allowed: from 0 to below 1")
    known = np.isfinite(values)
    finite = np.asarray(values, np.float64)[known]
    averaged = np.full(len(values), np.nan)
    if len(finite):
        from scipy.signal import lfilter  # scipy takes seconds to import

        past = lfilter([1 - weight], [1, -weight], finite)
        averaged[known] = past / -np.expm1(np.log(weight) * np.arange(1, len(finite) + 1)) if weight else past
    return averaged


BAND_PERCENTILES = (10, 90)  # four of five nodes are between these
ENDS = (0, 100)  # lowest and highest node
UNEVEN = 4.0  # factor from which nodes have no common figure, such as parameter servers and idle nodes
UNEVEN_NOTE = f"nodes differ by a factor of {UNEVEN:g} or more"


def differ(figures: Sequence[float]) -> bool:
    """Return whether the nodes' figures differ by the factor `UNEVEN` or more."""
    known = [figure for figure in figures if np.isfinite(figure)]
    return len(known) > 1 and max(known) > 0 and max(known) >= UNEVEN * min(known)


@dataclass(frozen=True, slots=True)
class Bands:
    """A figure of all nodes over time [n], and the `percentiles` of `low` and `high`."""

    time_seconds: Floats
    low: Floats
    median: Floats
    high: Floats
    percentiles: tuple[int, int] = BAND_PERCENTILES


def bands(nodes: Sequence[NodeSeries], figure: Callable[[NodeSeries], Floats], first: float, last: float, points: int) -> Bands:
    """Return a figure of the nodes at `points` times; a sample covers the time before it."""
    times = np.linspace(first, last, points)
    table = np.full((len(nodes), points), np.nan)
    for row, node in enumerate(nodes):
        following = np.searchsorted(node.time_seconds, times)
        known = (following < len(node.time_seconds)) & (times >= node.time_seconds[0])
        table[row, known] = figure(node)[following[known]]
    observed = np.isfinite(table).any(axis=0)
    percentiles, ends = np.full((3, points), np.nan), BAND_PERCENTILES
    if observed.any():
        means = [float(np.mean(values[np.isfinite(values)])) for values in table if np.isfinite(values).any()]
        ends = ENDS if differ(means) else BAND_PERCENTILES
        percentiles[:, observed] = np.nanpercentile(table[:, observed], [ends[0], 50, ends[1]], axis=0)
    return Bands(times, percentiles[0], percentiles[1], percentiles[2], ends)


GRID_POINTS = 400
XY = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, minimum and maximum of repeats over their common `x` [n]; NaN if not finite."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    beyond: tuple[XY, ...]  # the rest of longer curves


def on_a_grid(curves: Sequence[XY], points: int = GRID_POINTS) -> Spread | None:
    """Return curves (x ascending, y) combined on a grid over their common range, if any."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if not first < last:
        return None
    grid = np.linspace(first, last, points)
    heights = np.stack([np.interp(grid, x, y) for x, y in curves])
    beyond = []
    for (x, y), row in zip(curves, heights, strict=True):
        later = x > last
        if later.any():
            beyond.append((np.concatenate([[last], x[later]]), np.concatenate([row[-1:], y[later]])))
    return _spread(grid, heights, beyond)


def one_by_one(curves: Sequence[XY]) -> Spread | None:
    """Return curves of a few points combined point by point, at the mean of their x."""
    shortest = min(len(x) for x, _ in curves)
    places = np.stack([x[:shortest] for x, _ in curves])
    heights = np.stack([y[:shortest] for _, y in curves])
    beyond = [(x[shortest - 1 :], y[shortest - 1 :]) for x, y in curves if len(x) > shortest]
    return _spread(places.mean(axis=0), heights, beyond)


def _spread(x: Floats, heights: Floats, beyond: Sequence[XY]) -> Spread:
    heights = np.where(np.isfinite(heights).all(axis=0), heights, np.nan)
    return Spread(x, heights.mean(axis=0), heights.min(axis=0), heights.max(axis=0), tuple(beyond))
