"""Curves of several repeats as one: their mean, and how far apart the lowest and the highest are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Floats

__all__ = ["Spread", "on_a_grid", "one_by_one"]

GRID_POINTS = 400

XY = tuple[Floats, Floats]


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of repeats over `x` [n], the lowest and the highest of them, as far as all of them go; NaN where one has no finite figure.

    A mean of those alone that go on longer would be of other runs than the mean before it. So `beyond` has by themselves the ends of
    curves that go on, from the end of the mean on.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    beyond: tuple[XY, ...]


def on_a_grid(curves: Sequence[XY], points: int = GRID_POINTS) -> Spread | None:
    """Return curves (x ascending, y; at least one of at least one point) together, each interpolated on one grid of `points`.

    The grid reaches from where all have begun to where the first ends. None where that is nowhere.
    """
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
    """Return curves of a few points each together: the first of each, the second of each and so on, at the mean of their x."""
    shortest = min(len(x) for x, _ in curves)
    places = np.stack([x[:shortest] for x, _ in curves])
    heights = np.stack([y[:shortest] for _, y in curves])
    beyond = [(x[shortest - 1 :], y[shortest - 1 :]) for x, y in curves if len(x) > shortest]
    return _spread(places.mean(axis=0), heights, beyond)


def _spread(x: Floats, heights: Floats, beyond: Sequence[XY]) -> Spread:
    """Return what rows of `heights` [curves, n] have in common over x [n]."""
    heights = np.where(np.isfinite(heights).all(axis=0), heights, np.nan)
    return Spread(x, heights.mean(axis=0), heights.min(axis=0), heights.max(axis=0), tuple(beyond))
