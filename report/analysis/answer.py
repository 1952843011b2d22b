"""An answer about a run as text and figures, and its number formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...records.text import UNKNOWN
from ..runs.series_arrays import Floats, NodeSeries

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A one-line answer: its `key` in JSON, `question` on the page, and JSON `figures`."""

    key: str
    question: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def digits3(value: float | None) -> str:
    """Return a figure with three significant digits: ``0.0123``, ``4.56``, ``78,900``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e9 else f"{rounded:.3g}"


def time_text(seconds: float | None) -> str:
    """Return a time with three digits: ``0.34 s``, ``2.08 min``, ``3.12 h``, ``2.9 days``."""
    if seconds is None:
        return UNKNOWN
    for least, unit in ((3 * _DAY, "days"), (2 * _HOUR, "h"), (2 * _MINUTE, "min")):
        if seconds >= least:
            return f"{digits3(seconds / {'days': _DAY, 'h': _HOUR, 'min': _MINUTE}[unit])} {unit}"
    return f"{digits3(seconds)} s"


LEAST_POINTS = 10  # minimum intervals of a correlation
MOST_POINTS = 2000  # maximum intervals of a run
CONSTANT = 0.02  # coefficient of variation below which a series is constant but for clock jitter


@dataclass(frozen=True, slots=True)
class Grid:
    """Intervals of equal length: their `edges` [k + 1] in seconds on the run clock."""

    edges: Floats

    @property
    def seconds(self) -> float:
        """The length of an interval."""
        return float(self.edges[1] - self.edges[0])


def grid_of(nodes: Sequence[NodeSeries], began: float, until: float, least_seconds: float = 0.0) -> Grid | None:
    """Return intervals at least `least_seconds` and a sampling interval long, if two or more."""
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
    """Return the mean rate since the sample before, by interval [k]; NaN if half is unknown."""
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
    """Return whether finite values [k] are not constant."""
    mean = float(np.mean(np.abs(values))) if len(values) else 0.0
    return bool(mean > 0 and float(np.std(values)) > CONSTANT * mean)


def correlation(first: Floats, second: Floats) -> tuple[float | None, int]:
    """Return Pearson's r (None: too few, or constant) and the number of known intervals."""
    known = np.isfinite(first) & np.isfinite(second)
    count = int(known.sum())
    one, other = first[known], second[known]
    if count < LEAST_POINTS or not varies(one) or not varies(other):
        return None, count
    one, other = (one - one.mean()) / one.std(), (other - other.mean()) / other.std()
    return float(np.clip(np.mean(one * other), -1.0, 1.0)), count
