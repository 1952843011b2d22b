"""How are the figures of many nodes shown to a person? A few have a line each; of more it is the lowest, the median and the highest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

__all__ = ["MOST_NODES_SHOWN", "STATISTICS", "ends_of", "lines_of", "statistic"]

MOST_NODES_SHOWN = 16
"""As many lines as a person reads; tables and charts of more nodes summarise them."""

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {"lowest": min, "median": statistics.median_low, "highest": max}
"""What is shown of the figures of many nodes, each figure by itself: the median is that of a node that there is."""

T = TypeVar("T")


def lines_of(nodes: int) -> list[int | str]:
    """Return what so many nodes have a line each for: their numbers, or the names of `STATISTICS`."""
    return [*range(nodes)] if nodes <= MOST_NODES_SHOWN else [*STATISTICS]


def statistic(name: str, values: Collection[float | None]) -> float | None:
    """Return one of `STATISTICS` over the values that there are; None where there is none."""
    known = [value for value in values if value is not None]
    return STATISTICS[name](known) if known else None


def ends_of(items: Sequence[T], figure: Callable[[T], float | None]) -> tuple[list[T], bool]:
    """Return all items of nodes, or of many those with the lowest and those with the highest figures, and whether some were left out.

    They stay in their order. Those of which the figure is not known are left out first.
    """
    if len(items) <= MOST_NODES_SHOWN:
        return [*items], False
    known = sorted((value, number) for number, item in enumerate(items) if (value := figure(item)) is not None)
    half = MOST_NODES_SHOWN // 2
    picked = {number for _, number in (*known[:half], *known[-half:])} or {*range(MOST_NODES_SHOWN)}
    return [items[number] for number in sorted(picked)], True
