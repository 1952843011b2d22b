"""The normalisation of pixels, (pixel / 255 − mean) / std in float64, rounded once to float32, in two forms that give the same bits.

As a table of what the 256 values of a pixel become, which is the definition; and as a line, pixel · factor + summand, which a processor
computes faster than it looks values up. The line is there where its rounded result cannot depend on how it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Line", "normal_line", "normal_table", "wrong_statistics"]

Line = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Factor and summand of each channel, float64 [channels]."""


def wrong_statistics(mean: Sequence[float], std: Sequence[float], channels: int) -> str | None:
    """Return why these cannot normalise the pixels of so many channels, or None: each pixel has to become a finite float32."""
    if not len(mean) == len(std) == channels:
        return f"mean and std: have {len(mean)} and {len(std)} numbers, and have to have {channels}, one a channel"
    most = float(np.finfo(np.float32).max)
    for m, s in zip(mean, std, strict=True):
        if not (s > 0 and max(abs(m), abs(1 - m)) <= most * s):
            return f"mean and std: pixels cannot be normalised by the mean {m} and the std {s}, which has to be greater than 0"
    return None


def normal_table(mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return what each value of a pixel becomes in each channel, float32 [channels, 256]."""
    pixels = np.arange(256, dtype=np.float64) / 255.0
    table: NDArray[np.float32] = ((pixels - np.array(mean)[:, None]) / np.array(std)[:, None]).astype(np.float32)
    return table


def normal_line(mean: Sequence[float], std: Sequence[float]) -> Line | None:
    """Return the line that gives the table's float32 values when it is computed in float64, None where there is none.

    That must hold whether product and sum are rounded one by one or once (a fused multiply-add), which compilers choose between: both
    lie within the rounding errors of product and sum, at most 2⁻⁵² of the larger of them, around what numpy computes.
    """
    factor_c, summand_c = 1.0 / (255.0 * np.array(std)), -np.array(mean) / np.array(std)
    products = np.arange(256.0) * factor_c[:, None]
    sums = products + summand_c[:, None]
    slack = 2.0**-52 * np.maximum(np.abs(products), np.abs(sums))
    table = normal_table(mean, std)
    exact = all(np.array_equal((sums + error).astype(np.float32), table) for error in (-slack, slack))
    return (factor_c, summand_c) if exact else None
