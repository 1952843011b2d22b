"""A figure over the repeats of a set-up: its mean and the interval of 95 % around it, and how they are written with fixed decimals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..comparison.ratios import half_width_of_mean
from ..comparison.seed_statistics import spread

__all__ = ["Estimate", "decimals", "estimate", "number_latex"]

_SIGNIFICANT = 3
_MOST_DECIMALS = 6
_HUGE = 1e7
"""From here on a figure is written with a power of ten, such as the loss of a run that diverged."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of a figure over some `repeats`, and half the width of its interval of 95 %: None for one, or where one is not finite."""

    mean: float
    half_width: float | None
    repeats: int

    def scaled(self, factor: float) -> Estimate:
        """Return the same in another unit."""
        return Estimate(self.mean * factor, None if self.half_width is None else self.half_width * factor, self.repeats)


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Return the estimate from a figure of each repeat; None where no repeat has it.

    The half-width is t s / √n, with s the sample standard deviation (n − 1) and t the 0.975-quantile of Student's distribution with n − 1
    degrees of freedom.
    """
    found = spread(values)
    if found is None:
        return None
    count, sigma = found["values"], found["sigma"]
    return Estimate(found["mean"], None if sigma is None else half_width_of_mean(sigma, count), count)


def decimals(values: Iterable[float]) -> int:
    """Return how many decimals show three digits of the smallest of some figures, but for 0."""
    known = [abs(value) for value in values if value and math.isfinite(value)]
    if not known:
        return 0
    return min(max(0, _SIGNIFICANT - 1 - math.floor(math.log10(min(known)))), _MOST_DECIMALS)


def number_latex(value: float, digits: int) -> str:
    """Return a figure with so many decimals as LaTeX; with a power of ten where it is huge, or would be none of its digits."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else rf"${'-' if value < 0 else ''}\infty$"
    if abs(value) >= _HUGE or (value and abs(value) < 0.5 * 10.0**-digits):
        mantissa, _, power = f"{value:.2e}".partition("e")
        return rf"${mantissa}\times10^{{{int(power)}}}$"
    text = f"{value:,.{digits}f}"
    return f"$-${text[1:]}" if text.startswith("-") else text
