"""Mean and standard deviation of a dataset's pixels, exact and therefore the same on every machine."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["PixelCounts", "channel_statistics"]

_CHUNK = 4096  # images counted at once: numpy counts in int64, eight times the size of the pixels


class PixelCounts:
    """How often each channel has each of the 256 values, counted block by block."""

    def __init__(self, channels: int) -> None:
        self._counts = np.zeros((channels, 256), dtype=np.int64)

    def add(self, images_nchw: NDArray[np.uint8]) -> None:
        """Count the pixels of some images."""
        for channel, counts in enumerate(self._counts):
            for start in range(0, len(images_nchw), _CHUNK):
                counts += np.bincount(images_nchw[start : start + _CHUNK, channel].ravel(), minlength=256)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (mean, std) as `channel_statistics` does. Raises ZeroDivisionError where nothing was counted."""
        means: list[float] = []
        deviations: list[float] = []
        for counts in self._counts:
            histogram = [int(count) for count in counts]
            number = sum(histogram)
            total = sum(value * count for value, count in enumerate(histogram))
            squares = sum(value * value * count for value, count in enumerate(histogram))
            means.append(total / (255 * number))
            deviations.append(math.sqrt((number * squares - total * total) / (255 * number) ** 2))
        return tuple(means), tuple(deviations)


def channel_statistics(images_nchw: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) of pixels scaled to 0…1, a number a channel; std is that of the whole set, √(E[x²] − E[x]²).

    Both are taken from a histogram in whole numbers and rounded once at the end, so that no order of summation can show.
    """
    counts = PixelCounts(images_nchw.shape[1])
    counts.add(images_nchw)
    return counts.statistics()
