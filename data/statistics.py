"""Mean and standard deviation of a dataset's pixels, exact and therefore the same on every machine."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["channel_statistics"]

_CHUNK = 4096  # images counted at once: numpy counts in int64, eight times the size of the pixels


def channel_statistics(images_nchw: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) of pixels scaled to 0…1, a number a channel; std is that of the whole set, √(E[x²] − E[x]²).

    Both are taken from a histogram in whole numbers and rounded once at the end, so that no order of summation can show.
    """
    means: list[float] = []
    deviations: list[float] = []
    for channel in range(images_nchw.shape[1]):
        counts = np.zeros(256, dtype=np.int64)
        for start in range(0, len(images_nchw), _CHUNK):
            counts += np.bincount(images_nchw[start : start + _CHUNK, channel].ravel(), minlength=256)
        histogram = [int(count) for count in counts]
        number = sum(histogram)
        total = sum(value * count for value, count in enumerate(histogram))
        squares = sum(value * value * count for value, count in enumerate(histogram))
        means.append(total / (255 * number))
        deviations.append(math.sqrt((number * squares - total * total) / (255 * number) ** 2))
    return tuple(means), tuple(deviations)
