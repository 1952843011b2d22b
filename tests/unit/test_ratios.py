"""Ratios of configurations with intervals: against scipy's Welch test, and by simulation."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from imported_later import ImportedLater

from crosstrain.report.compare.ratios import MAX_LISTED_REPEATS, interval_of_mean, mean_difference, ratio, repeats_that_would_tell

stats = ImportedLater("scipy.stats")

FIGURES = st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=8).filter(lambda values: max(values) > (1 + 1e-6) * min(values))
"""Repeats with variance: for equal logarithms scipy computes NaN; see `test_equal_repeats_are_significant`."""


@given(FIGURES, FIGURES)
def test_ratio_of_one_pair_is_welch_s_test(first, second):
    result = ratio([(first, second)])
    logs = [np.log(values) for values in (first, second)]
    expected = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert math.log(result.low) == pytest.approx(expected.low, rel=1e-6, abs=1e-9)
    assert math.log(result.high) == pytest.approx(expected.high, rel=1e-6, abs=1e-9)
    assert result.ratio == pytest.approx(stats.gmean(first) / stats.gmean(second), rel=1e-9)
    back = ratio([(second, first)])
    assert (back.low, back.high) == pytest.approx((1 / result.high, 1 / result.low), rel=1e-9)
    assert result.sure is bool(stats.ttest_ind(*logs, equal_var=False).pvalue < 0.05)


@given(FIGURES, FIGURES)
def test_difference_of_means_is_welch_s(first, second):
    difference, half = mean_difference(first, second)
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (difference - half, difference + half) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-6 * max(*first, *second))
    assert mean_difference(first[:1], second) == (pytest.approx(first[0] - np.mean(second)), None)


@given(FIGURES)
def test_interval_of_a_mean_is_student_s(values):
    low, high = interval_of_mean(values)
    logs = np.log(values)
    expected = stats.t.interval(0.95, len(values) - 1, loc=logs.mean(), scale=stats.sem(logs))
    assert (math.log(low), math.log(high)) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(FIGURES, FIGURES), min_size=1, max_size=4))
def test_ratio_of_pairs_is_the_geometric_mean(pairs):
    result = ratio(pairs)
    assert result.ratio == pytest.approx(stats.gmean(result.pairs), rel=1e-9)
    assert result.opposed is (min(result.pairs) < 1 < max(result.pairs))
    assert result.low < result.ratio < result.high


def test_interval_has_its_coverage():
    """Three repeats, different variances; for 95 % chance gives 93.5 % to 96.5 % of 2,000."""
    draw, inside = np.random.default_rng(20261127), 0
    for _ in range(2000):
        pairs = [
            (np.exp(draw.normal(0.3 + shift, 0.05, 3)).tolist(), np.exp(draw.normal(shift, 0.1, 3)).tolist())
            for shift in draw.normal(0, 1, 2)
        ]
        result = ratio(pairs)
        inside += result.low <= math.exp(0.3) <= result.high
    assert 0.935 <= inside / 2000 <= 0.975  # Welch's degrees of freedom are conservative with few repeats


@pytest.mark.parametrize("alone", [([1.0], [2.0, 2.1]), ([1.0, 1.1], [2.0]), ([1.0], [2.0])])
def test_single_run_has_no_interval(alone):
    result = ratio([alone])
    assert (result.low, result.high, result.known, result.sure) == (None, None, False, False)
    assert repeats_that_would_tell([alone]) is None
    assert interval_of_mean([3.0]) is None


@given(FIGURES, st.floats(1.01, 2.0))
def test_suggested_repeats_reach_significance(values, factor):
    """With repeats of equal variance and ratio, it is significant at this number and not below."""
    scaled = [value * factor for value in values]
    needed = repeats_that_would_tell([(scaled, values)])
    deviation = math.sqrt(np.var(np.log(values), ddof=1))

    def tells(repeats):
        return stats.t.ppf(0.975, 2 * (repeats - 1)) * deviation * math.sqrt(2 / repeats) < math.log(factor)

    if needed is None:
        assert not tells(MAX_LISTED_REPEATS)
    else:
        assert tells(needed)
        assert needed == 2 or not tells(needed - 1)


SCATTERED = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8)


@given(st.lists(st.tuples(SCATTERED, SCATTERED), min_size=1, max_size=3))
@example([([1.5439, 1.5855, 1.4713, 1.1824, 1.6799], [1.25370, 1.25274, 1.25403, 1.25478, 1.25082, 1.25668, 1.25070])])
@example([([1000.0, 1160.0, 1300.0], [1000.0, 1001.0, 1002.0])])
def test_more_repeats_are_suggested_than_made(pairs):
    needed = repeats_that_would_tell(pairs)
    if needed is not None and not ratio(pairs).sure:
        assert needed > min(len(values) for pair in pairs for values in pair)


def test_equal_repeats_are_significant():
    assert ratio([([2.0, 2.0], [1.0, 1.0])]).sure
    assert not ratio([([1.0, 1.0], [1.0, 1.0])]).sure


def test_extreme_figures_have_a_finite_interval():
    """The largest and smallest doubles: no overflow, and no infinity, which JSON cannot hold."""
    result = ratio([((1e308, 5e-324), (1.0, 2.0))])
    assert 0 < result.low < result.high < math.inf
    low, high = interval_of_mean((1e308, 5e-324))
    assert 0 < low < high < math.inf
