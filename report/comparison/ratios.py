"""How many times as much one set-up has as another, and how sure that is: Welch's test on logarithms.

Speeds and times scatter by a factor, not by an amount, so that the logarithm of a ratio is what is normal, and its interval becomes one of
factors. A comparison may be of several pairs of set-ups that are equal in all else: then it is of the geometric mean of their ratios.

Repeats do not show what other programs took of all of them. So an interval is wider, on either side, by what each side may have been the
better without that (`Sample.leeway`): no amount of contention below the limit turns a verdict round.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

__all__ = [
    "CONFIDENCE",
    "MOST_REPEATS_TOLD",
    "USUAL_SCATTER",
    "Ratio",
    "Sample",
    "better_by",
    "geometric_mean",
    "half_width_of_mean",
    "interval_of_arithmetic_mean",
    "interval_of_mean",
    "mean_difference",
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
class Sample:
    """One figure of the repeats of a set-up. `leeway`: the logarithm of the factor by which it may have been better without contention.

    `judged`: whether contention was measured in each of the repeats.
    """

    values: tuple[float, ...]
    leeway: float = 0.0
    judged: bool = True


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of geometric means, and its interval of 95 %; the interval is None where a set-up has one run alone.

    `pairs` are the ratios of the single pairs, in order. `judged`: whether it was measured in all runs what other programs took. `leeway`
    has the logarithms by which contention widens the interval at its low and at its high end.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: tuple[float, ...]
    judged: bool = True
    leeway: tuple[float, float] = (0.0, 0.0)

    @property
    def known(self) -> bool:
        """Whether there are repeats, so that the scatter is known, and what other programs took is known as well."""
        return self.low is not None and self.judged

    @property
    def sure(self) -> bool:
        """Whether the ratio is known to differ from 1 by more than the scatter, and than contention may have made."""
        return self.known and self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    @property
    def open_by_contention(self) -> bool:
        """Whether it differs from 1 by more than the scatter, and contention may have made the difference all the same."""
        if not self.known or self.sure or self.low is None or self.high is None:
            return False
        return self.low * _exp(self.leeway[0]) > 1.0 or self.high / _exp(self.leeway[1]) < 1.0

    @property
    def widened(self) -> bool:
        """Whether contention widens the interval by more than the usual scatter."""
        return self.low is not None and _exp(max(self.leeway)) >= 1.0 + USUAL_SCATTER

    @property
    def opposed(self) -> bool:
        """Whether some pairs point the other way."""
        return min(self.pairs) < 1.0 < max(self.pairs)

    def above(self, value: float) -> bool:
        """Return whether it is greater than `value` by more than the scatter; of single runs by more than the usual one."""
        return self.low > value if self.low is not None else self.ratio / _exp(self.leeway[0]) > value * (1.0 + USUAL_SCATTER)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "sure": self.sure if self.known else None, "pairs": self.pairs}


def better_by(pairs: Sequence[tuple[Sample, Sample]], better: int = 1) -> Ratio:
    """Return how many times as good the first of each pair is as the second; `better` is 1 where more of a figure is better, −1 where less.

    It is `ratio`, with an interval that is wider by what either side may have been the better without contention.
    """
    sides = [(one, other) if better > 0 else (other, one) for one, other in pairs]
    found = ratio([(one.values, other.values) for one, other in sides])
    judged = all(sample.judged for pair in pairs for sample in pair)
    more, less = (math.fsum(pair[place].leeway for pair in pairs) / len(pairs) for place in (0, 1))  # in which the first is better
    if found.low is None or found.high is None:
        return replace(found, judged=judged, leeway=(less, more))
    low, high = _exp(math.log(found.low) - less), _exp(math.log(found.high) + more)
    return replace(found, low=low, high=high, judged=judged, leeway=(less, more))


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


def half_width_of_mean(sigma: float, count: int) -> float:
    """Return half the width of the interval of 95 % of a mean (Student's t), from the sample standard deviation of `count` values."""
    return student_quantile(count - 1) * sigma / math.sqrt(count) if sigma else 0.0


def interval_of_arithmetic_mean(values: Values) -> tuple[float, float] | None:
    """Return the interval of 95 % of a mean (Student's t), of figures that may be 0 or less; None for one value alone."""
    if len(values) < 2:
        return None
    mean, half = _mean_of(values), _half_width([(_variance_of(values), len(values))])
    return mean - half, mean + half


def mean_difference(ours: Values, theirs: Values, tests: int = 1) -> tuple[float, float | None]:
    """Return the difference of two means and half the width of its interval (Welch); None where a side has one value alone.

    The interval is one of 95 % where it is the only one of `tests`, and as much wider as all together have that confidence (Bonferroni).
    """
    means = [_mean_of(values) for values in (ours, theirs)]
    if min(len(ours), len(theirs)) < 2:
        return means[0] - means[1], None
    return means[0] - means[1], _half_width([(_variance_of(values), len(values)) for values in (ours, theirs)], tests)


def _variance_of(values: Values) -> float:
    """Return the variance of the mean of some values, at least two."""
    mean = _mean_of(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


def _mean_of(values: Values) -> float:
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)  # a sum of equal values may be rounded


def repeats_that_would_tell(pairs: Sequence[tuple[Values, Values]]) -> int | None:
    """Return how many repeats of each set-up would make a ratio sure, by Welch's test, were ratio and scatter those that were found.

    Of a ratio that is not sure that is more than the fewest that there are.

    None where that is more than `MOST_REPEATS_TOLD`, or where the scatter is not known.
    """
    found = ratio(pairs)
    if not found.known:
        return None
    variances = [_variance(values) / len(pairs) ** 2 for pair in pairs for values in pair]
    already = 1 if found.sure else min(len(values) for pair in pairs for values in pair)  # so many did not make it sure
    for repeats in range(already + 1, MOST_REPEATS_TOLD + 1):
        if _half_width([(variance / repeats, repeats) for variance in variances]) < abs(math.log(found.ratio)):
            return repeats
    return None


def _mean(values: Values) -> float:
    return math.fsum(map(math.log, values)) / len(values)


def _variance(values: Values) -> float:
    mean = _mean(values)
    return math.fsum((math.log(value) - mean) ** 2 for value in values) / (len(values) - 1)


def _half_width(terms: Sequence[tuple[float, int]], tests: int = 1) -> float:
    """Return t √v of terms (variance of a mean, over how many values), for one of so many tests."""
    variance = math.fsum(term for term, _ in terms)
    if not variance:
        return 0.0
    degrees = 1.0 / math.fsum((term / variance) ** 2 / (count - 1) for term, count in terms)
    return student_quantile(degrees, tests) * math.sqrt(variance)


@cache
def student_quantile(degrees_of_freedom: float, tests: int = 1) -> float:
    """Return the quantile of Student's distribution that bounds the middle 95 %, of one of so many `tests` that share the rest."""
    from scipy.stats import t  # takes a second to import

    return float(t.ppf(1.0 - (1.0 - CONFIDENCE) / tests / 2.0, degrees_of_freedom))
