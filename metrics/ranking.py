"""The best of a metric's values as they come: how many there are since the best, and whether one is among the best few."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable

from .base import MetricInfo

__all__ = ["BestFew", "Improvements"]


class Improvements:
    """Counts a metric's evaluations since the best one. `best` and `best_step` are None before the first that is a number."""

    def __init__(self, info: MetricInfo, earlier: Iterable[tuple[int, float]] = ()) -> None:
        """`earlier`: the updates that evaluations came after, and the metric's value in each."""
        self.info = info
        self.best: float | None = None
        self.best_step: int | None = None
        self.since = 0
        for step, value in earlier:
            self.add(step, value)

    def add(self, step: int, value: float) -> None:
        """Take an evaluation after `step` updates; an equal value, or a NaN, is no better one."""
        if self.info.improves(value, self.best):
            self.best, self.best_step, self.since = value, step, 0
        else:
            self.since += 1


class BestFew:
    """Knows the `count` best of a metric's values. Of equal ones the earlier is the better."""

    def __init__(self, info: MetricInfo, count: int, earlier: Iterable[float] = ()) -> None:
        self._sign = -1.0 if info.better == "higher" else 1.0
        self._count = count
        self._ranked: list[float] = []  # best first
        for value in earlier:
            self.add(value)

    def add(self, value: float) -> bool:
        """Take a value; return whether it is one of the best by now. A NaN never is."""
        ranked = self._sign * value
        if math.isnan(ranked) or bisect_right(self._ranked, ranked) >= self._count:
            return False
        insort(self._ranked, ranked)
        del self._ranked[self._count :]
        return True
