"""Losses and metrics by name: formulas, gradients, shards, and scikit-learn's metrics."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import cases, gradient, losses
from sklearn import metrics as reference

from crosstrain.core.errors import UsageError
from crosstrain.data.base import DataInfo, ImageFeatures, TableFeatures
from crosstrain.data.columns import ColumnSpec
from crosstrain.metrics.counts import BINS
from crosstrain.models.build import build_model
from crosstrain.models.losses import (
    BINARY,
    MULTI_LABEL,
    SCORE_SCALE,
    canonical_loss,
    objective_of,
    objective_of_loss,
    outputs_per_example,
    resolved_loss,
)

FRAMEWORKS = ("torch", "tf")
SUMS_OF_REALS = ("loss_sum", "class_weights", "squared_error", "absolute_error")
CASES = cases()


@pytest.fixture(scope="module", params=FRAMEWORKS)
def computed(request, tmp_path_factory):
    """Losses, gradients and sums of every case: of the whole, then of its shards."""
    file = tmp_path_factory.mktemp("losses") / "computed.npz"
    subprocess.run([sys.executable, Path(__file__).with_name("loss_passes.py"), request.param, file], check=True)
    return np.load(file)


def test_losses_equal_formulas(computed):
    for number, case in enumerate(CASES):
        np.testing.assert_allclose(computed[f"losses {number}"], losses(case.loss, case.outputs, case.target), rtol=2e-6, atol=2e-6)


def test_gradients_equal_formulas(computed):
    for number, case in enumerate(CASES):
        np.testing.assert_allclose(computed[f"gradient {number}"], gradient(case.loss, case.outputs, case.target), rtol=1e-5, atol=2e-6)


def test_sums_of_shards_equal_sums_of_whole(computed):
    for number, case in enumerate(CASES):
        whole, *shards = computed[f"sums {number}"]
        np.testing.assert_allclose(np.sum(shards, axis=0), whole, rtol=1e-12)
        counts = [name not in SUMS_OF_REALS and not name.startswith(("residual", "target")) for name in objective_of_loss(case.loss).sums]
        assert np.array_equal(np.sum(shards, axis=0)[counts], whole[counts])  # exactly
        assert not shards[-1].any()  # an empty slice adds nothing
        assert objective_of_loss(case.loss).named(whole)["examples"] == len(case.target)


def figures_of(computed, number):
    objective = objective_of_loss(CASES[number].loss)
    return objective.figures(objective.named(computed[f"sums {number}"][0]))


def test_figures_equal_those_of_scikit_learn(computed):
    checked = set()
    for number, case in enumerate(CASES):
        if not case.loss.classes:
            continue
        figures = figures_of(computed, number)
        scores = case.outputs.astype(np.float64)
        predicted = (scores[:, 0] > 0).astype(int) if case.loss.name == BINARY else scores.argmax(1)
        assert figures["accuracy"] == reference.accuracy_score(case.target, predicted)
        assert figures["f1"] == pytest.approx(reference.f1_score(case.target, predicted, average="macro", zero_division=0), abs=1e-12)
        if case.loss.classes > 5:
            ranks = [(row > row[label]).sum() + (row[:label] == row[label]).sum() for row, label in zip(scores, case.target, strict=True)]
            assert figures["top5_accuracy"] == np.mean(np.array(ranks) < 5)
        if case.loss.classes == 2:
            margins = (case.outputs[:, 0] if case.loss.name == BINARY else case.outputs[:, 1] - case.outputs[:, 0]).astype(np.float64)
            assert abs(figures["auc"] - reference.roc_auc_score(case.target, margins)) <= bound(margins, case.target) + 1e-12
        checked |= figures.keys()
    assert checked == {"loss", "accuracy", "top5_accuracy", "f1", "auc"}


def test_figures_of_numbers_equal_those_of_scikit_learn(computed):
    numbers = [number for number, case in enumerate(CASES) if not case.loss.classes]
    for number in numbers:
        case, figures = CASES[number], figures_of(computed, number)
        if case.loss.name == MULTI_LABEL:
            predicted = case.outputs > 0
            assert figures["f1"] == pytest.approx(reference.f1_score(case.target, predicted, average="micro"), abs=1e-12)
            assert figures["label_accuracy"] == (predicted == case.target).mean()
            continue
        outputs, target = case.outputs.astype(np.float64), case.target.astype(np.float64).reshape(case.outputs.shape)
        assert figures["rmse"] == pytest.approx(np.sqrt(((outputs - target) ** 2).mean()), rel=1e-12)
        assert figures["mae"] == pytest.approx(reference.mean_absolute_error(target, outputs), rel=1e-12)
        assert figures["r2"] == pytest.approx(reference.r2_score(target, outputs), rel=1e-7)
    assert len(numbers) == 8


def bins(margins):
    return np.clip(((margins / (SCORE_SCALE + np.abs(margins)) + 1) * BINS / 2).astype(int), 0, BINS - 1)


def bound(margins, target):
    """Return half the share of pairs in a bin, or in its neighbour by float32's rounding."""
    low, high = (bins(np.nextafter(margins.astype(np.float32), direction).astype(np.float64)) for direction in (-np.inf, np.inf))
    near = [[low[p] <= high[n] and low[n] <= high[p] for n in np.flatnonzero(target == 0)] for p in np.flatnonzero(target == 1)]
    return np.mean(near) / 2


