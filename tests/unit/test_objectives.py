"""Metrics and objectives that make no sense are refused where they are made, and goals that are suggested can be reached."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.core.units import Target
from crosstrain.metrics import Metric
from crosstrain.models.objectives import Objective

BOUNDS = st.tuples(st.one_of(st.just(-math.inf), st.floats(-100, 0)), st.one_of(st.just(math.inf), st.floats(1, 100)))


def metric(better="higher", bounds=None):
    return Metric("score", "score", better, lambda sums: sums["examples"], bounds)


@pytest.mark.parametrize(
    ("better", "bounds", "words"), [("max", None, "'max'; allowed: higher, lower"), ("lower", (1.0, 0.0), "has to be the smaller")]
)
def test_a_metric_that_makes_no_sense(better, bounds, words):
    with pytest.raises(ValueError, match=words):
        metric(better, bounds)


@settings(deadline=None, derandomize=True, database=None)
@given(st.sampled_from(["higher", "lower"]), BOUNDS)
def test_a_suggested_goal_lies_within_the_bounds(better, bounds):
    objective = Objective("scoring", "cross_entropy", ("loss_sum", "examples"), (metric(better, bounds),))
    with pytest.raises(UsageError) as refused:
        objective.check(Target.parse("other>=1"), None)
    (goal,) = re.findall(r"score[<>]=[-\d.e+]*\d", str(refused.value))
    target = Target.parse(goal)
    assert math.isfinite(target.value)
    assert bounds[0] <= target.value <= bounds[1]


def test_labels_count_one_each():
    with pytest.raises(ValueError, match="each example counts 1"):
        Objective("scoring", "cross_entropy", ("loss_sum", "examples", "x_tokens"), (metric(),), weight="x_tokens")
