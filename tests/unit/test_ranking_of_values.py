"""The best few of a metric's values, and the evaluations since the best."""

from __future__ import annotations

import math
import random

import pytest

from crosstrain.metrics import LOSS
from crosstrain.metrics.base import ACCURACY, BestFew, Improvements


@pytest.mark.parametrize("info", [ACCURACY.info, LOSS])
def test_best_values_are_those_of_the_whole_history(info):
    """Compared with sorting all values after each one, with ties and NaN."""
    draw = random.Random(3)
    for count in (1, 2, 5):
        best, seen = BestFew(info, count), []
        for _ in range(60):
            value = draw.choice([math.nan, *(draw.randint(0, 9) / 10 for _ in range(9))])
            seen.append(value)
            order = sorted((i for i, candidate in enumerate(seen) if not math.isnan(candidate)), key=lambda i: (seen[i] * sign(info), i))
            assert best.add(value) == (len(seen) - 1 in order[:count])


def sign(info):
    return -1 if info.better == "higher" else 1


def test_values_before_a_resume_count():
    best = BestFew(LOSS, 2, [0.5, 0.3, 0.4])
    assert [best.add(0.4), best.add(0.35), best.add(0.36)] == [False, True, False]


def test_evaluations_since_the_best_are_counted():
    improvements = Improvements(LOSS)
    assert (improvements.best, improvements.best_step, improvements.since) == (None, None, 0)
    for step, value in enumerate([math.nan, 0.5, 0.4, 0.4, 0.6, math.nan], 1):
        improvements.add(step, value)
    assert (improvements.best, improvements.best_step, improvements.since) == (0.4, 3, 3)
    improvements.add(7, 0.39)
    assert (improvements.best, improvements.best_step, improvements.since) == (0.39, 7, 0)
    assert Improvements(ACCURACY.info, [(1, 0.5), (2, 0.6), (3, 0.6)]).since == 1
