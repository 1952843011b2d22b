"""Mean value analysis: how long customers of two classes go round a closed network of stations that they share.

The algorithm is exact for stations that serve all present at once, each a share of the time, whatever the distribution of the service
times (Reiser and Lavenberg 1980; Baskett, Chandy, Muntz and Palacios 1975). Links under TCP and processors under a fair scheduler are
such stations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rounds", "rounds"]

Pair = tuple[float, float]


class Rounds(NamedTuple):
    """How a customer of each class goes round: `residence_seconds` [stations, 2] at each station, waits included, and in all `seconds` [2].

    A class without customers has the times that a single one of it would see.
    """

    residence_seconds: NDArray[np.float64]
    seconds: NDArray[np.float64]


def rounds(customers: tuple[int, int], think_seconds: Pair, demand_seconds: Sequence[Pair]) -> Rounds:
    """Return the rounds of `customers` of two classes (each at least 0).

    A round takes `think_seconds` of a customer's own, and at each station `demand_seconds` of service, which others there make longer. A
    class whose round takes no time at all raises ValueError.
    """
    demands, thinks = np.array(demand_seconds, dtype=np.float64).reshape(-1, 2), np.array(think_seconds, dtype=np.float64)
    if np.any(demands.sum(axis=0) + thinks <= 0):
        raise ValueError("a round has to take some time")
    first, second = customers
    before: list[NDArray[np.float64]] = []
    for one in range(first + 1):
        row: list[NDArray[np.float64]] = []
        for two in range(second + 1):
            queue = np.zeros(len(demands))
            if one:
                queue += _present(demands[:, 0], thinks[0], before[two], one)
            if two:
                queue += _present(demands[:, 1], thinks[1], row[two - 1], two)
            row.append(queue)
        last, before = before, row
    met = [last[second] if first else before[second], before[second - 1] if second else before[second]]
    residence = np.stack([demands[:, kind] * (1 + met[kind]) for kind in (0, 1)], axis=1)
    return Rounds(residence, residence.sum(axis=0) + thinks)


def _present(demands: NDArray[np.float64], think: float, met: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return how many of a class's `count` customers are at each station, where one that arrives meets `met` others."""
    residence = demands * (1 + met)
    present: NDArray[np.float64] = count * residence / (think + residence.sum())
    return present
