"""Ratios between configurations and their significance: Welch's test on logarithms.

Speeds and times scatter by a factor, so their logarithms are normal. `Sample.leeway` is for contention, which repeats do not show.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from ..runs.columns import COLUMNS, TIMED_FIGURES, evaluation_metrics, metrics_at_the_end, reach
from ..runs.cpu_starvation import cpu_starvation
from ..runs.run import number

CONFIDENCE = 0.95
USUAL_SCATTER = 0.05  # usual relative difference between runs of one job on an otherwise idle machine
MAX_LISTED_REPEATS = 30  # upper bound shown to users
Values = Sequence[float]  # a figure of each repeat of a configuration, at least one: finite, greater than 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A figure of each repeat of a configuration."""

    values: tuple[float, ...]
    leeway: float = 0.0  # logarithm of the possible slowdown by contention
    judged: bool = True  # whether contention was measured in all repeats


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of geometric means with its 95 % interval."""

    ratio: float
    low: float | None  # None if a configuration has one run
    high: float | None
    pairs: tuple[float, ...]  # the ratio of each pair, in order
    judged: bool = True  # whether contention was measured in all runs
    leeway: tuple[float, float] = (0.0, 0.0)  # logarithms by which contention widens the low and the high end

    @property
    def known(self) -> bool:
        """Whether there are repeats, and contention was measured."""
        return self.low is not None and self.judged

    @property
    def sure(self) -> bool:
        """Whether the ratio differs from 1 significantly, and by more than contention may explain."""
        return self.known and self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    @property
    def open_by_contention(self) -> bool:
        """Whether the ratio differs from 1 significantly, but contention may explain that."""
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

    def is_above(self, value: float) -> bool:
        """Return whether the ratio exceeds `value` significantly; single runs: by the usual scatter."""
        return self.low > value if self.low is not None else self.ratio / _exp(self.leeway[0]) > value * (1.0 + USUAL_SCATTER)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "sure": self.sure if self.known else None, "pairs": self.pairs}


def better_by(pairs: Sequence[tuple[Sample, Sample]], better: int = 1) -> Ratio:
    """Return how many times better the first of each pair is, widened for contention."""
    # `better` is 1 where more of a figure is better, −1 where less is.
    sides = [(first, second) if better > 0 else (second, first) for first, second in pairs]
    unwidened = ratio([(first.values, second.values) for first, second in sides])
    judged = all(sample.judged for pair in pairs for sample in pair)
    more, less = (math.fsum(pair[place].leeway for pair in pairs) / len(pairs) for place in (0, 1))  # of the first, of the second
    if unwidened.low is None or unwidened.high is None:
        return replace(unwidened, judged=judged, leeway=(less, more))
    low, high = _exp(math.log(unwidened.low) - less), _exp(math.log(unwidened.high) + more)
    return replace(unwidened, low=low, high=high, judged=judged, leeway=(less, more))


def ratio(pairs: Sequence[tuple[Values, Values]]) -> Ratio:
    """Return the ratio of the first of each pair to the second, over at least one pair.

    With x̄ the mean of the logarithms of n repeats and s² their variance (n − 1): of m pairs d = Σ (x̄ − ȳ) / m, and v = Σ (s²/n) / m² over
    both sides of all pairs. The interval is exp(d ± t √v), with t the quantile of Student's distribution of the degrees of freedom of Welch
    and Satterthwaite, v² / Σ (((s²/n) / m²)² / (n − 1)) (B. L. Welch, Biometrika 34, 1947). Of one pair that is Welch's test.
    """
    sides = [_logarithms(values) for pair in pairs for values in pair]
    differences = [_mean(first) - _mean(second) for first, second in zip(sides[::2], sides[1::2], strict=True)]
    middle = math.fsum(differences) / len(pairs)
    means = _exp(middle), tuple(map(_exp, differences))
    if any(len(values) < 2 for values in sides):
        return Ratio(means[0], None, None, means[1])
    half = _half_width([(_variance(values) / len(values) / len(pairs) ** 2, len(values)) for values in sides])
    return Ratio(means[0], _exp(middle - half), _exp(middle + half), means[1])


def geometric_mean(values: Values) -> float:
    """Return the geometric mean."""
    return _exp(_mean(_logarithms(values)))


def interval_of_mean(values: Values) -> tuple[float, float] | None:
    """Return the 95 % interval of a geometric mean (Student's t on logarithms), if known."""
    interval = interval_of_arithmetic_mean(_logarithms(values))
    return None if interval is None else (_exp(interval[0]), _exp(interval[1]))


def _logarithms(values: Values) -> Values:
    return [math.log(value) for value in values]


def _exp(logarithm: float) -> float:
    return math.exp(min(max(logarithm, _MIN_LOGARITHM), _MAX_LOGARITHM))


_MIN_LOGARITHM, _MAX_LOGARITHM = math.log(sys.float_info.min), math.log(sys.float_info.max) - 1e-9


def interval_of_arithmetic_mean(values: Values) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean (Student's t); None for one value."""
    if len(values) < 2:
        return None
    mean, half = _mean(values), _half_width([(_variance(values) / len(values), len(values))])
    return mean - half, mean + half


def mean_difference(ours: Values, theirs: Values, tests: int = 1) -> tuple[float, float | None]:
    """Return the difference of two means and half its 95 % interval (Welch), if known."""
    # All `tests` share the error of 5 % (Bonferroni).
    difference = _mean(ours) - _mean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return difference, None
    return difference, _half_width([(_variance(values) / len(values), len(values)) for values in (ours, theirs)], tests)


def _mean(values: Values) -> float:
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)  # a sum of equal values may be rounded


def repeats_that_would_tell(pairs: Sequence[tuple[Values, Values]]) -> int | None:
    """Return the repeats, up to `MAX_LISTED_REPEATS`, for a significant ratio with this scatter."""
    observed = ratio(pairs)
    if not observed.known:
        return None
    variances = [_variance(_logarithms(values)) / len(pairs) ** 2 for pair in pairs for values in pair]
    already = 1 if observed.sure else min(len(values) for pair in pairs for values in pair)  # were not enough
    for repeats in range(already + 1, MAX_LISTED_REPEATS + 1):
        if _half_width([(variance / repeats, repeats) for variance in variances]) < abs(math.log(observed.ratio)):
            return repeats
    return None


def _variance(values: Values) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _half_width(terms: Sequence[tuple[float, int]], tests: int = 1) -> float:
    """Return t √v of terms (variance of a mean, number of values)."""
    variance = math.fsum(term for term, _ in terms)
    if not variance:
        return 0.0
    degrees = 1.0 / math.fsum((term / variance) ** 2 / (count - 1) for term, count in terms)
    return student_quantile(degrees, tests) * math.sqrt(variance)


@cache
def student_quantile(degrees_of_freedom: float, tests: int = 1) -> float:
    """Return Student's quantile of the middle 95 %, for one of `tests` that share the rest."""
    from scipy.stats import t  # takes a second to import

    return float(t.ppf(1.0 - (1.0 - CONFIDENCE) / tests / 2.0, degrees_of_freedom))


TRIMMED_FROM = 5  # from so many runs on, the fastest and the slowest are excluded, as in MLPerf training
_AVERAGED = ("time_to_target_seconds", "eval_loss", "examples_per_second", "epochs", "train_seconds", "run_seconds", "init_seconds")
_PATHS = {column.key: column.path for column in COLUMNS}
FIGURES = {key.removeprefix("eval_"): _PATHS[key] for key in _AVERAGED}  # averaged figures, and their paths in a summary


def aggregate(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return statistics over the runs of one job (their summaries, at least one).

    ``runs`` is their number, ``converged`` how many reached the target (null without one), ``dropped`` names those excluded by
    `drop_fastest_and_slowest`, ``contended`` those with CPU contention. ``figures`` has an `Estimate` of each of `FIGURES` and each metric,
    also of final translations (``end_<metric>``); speeds and times are over runs without CPU contention, if any.
    """
    staying, dropped = drop_fastest_and_slowest(summaries)
    timed = [summary for summary in staying if cpu_starvation(summary) is None] or staying
    with_target = summaries[0]["target"] is not None
    evaluated = dict.fromkeys(name for summary in summaries for name in evaluation_metrics(summary.get("eval")))
    metrics = {name: ("eval", name) for name in evaluated if name not in FIGURES}
    at_the_end = dict.fromkeys(name for summary in summaries for name in metrics_at_the_end(summary))
    metrics |= {f"end_{name}": ("translated", name) for name in at_the_end}
    target, *further = FIGURES
    paths = {name: {**FIGURES, **metrics}[name] for name in (target, *metrics, *further)}
    return {
        "runs": len(summaries),
        "converged": sum(bool(summary["target_reached"]) for summary in summaries) if with_target else None,
        "dropped": [summary["run"] for summary in dropped],
        "contended": [summary["run"] for summary in summaries if cpu_starvation(summary) is not None],
        "figures": {
            name: _statistics([number(reach(summary, path)) for summary in (timed if name in TIMED_FIGURES else staying)])
            for name, path in paths.items()
        },
    }


def _statistics(values: Sequence[float | None]) -> dict[str, Any] | None:
    mean = estimate(values)
    return None if mean is None else asdict(mean)


def drop_fastest_and_slowest(summaries: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the runs whose figures count, fastest first, and those excluded."""
    # From `TRIMMED_FROM` runs on, the fastest and the slowest are excluded, by time to target or else the run clock. A run that missed the
    # target is the slowest; if several did, none is excluded. Runs with CPU contention come last and are neither, if there are others.
    with_target = summaries[0]["target"] is not None
    timed = [summary for summary in summaries if cpu_starvation(summary) is None] or summaries
    contended = [summary for summary in summaries if not any(summary is timed_summary for timed_summary in timed)]
    ordered = sorted(timed, key=lambda summary: _duration(summary, with_target))
    missed = sum(not summary["target_reached"] for summary in summaries) if with_target else 0
    if len(ordered) < TRIMMED_FROM or missed > 1:
        return [*ordered, *contended], []
    return [*ordered[1:-1], *contended], [ordered[0], ordered[-1]]


def _duration(summary: Mapping[str, Any], with_target: bool) -> float:
    seconds = summary["time_to_target_seconds"] if with_target else summary["run_seconds"]
    return math.inf if seconds is None else float(seconds)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of a figure's repeats, and their standard deviation.

    It is that of n − 1; None for one value or a non-finite one.
    """

    mean: float
    sigma: float | None
    values: int  # number of repeats with a value

    @property
    def half_width(self) -> float | None:
        """Half the 95 % interval of the mean, t s / √n with Student's t, if known."""
        if not self.sigma:
            return self.sigma
        return student_quantile(self.values - 1) * self.sigma / math.sqrt(self.values)

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate in another unit."""
        return Estimate(self.mean * factor, None if self.sigma is None else self.sigma * factor, self.values)


def estimate(figures: Sequence[float | None]) -> Estimate | None:
    """Return the mean of a figure's known repeats, if any."""
    values = [value for value in figures if value is not None]
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Estimate(sum(values), None, len(values))  # NaN or infinite
    return Estimate(_mean(values), math.sqrt(_variance(values)) if len(values) > 1 else None, len(values))


def common_name(names: Sequence[str]) -> str:
    """Return a name for runs of one job: the common start of their names, and their number."""
    return f"{common_stem(names) or names[0]} ×{len(names)}"


def common_stem(names: Sequence[str]) -> str:
    """Return the common start of names that differ by a short final number; else empty."""
    prefix = os.path.commonprefix(names)  # noqa: RUF071 — of names, which are no paths
    numbered = all(len(name) - len(prefix) <= _MAX_NUMBER for name in names)
    return re.sub(r"([-_,. ]+(seed|run|r)?)?[-_=,. ]*$", "", prefix) if numbered else ""


_MAX_NUMBER = 4  # of a seed
