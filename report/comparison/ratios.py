"""How many times as much one set-up has as another, and how sure that is: Welch's test on logarithms.

Speeds and times scatter by a factor, not by an amount, so that the logarithm of a ratio is what is normal, and its interval becomes one of
factors. A comparison may be of several pairs of set-ups that are equal in all else: then it is of the geometric mean of their ratios.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CONFIDENCE",
    "MOST_REPEATS_TOLD",
    "USUAL_SCATTER",
    "Ratio",
    "geometric_mean",
    "interval_of_mean",
    "ratio",
    "repeats_that_would_tell",
    "student_quantile",
]

CONFIDENCE = 0.95

USUAL_SCATTER = 0.05
"""By about so much the speed of one and the same job differs from run to run on a machine that does nothing else."""

MOST_REPEATS_TOLD = 30
"""Of more nobody would wait for the end."""

Values = Sequence[float]
"""One figure of the repeats of a set-up: finite, greater than 0, at least one."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of geometric means, and its interval of 95 %; the interval is None where a set-up has one run alone.

    `pairs` are the ratios of the single pairs, in order.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: tuple[float, ...]

    @property
    def known(self) -> bool:
        """Whether there are repeats, so that the scatter is known."""
        return self.low is not None

    @property
    def sure(self) -> bool:
        """Whether the ratio differs from 1 by more than the scatter."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    @property
    def opposed(self) -> bool:
        """Whether some pairs point the other way."""
        return min(self.pairs) < 1.0 < max(self.pairs)

    def above(self, value: float) -> bool:
        """Return whether it is greater than `value` by more than the scatter; of single runs by more than the usual one."""
        return self.low > value if self.low is not None else self.ratio > value * (1.0 + USUAL_SCATTER)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "sure": self.sure if self.known else None, "pairs": self.pairs}


def ratio(pairs: Sequence[tuple[Values, Values]]) -> Ratio:
    """Return how many times as large the first of each pair is as the second, over all pairs, at least one.

    With x̄ the mean of the logarithms of n repeats and s² their variance (n − 1): of m pairs d = Σ (x̄ − ȳ) / m, and v = Σ (s²/n) / m² over
    both sides of all pairs. The interval is exp(d ± t √v), with t the quantile of Student's distribution of the degrees of freedom of
    Welch and Satterthwaite, v² / Σ (((s²/n) / m²)² / (n − 1)) (B. L. Welch, Biometrika 34, 1947). Of one pair that is Welch's test.
    """
    differences = [_mean(one) - _mean(other) for one, other in pairs]
    middle = math.fsum(differences) / len(pairs)
    found = _exp(middle), tuple(map(_exp, differences))
    sides = [values for pair in pairs for values in pair]
    if any(len(values) < 2 for values in sides):
        return Ratio(found[0], None, None, found[1])
    half = _half_width([(_variance(values) / len(values) / len(pairs) ** 2, len(values)) for values in sides])
    return Ratio(found[0], _exp(middle - half), _exp(middle + half), found[1])


def geometric_mean(values: Values) -> float:
    """Return the geometric mean."""
    return _exp(_mean(values))


def interval_of_mean(values: Values) -> tuple[float, float] | None:
    """Return the interval of 95 % of a geometric mean (Student's t on logarithms); None for one value alone."""
    if len(values) < 2:
        return None
    middle, half = _mean(values), _half_width([(_variance(values) / len(values), len(values))])
    return _exp(middle - half), _exp(middle + half)


def _exp(logarithm: float) -> float:
    """Return the exponential, within the positive numbers that there are: figures that scatter over all of them have such an interval."""
    return math.exp(min(max(logarithm, _SMALLEST_LOGARITHM), _LARGEST_LOGARITHM))


_SMALLEST_LOGARITHM, _LARGEST_LOGARITHM = math.log(sys.float_info.min), math.log(sys.float_info.max) - 1e-9


def repeats_that_would_tell(pairs: Sequence[tuple[Values, Values]]) -> int | None:
    """Return how many repeats of each set-up would make a ratio sure, were ratio and scatter those that were found.

    None where that is more than `MOST_REPEATS_TOLD`, or where the scatter is not known.
    """
    found = ratio(pairs)
    if not found.known:
        return None
    variance = math.fsum(_variance(values) for pair in pairs for values in pair) / len(pairs) ** 2
    sides = 2 * len(pairs)
    for repeats in range(2, MOST_REPEATS_TOLD + 1):
        if student_quantile(sides * (repeats - 1)) * math.sqrt(variance / repeats) < abs(math.log(found.ratio)):
            return repeats
    return None


def _mean(values: Values) -> float:
    return math.fsum(map(math.log, values)) / len(values)


def _variance(values: Values) -> float:
    mean = _mean(values)
    return math.fsum((math.log(value) - mean) ** 2 for value in values) / (len(values) - 1)


def _half_width(terms: Sequence[tuple[float, int]]) -> float:
    """Return t √v of terms (variance of a mean, over how many values)."""
    variance = math.fsum(term for term, _ in terms)
    if not variance:
        return 0.0
    return student_quantile(variance**2 / math.fsum(term**2 / (count - 1) for term, count in terms)) * math.sqrt(variance)


def student_quantile(degrees_of_freedom: float) -> float:
    """Return the quantile of Student's distribution that bounds the middle 95 %."""
    from scipy.stats import t  # takes a second to import

    return float(t.ppf((1.0 + CONFIDENCE) / 2.0, degrees_of_freedom))
