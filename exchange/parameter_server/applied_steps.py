"""Which updates a shard has applied: an update has one number, its step, and is applied once, however often it is pushed.

A worker may die between its pushes to two shards. Its update is computed again by another, and the shard that has it already passes over
it.
"""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["AppliedSteps"]


class AppliedSteps:
    """A set of steps, kept as intervals [start, stop). Tickets are consecutive steps, so there are no more than tickets handed out."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __contains__(self, step: int) -> bool:
        place = bisect_right(self._starts, step)
        return place > 0 and step < self._stops[place - 1]

    def __len__(self) -> int:
        """The number of intervals, which is what they take to keep."""
        return len(self._starts)

    def add(self, step: int) -> bool:
        """Add a step; return whether it was not there."""
        starts, stops = self._starts, self._stops
        place = bisect_right(starts, step)
        if place and step < stops[place - 1]:
            return False
        follows = place > 0 and stops[place - 1] == step
        precedes = place < len(starts) and starts[place] == step + 1
        if follows and precedes:
            stops[place - 1] = stops[place]
            del starts[place], stops[place]
        elif follows:
            stops[place - 1] = step + 1
        elif precedes:
            starts[place] = step
        else:
            starts.insert(place, step)
            stops.insert(place, step + 1)
        return True

    def clear(self) -> None:
        """Forget every step: another state takes the place of the one that they led to."""
        self._starts.clear()
        self._stops.clear()
