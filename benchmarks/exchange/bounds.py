"""Lower bound of an all-reduce from the network's latency α and bandwidth β."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Line:
    """The line α + S / β: `latency_seconds` is α, `bytes_per_second` is β.

    β is infinite if more bytes take no longer.
    """

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        """Return how long so many bytes take."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


def all_reduce_bound(ranks: int, size_bytes: float, network: Line) -> float:
    """Return the minimum seconds of an all-reduce of `size_bytes` over `ranks`.

    The ranks send at most at `network`'s β. Each rank needs a message of another: one α. And 2 (n − 1) / n times the bytes leave each rank
    (Patarasuk and Yuan 2009). No single algorithm reaches both bounds for more than two ranks: sending whole vectors has one message after
    another, reduce-scatter and all-gather at least two. Raises ValueError for fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"at least one rank, not {ranks}")
    return 0.0 if ranks == 1 else network.seconds(2 * (ranks - 1) / ranks * size_bytes)


def fit(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line through measured times, with minimum squares of relative errors.

    Neither α nor 1 / β is below 0. Errors are relative because times differ by many powers of ten. Raises ValueError for fewer than two
    sizes or times that are not positive.
    """
    size, taken = np.asarray(sizes_bytes, float), np.asarray(seconds, float)
    if len(np.unique(size)) < 2:
        raise ValueError("a line needs two sizes")
    if not np.all(taken > 0):
        raise ValueError("times have to be positive")
    scale = float(size.max())  # both columns of like size, for the solver's tolerance
    (latency, slope), _ = nnls(np.stack([1 / taken, size / scale / taken], axis=1), np.ones_like(taken))
    return Line(float(latency), scale / float(slope) if slope > 0 else float("inf"))


def sizes(least_bytes: int, most_bytes: int, factor: int) -> list[int]:
    """Return sizes from the least to the most, each `factor` times the one before."""
    result = [least_bytes]
    while result[-1] * factor <= most_bytes:
        result.append(result[-1] * factor)
    return result
