"""Puts the samples of several nodes, and the updates, on one time axis, so that they can be held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..series.arrays import Floats, NodeSeries

__all__ = ["LEAST_POINTS", "Grid", "correlation", "grid_of", "on_grid", "varies"]

LEAST_POINTS = 10
"""With fewer intervals a correlation says nothing."""

MOST_POINTS = 2000
"""Intervals of a run; of a long one they are longer than its samples."""

CONSTANT = 0.02
"""A series whose standard deviation is less than this part of its mean is constant: what is left is the clock's jitter."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Intervals of equal length: their `edges` [k + 1] on the run clock, in seconds."""

    edges: Floats

    @property
    def seconds(self) -> float:
        """The length of an interval."""
        return float(self.edges[1] - self.edges[0])


def grid_of(nodes: Sequence[NodeSeries], began: float, until: float, least_seconds: float = 0.0) -> Grid | None:
    """Return intervals of the time from `began` to `until` that nodes were sampled in, each as long as between two samples or longer.

    They are at least `least_seconds` long. None where fewer than two intervals have room.
    """
    times = [node.time_seconds for node in nodes if len(node.time_seconds) > 1]
    if not times:
        return None
    began, until = max(began, min(float(own[0]) for own in times)), min(until, max(float(own[-1]) for own in times))
    apart = np.concatenate([np.diff(own) for own in times])
    apart = apart[apart > 0]
    if not len(apart) or not until > began:
        return None
    width = max(float(np.median(apart)), least_seconds)
    count = min(MOST_POINTS, int((until - began) / width))
    return Grid(np.linspace(began, until, count + 1)) if count >= 2 else None


def on_grid(grid: Grid, time_seconds: Floats, per_second: Floats) -> Floats:
    """Return the mean rate in each interval [k]: of samples whose rate holds since the sample before. NaN where half of it is not known."""
    if len(time_seconds) < 2:
        return np.full(len(grid.edges) - 1, np.nan)
    order = np.argsort(time_seconds, kind="stable")
    times, rates = time_seconds[order], per_second[order]
    lengths = np.diff(times)
    known = np.isfinite(rates[1:])
    amount = np.concatenate([[0.0], np.cumsum(np.where(known, np.where(known, rates[1:], 0.0) * lengths, 0.0))])
    covered = np.concatenate([[0.0], np.cumsum(np.where(known, lengths, 0.0))])
    amounts, seconds = np.diff(np.interp(grid.edges, times, amount)), np.diff(np.interp(grid.edges, times, covered))
    enough = seconds >= 0.5 * grid.seconds
    return np.where(enough, amounts / np.where(enough, seconds, 1.0), np.nan)


def varies(values: Floats) -> bool:
    """Return whether values [k], all finite, are no constant series."""
    mean = float(np.mean(np.abs(values))) if len(values) else 0.0
    return bool(mean > 0 and float(np.std(values)) > CONSTANT * mean)


def correlation(first: Floats, second: Floats) -> tuple[float | None, int]:
    """Return (Pearson's r, number of intervals where both are known); None for r with fewer than `LEAST_POINTS`, or a constant series."""
    known = np.isfinite(first) & np.isfinite(second)
    count = int(known.sum())
    one, other = first[known], second[known]
    if count < LEAST_POINTS or not varies(one) or not varies(other):
        return None, count
    one, other = (one - one.mean()) / one.std(), (other - other.mean()) / other.std()
    return float(np.clip(np.mean(one * other), -1.0, 1.0)), count
