"""Curves of several repeats as one: their mean, and how far apart the lowest and the highest are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Floats

__all__ = ["Spread", "on_a_grid", "one_by_one"]

GRID_POINTS = 400


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of repeats over `x` [n], the lowest and the highest of them; NaN where none of them has a finite figure."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def on_a_grid(curves: Sequence[tuple[Floats, Floats]], points: int = GRID_POINTS) -> Spread:
    """Return curves (x ascending, y; at least one of at least one point) together, each interpolated on one grid of `points`.

    The grid reaches from the first x of all to the last; each curve counts from its own first to its own last, so that towards the end the
    mean is that of the repeats that still go on.
    """
    first, last = min(x[0] for x, _ in curves), max(x[-1] for x, _ in curves)
    grid = np.linspace(first, last, points)
    heights = np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in curves])
    return _spread(grid, heights)


def one_by_one(curves: Sequence[tuple[Floats, Floats]]) -> Spread:
    """Return curves of a few points each together: the first of each, the second of each and so on, at the mean of their x.

    A curve that is shorter than others is in the first points alone.
    """
    longest = max(len(x) for x, _ in curves)
    places, heights = (np.full((len(curves), longest), np.nan) for _ in range(2))
    for row, (x, y) in enumerate(curves):
        places[row, : len(x)], heights[row, : len(y)] = x, y
    return _spread(np.nanmean(places, axis=0), heights)


def _spread(x: Floats, heights: Floats) -> Spread:
    """Return what rows of `heights` [curves, n] have in common over x [n]."""
    known = np.isfinite(heights)
    count = known.sum(axis=0)
    nothing = np.full(len(x), np.nan)
    mean = np.divide(np.where(known, heights, 0.0).sum(axis=0), count, out=nothing.copy(), where=count > 0)
    low = np.where(count > 0, np.where(known, heights, np.inf).min(axis=0), nothing)
    high = np.where(count > 0, np.where(known, heights, -np.inf).max(axis=0), nothing)
    return Spread(x, mean, low, high)
