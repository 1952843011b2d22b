"""Many nodes as one curve: how the median and the percentiles of a figure went over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Floats, NodeSeries

__all__ = ["BAND_PERCENTILES", "ENDS", "UNEVEN_NOTE", "Bands", "bands", "differ"]

BAND_PERCENTILES = (10, 90)
"""Four of five nodes lie between these."""

ENDS = (0, 100)
"""The percentiles of the lowest and the highest node."""

UNEVEN = 4.0
"""Nodes that differ by such a factor or more have no figure in common: one of them may be a parameter server, or stand still."""

UNEVEN_NOTE = f"nodes differ by a factor of {UNEVEN:g} or more"


def differ(figures: Sequence[float]) -> bool:
    """Return whether figures of nodes differ by the factor `UNEVEN` or more."""
    known = [figure for figure in figures if np.isfinite(figure)]
    return len(known) > 1 and max(known) > 0 and max(known) >= UNEVEN * min(known)


@dataclass(frozen=True, slots=True)
class Bands:
    """A figure of all nodes at times of the run clock [n]; NaN where no node has it. `percentiles` are those of `low` and `high`."""

    time_seconds: Floats
    low: Floats
    median: Floats
    high: Floats
    percentiles: tuple[int, int] = BAND_PERCENTILES


def bands(nodes: Sequence[NodeSeries], figure: Callable[[NodeSeries], Floats], first: float, last: float, points: int) -> Bands:
    """Return what the nodes had of a figure at `points` times from `first` to `last`, the lowest and the highest where their means differ.

    A sample tells of the time since its node's sample before; a node counts from its first sample to its last.
    """
    times = np.linspace(first, last, points)
    table = np.full((len(nodes), points), np.nan)
    for row, node in enumerate(nodes):
        following = np.searchsorted(node.time_seconds, times)
        known = (following < len(node.time_seconds)) & (times >= node.time_seconds[0])
        table[row, known] = figure(node)[following[known]]
    there = np.isfinite(table).any(axis=0)
    found, ends = np.full((3, points), np.nan), BAND_PERCENTILES
    if there.any():
        means = [float(np.mean(own[np.isfinite(own)])) for own in table if np.isfinite(own).any()]
        ends = ENDS if differ(means) else BAND_PERCENTILES
        found[:, there] = np.nanpercentile(table[:, there], [ends[0], 50, ends[1]], axis=0)
    return Bands(times, found[0], found[1], found[2], ends)