def test_class_weighted_mean_divides_by_weights(computed):
    for number, case in enumerate(CASES):
        if case.loss.class_weights:
            figures = figures_of(computed, number)
            weights = np.array(case.loss.class_weights)[case.target]
            expected = losses(case.loss, case.outputs, case.target).sum() / weights.sum()
            assert figures["loss"] == pytest.approx(expected, rel=1e-6)


def counted_scores(negatives, positives):
    sums = dict.fromkeys(objective_of_loss(AUC_LOSS).sums, 0.0) | {"examples": float(len(negatives) + len(positives))}
    for kind, scores in (("negative", negatives), ("positive", positives)):
        for number in bins(np.array(scores, np.float64)).tolist():
            sums[f"{kind}_scores_{number}"] += 1
    return sums


AUC_LOSS = objective_of("binary_cross_entropy", DataInfo.of_images("two", {}, ImageFeatures((1, 2, 2), 2, (0.5,), (0.2,)))).standard
SCORES = st.lists(st.floats(-50, 50), min_size=1, max_size=30)


@settings(deadline=None, derandomize=True, database=None)
@given(SCORES, SCORES)
def test_auc_is_within_its_stated_bound(negatives, positives):
    objective = objective_of_loss(AUC_LOSS)
    auc = next(metric for metric in objective.metrics if metric.name == "auc").value(counted_scores(negatives, positives))
    exact = reference.roc_auc_score([0] * len(negatives) + [1] * len(positives), [*negatives, *positives])
    shared = np.mean(bins(np.array(negatives))[:, None] == bins(np.array(positives)))
    assert abs(auc - exact) <= shared / 2 + 1e-12


def test_undefined_metric_is_no_number():
    sums = counted_scores([1.0, 2.0], [])
    figures = objective_of_loss(AUC_LOSS).figures(sums)
    assert math.isnan(figures["auc"])  # one class alone
    assert math.isnan(figures["f1"])
    assert all(math.isnan(value) for name, value in objective_of_loss(AUC_LOSS).figures({**sums, "loss_sum": math.nan}).items())


# Texts ---------------------------------------------------------------------------------------------------------------

