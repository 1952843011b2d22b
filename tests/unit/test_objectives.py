"""Invalid metrics and objectives are refused early, and suggested goals can be reached."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.units import Target
from crosstrain.metrics import Metric
from crosstrain.models.objectives import CLASSIFICATION, COUNTED, LOSS_SUM, Objective

BOUNDS = st.tuples(st.one_of(st.just(-math.inf), st.floats(-100, 0)), st.one_of(st.just(math.inf), st.floats(1, 100)))


def metric(better="higher", bounds=None):
    return Metric("score", "score", better, lambda sums: sums["examples"], bounds)


@pytest.mark.parametrize(
    ("better", "bounds", "words"), [("max", None, "'max'; allowed: higher, lower"), ("lower", (1.0, 0.0), "has to be the smaller")]
)
def test_invalid_metric_is_refused(better, bounds, words):
    with pytest.raises(ValueError, match=words):
        metric(better, bounds)


@settings(deadline=None, derandomize=True, database=None)
@given(st.sampled_from(["higher", "lower"]), BOUNDS)
def test_suggested_goal_lies_within_the_bounds(better, bounds):
    objective = Objective("scoring", "cross_entropy", ("loss_sum", "examples"), (metric(better, bounds),))
    with pytest.raises(UsageError) as refused:
        objective.check(Target.parse("other>=1"), None)
    (goal,) = re.findall(r"score[<>]=[-\d.e+]*\d", str(refused.value))
    target = Target.parse(goal)
    assert math.isfinite(target.value)
    assert bounds[0] <= target.value <= bounds[1]


@pytest.mark.parametrize("goal", ["acuracy>=0.9", "Accurcy>=0.9"])
def test_unknown_figure_of_goal_suggests_the_nearest(goal):
    with pytest.raises(UsageError, match=r"allowed: a figure of the evaluation: accuracy or loss, .* Did you mean 'accuracy>=0.9'\?"):
        CLASSIFICATION.check(Target.parse(goal), None)
    with pytest.raises(UsageError, match=r"such as accuracy>=0.9.$"):
        CLASSIFICATION.check(Target.parse("xyz>=0.9"), None)


def test_goal_without_equals_sign_is_shown_with_it():
    with pytest.raises(ValueError, match=r"such as acuracy>=0.9$"):
        Target.parse("acuracy > 0.9")
    with pytest.raises(ValueError, match=r"such as accuracy>=0.9 or loss<=0.3$"):
        Target.parse("acuracy = 0.9")


@pytest.mark.parametrize("loss_sum", [math.nan, math.inf])
def test_accuracy_is_none_for_a_non_finite_loss(loss_sum):
    """The argmax of NaN logits is 0, the label of a tenth of the examples."""
    sums = {"loss_sum": loss_sum, "correct": 1.0, "examples": 10.0}
    assert math.isnan(CLASSIFICATION.figures(sums)["accuracy"])
    assert CLASSIFICATION.wrong_with(sums) is None
    assert CLASSIFICATION.figures({**sums, "loss_sum": 3.0})["accuracy"] == 0.1


def test_labels_have_weight_1():
    with pytest.raises(ValueError, match="each example counts 1"):
        Objective("scoring", "cross_entropy", ("loss_sum", "examples", "x_tokens"), (metric(),), weight="x_tokens")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"loss_sum": 1, "examples": 1}, "example_sums returned no correct"),
        ({"loss_sum": 1, "examples": 1, "correct": 0}, "'correct' of example_sums has 0 dimensions"),
        ({"loss_sum": 1, "examples": 1, "correct": None}, "'correct' of example_sums is no tensor"),
    ],
)
def test_sums_of_examples_have_to_be_vectors(ranks, message):
    CLASSIFICATION.check_parts({"loss_sum": 1, "examples": 1, "correct": 1, "more": 7})
    with pytest.raises(UsageError, match=message):
        CLASSIFICATION.check_parts(ranks)


def test_too_many_sums_or_metrics_are_refused():
    sums = (LOSS_SUM, COUNTED, *(f"cell_{number}" for number in range(1100)))
    with pytest.raises(ValueError, match=r"at most 1,000 sums and 64 metrics; it has 1,102 and 0"):
        Objective("wide", "cross_entropy", sums, ())
    with pytest.raises(ValueError, match="a snake_case word of at most 64 characters"):
        Metric("m" * 65, "long", "lower", lambda sums: 0.0)


def test_keep_best_ignores_case():
    for typed in ("Accuracy", " ACCURACY ", "loss"):
        CLASSIFICATION.check(None, Job(keep_best=typed).keep_best)
    for typed in ("BLEU", "token accuracy", "1"):
        with pytest.raises(UsageError, match="allowed: a figure of the evaluation: accuracy or loss"):
            CLASSIFICATION.check(None, Job(keep_best=typed).keep_best)
    for typed in ("", "Größe", "a\nb", "a" * 65):
        with pytest.raises(ValidationError, match="a figure of the evaluation by its name"):
            Job(keep_best=typed)
