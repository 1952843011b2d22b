"""Downsamples and smooths curves: fewer points that look the same in a chart."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Integers

__all__ = ["POINTS", "running_median", "smoothed", "smoothing_weight", "thinned"]

POINTS = 2000
"""Points of a curve in a picture: about one for each dot of a wide screen."""

_WINDOW_SHARE = 0.01
_LEAST_WINDOW = 10


def thinned(values: Floats | NDArray[np.float32], points: int = POINTS) -> Integers:
    """Return which entries of `values` [n] to draw: at most about `points`, in order, and all where there are no more.

    The values are cut into equal buckets, of which each keeps its lowest and its highest, so that no peak is lost, and one entry that is
    not finite, so that a gap stays a gap. The first and the last entry are always among them.
    """
    n = len(values)
    if n <= points:
        return np.arange(n)
    size = math.ceil(2 * n / points)
    buckets = math.ceil(n / size)
    padded = np.full(buckets * size, np.nan)
    padded[:n] = values
    table = padded.reshape(buckets, size)
    finite = np.isfinite(table)
    starts = np.arange(buckets) * size
    lowest = starts + np.argmin(np.where(finite, table, np.inf), axis=1)
    highest = starts + np.argmax(np.where(finite, table, -np.inf), axis=1)
    missing = ~finite
    missing.reshape(-1)[n:] = False
    gaps = (starts + np.argmax(missing, axis=1))[missing.any(axis=1)]
    return np.unique(np.concatenate([lowest, highest, gaps, [0, n - 1]]))


def running_median(values: Floats, width: int) -> Floats:
    """Return the median of the `width` (odd) values about each of `values` [n], at the ends of the first and the last ones.

    What is not finite counts nowhere, and is NaN in the result too.
    """
    n, known = len(values), np.isfinite(values)
    found = np.full(n, np.nan)
    if known.any():
        width = min(width, n)
        windows = np.lib.stride_tricks.sliding_window_view(np.where(known, values, np.nan), width)
        found[known] = np.nanmedian(windows[np.clip(np.arange(n) - width // 2, 0, n - width)[known]], axis=1)
    return found


def smoothing_weight(n: int) -> float:
    """Return the weight that averages over about a hundredth of `n` values, and over 10 at least."""
    return 1 - 1 / max(_LEAST_WINDOW, n * _WINDOW_SHARE)


def smoothed(values: Floats | NDArray[np.float32], weight: float) -> Floats:
    """Return the exponential moving average of `values` [n], without the bias towards its start.

    `weight` (0 to below 1) is the share that the past keeps: entry i is Σ weight^(i−j)·v_j over Σ weight^(i−j), for j up to i. A value
    that is not finite counts nowhere, and is NaN in the result too.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"weight: got {weight!r}; allowed: from 0 to below 1")
    known = np.isfinite(values)
    finite = np.asarray(values, np.float64)[known]
    averaged = np.full(len(values), np.nan)
    if len(finite):
        from scipy.signal import lfilter  # as late as this, since it takes seconds to import

        past = lfilter([1 - weight], [1, -weight], finite)
        averaged[known] = past / -np.expm1(np.log(weight) * np.arange(1, len(finite) + 1)) if weight else past
    return averaged