TEN = DataInfo.of_images("ten", {"train": 6, "test": 6}, ImageFeatures((1, 8, 8), 10, (0.5,), (0.2,)))


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        (None, None),
        ("cross_entropy?smoothing=0", "cross_entropy"),
        ("cross_entropy?class_weights=balanced&smoothing=0.10", "cross_entropy?smoothing=0.1&class_weights=balanced"),
        ("cross_entropy?class_weights=1.0,2.50", "cross_entropy?class_weights=1,2.5"),
        ("multi_label", "multi_label"),
    ],
)
def test_equal_losses_have_one_text(typed, canonical):
    assert canonical_loss(typed) == canonical == canonical_loss(canonical)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cros_entropy", "Did you mean 'cross_entropy'?"),
        ("", "got ''; allowed: cross_entropy, "),
        ("multi_label?x=1", "takes no arguments. Leave '?x=1' out."),
        ("cross_entropy?smoothing=1", "smoothing of 'cross_entropy': got '1'; allowed: a number from 0 up to, but not including, 1."),
        ("cross_entropy?class_weights=1,0", "got '1,0'; allowed: balanced, or a number above 0 for each class"),
        ("cross_entropy?class_weights=nan", "got 'nan'; allowed: balanced"),
        ("cross_entropy?class_weights=1,2", "got 2 class_weights, but 'ten' has 10 classes"),
        ("binary_cross_entropy", "which is for two classes; 'ten' has 10"),
        ("mse", "the target of 'ten' is one of several classes; allowed there: cross_entropy, binary_cross_entropy, multi_label."),
        ("huber?delta=0", "delta of 'huber': got '0'; allowed: a number from 1e-06 up to"),
        ("cross_entropy?class_weights=" + "9" * 400, "allowed: balanced"),
    ],
)
def test_invalid_loss_is_refused_by_name(text, message):
    with pytest.raises(UsageError) as refused:
        build_model("logreg", TEN, canonical_loss(text))
    assert str(refused.value).startswith("loss: ")
    assert message in str(refused.value)


TABLES = {
    "sets": (ColumnSpec("y", "uint8", (4,)), ["f1", "label_accuracy", "loss"], 4),
    "number": (ColumnSpec("y", "float32", ()), ["rmse", "mae", "r2", "loss"], 0),
    "numbers": (ColumnSpec("y", "float32", (3,)), ["rmse", "mae", "r2", "loss"], 3),
}


@pytest.mark.parametrize("name", TABLES)
def test_default_loss_and_metrics_follow_the_target(name):
    column, metrics, outputs = TABLES[name]
    data = DataInfo(name, {}, (ColumnSpec("x", "float32", (2,)), column), TableFeatures("y"))
    assert [info.name for info in objective_of(None, data).infos] == metrics
    assert outputs_per_example(None, data) == outputs
    with pytest.raises(UsageError, match=f"loss: got 'cross_entropy', but the target of '{name}' is .*; allowed there: "):
        objective_of("cross_entropy", data)


class Labelled:
    def __init__(self, labels, classes):
        self.info, self._labels = DataInfo.of_images("few", {}, ImageFeatures((1, 2, 2), classes, (0.5,), (0.2,))), np.array(labels)

    def column(self, split, name):
        return {("train", "label"): type("Column", (), {"values": self._labels})}[split, name]


def test_balanced_weights_equal_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    labels = [0, 0, 0, 1, 2, 2, 2]
    _, _, numbers = resolved_loss("cross_entropy?smoothing=0.1&class_weights=balanced", Labelled(labels, 3)).rpartition("class_weights=")
    expected = compute_class_weight("balanced", classes=np.arange(3), y=np.array(labels))
    np.testing.assert_allclose([float(number) for number in numbers.split(",")], expected, rtol=1e-6)
    with pytest.raises(UsageError, match="class 3 of 'few' has no training example to be balanced by"):
        resolved_loss("cross_entropy?class_weights=balanced", Labelled(labels, 4))


def test_built_in_models_keep_their_objective():
    assert [info.name for info in build_model("logreg", TEN).objective.infos] == ["accuracy", "loss"]
    named = [info.name for info in build_model("logreg", TEN, "cross_entropy").objective.infos]
    assert named == ["accuracy", "top5_accuracy", "f1", "loss"]
