"""What rounding explains.

An error is measured in units of float32's rounding, 2⁻²⁴, of a result's magnitude (`models.layers.reference`): whatever the order of a
sum, rounding changes it by a few units. The limits are several times the largest errors of sound layers, measured with other seeds than
those of the tables in docs/divergence.md.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
UNIT = 2.0**-24
LIMIT = 16.0  # of an error over a whole tensor, in units
ELEMENT_LIMIT = 1024.0  # of a single element's, in units
SMALL, LARGE = 2.0, 2.0**10  # errors of results whose terms are not known one by one: always sound, and never
UPDATE_LIMIT = 4.0  # of an update over a tensor, in its own tolerance
SCALE_LIMIT = 12.0  # of a common factor of all steps, in standard deviations
GROWTH_LIMIT = 64.0  # of differences of whole passes, by what moving the weights' last bits changes
FLIP_DRAWS, FLIP_UNITS, FLIP_LIMIT = 32, 8.0, 4.0  # where no layer differs: draws of so many units; by the largest of what they change
UNITS_OF_FORMAT = {"fp32": 1.0, "bf16": 2.0**16, "fp16": 2.0**13}  # by the precision of products


def error(value: Array, exact: Array, magnitude: Array) -> tuple[float, float]:
    """Return the error of a whole tensor, and of its worst element, in units.

    They are infinite for other shapes, and for infinities and NaN at other places.
    """
    exact = np.asarray(exact)
    if value.shape != exact.shape:
        return float("inf"), float("inf")
    sizes, finite = np.broadcast_to(np.asarray(magnitude, np.float64), exact.shape), np.isfinite(exact)
    if not finite.all():
        if not np.array_equal(value[~finite], exact[~finite], equal_nan=True):
            return float("inf"), float("inf")
        value, exact, sizes = value[finite], exact[finite], sizes[finite]
    difference = np.abs(value.astype(np.float64) - exact)
    if not difference.any():
        return 0.0, 0.0
    sizes = np.abs(sizes)
    typical = float(np.linalg.norm(sizes)) / math.sqrt(sizes.size)
    if not typical or not np.isfinite(difference).all():
        return float("inf"), float("inf")
    whole = float(np.linalg.norm(difference)) / math.sqrt(difference.size) / typical
    return whole / UNIT, float((difference / (sizes + 1e-3 * typical)).max()) / UNIT


def unexplained(whole: float, worst: float, precision: str = "fp32") -> bool:
    """Return whether rounding in a number format does not explain an error in units."""
    unit = UNITS_OF_FORMAT[precision]
    return whole > LIMIT * unit or worst > ELEMENT_LIMIT * unit


def unexplained_beside(whole: float, sound: float, precision: str = "fp32") -> bool:
    """Return whether rounding does not explain an error of a result whose terms are not known.

    `sound`: the error of the other side. Long sums cost a framework more units than one that sums in pairs.
    """
    unit = UNITS_OF_FORMAT[precision]
    return whole > LIMIT * max(min(sound, whole), SMALL * unit) or whole > LARGE * unit


def relative(first: Array, second: Array) -> float:
    """Return ‖first − second‖ / ‖second‖, 0 for equal arrays."""
    difference = float(np.linalg.norm(first.astype(np.float64).ravel() - second.astype(np.float64).ravel()))
    return difference / max(float(np.linalg.norm(second.astype(np.float64).ravel())), 1e-300) if difference else 0.0
