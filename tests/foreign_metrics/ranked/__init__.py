"""Logistic regression with two custom metrics: one to maximise, one to minimise."""

from crosstrain.metrics import Metric
from crosstrain.models.logreg import build as build_logreg
from crosstrain.models.objectives import Objective

TOP_FIVE = Metric("top5", "top-5 accuracy", "higher", lambda sums: sums["correct_in_5"] / sums["examples"], bounds=(0.0, 1.0))
MEAN_RANK = Metric("mean_rank", "mean rank", "lower", lambda sums: sums["rank"] / sums["examples"], bounds=(1.0, 10.0))


def build(data):
    spec = build_logreg(data)
    objective = Objective("ranking", "cross_entropy", ("loss_sum", "rank", "correct_in_5", "examples"), (TOP_FIVE, MEAN_RANK))
    return spec.__class__("ranked", spec.parameters, spec.input_shape, spec.classes, objective=objective)
