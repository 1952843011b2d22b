"""Many nodes as one curve: how the median and the percentiles of a figure went over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Floats, NodeSeries

__all__ = ["BAND_PERCENTILES", "Bands", "bands"]

BAND_PERCENTILES = (10, 90)
"""Four of five nodes lie between these."""


@dataclass(frozen=True, slots=True)
class Bands:
    """A figure of all nodes at times of the run clock [n]; NaN where no node has it."""

    time_seconds: Floats
    low: Floats
    median: Floats
    high: Floats


def bands(nodes: Sequence[NodeSeries], figure: Callable[[NodeSeries], Floats], first: float, last: float, points: int) -> Bands:
    """Return what the nodes had of a figure at `points` times from `first` to `last`.

    A sample tells of the time since its node's sample before; a node counts from its first sample to its last.
    """
    times = np.linspace(first, last, points)
    table = np.full((len(nodes), points), np.nan)
    for row, node in enumerate(nodes):
        following = np.searchsorted(node.time_seconds, times)
        known = (following < len(node.time_seconds)) & (times >= node.time_seconds[0])
        table[row, known] = figure(node)[following[known]]
    there = np.isfinite(table).any(axis=0)
    found = np.full((3, points), np.nan)
    if there.any():
        found[:, there] = np.nanpercentile(table[:, there], [BAND_PERCENTILES[0], 50, BAND_PERCENTILES[1]], axis=0)
    return Bands(times, *found)
