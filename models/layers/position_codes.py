"""The code of a position in a sequence: sines and cosines of it at falling frequencies."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["exponent_step", "frequencies", "position_codes"]

LONGEST_WAVE = 10_000.0
"""Positions times 2π of the longest wave."""


def exponent_step(width: int) -> float:
    """Return by how much the logarithms of two frequencies that follow each other differ."""
    return -math.log(LONGEST_WAVE) / max(1, width // 2 - 1)


def frequencies(width: int) -> NDArray[np.float64]:
    """Return the frequencies, float64 [width / 2]: from 1 down to 1/10000, evenly on a logarithmic scale."""
    found: NDArray[np.float64] = np.exp(np.arange(width // 2) * exponent_step(width))
    return found


def position_codes(count: int, width: int) -> NDArray[np.float32]:
    """Return the codes of the positions 0 … count − 1, float32 [count, width]: sines at all frequencies, then cosines."""
    angles = np.arange(count)[:, None] * frequencies(width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
