"""Losses by name in runs: equal on frameworks, in modes, for any workers, and by formula."""

import json
from pathlib import Path

import numpy as np
import pytest
from logreg_reference import Reference

from crosstrain.backends.base import make_sampler
from crosstrain.conformance.runs import relative_difference, run_job, trainer
from crosstrain.core.job import Job
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.models.logreg import build
from crosstrain.models.losses import class_weights, resolved_loss

pytestmark = pytest.mark.cluster
NET = Path(__file__).parents[2] / "examples/own_torch/net.py"
WEIGHTED = "cross_entropy?smoothing=0.1&class_weights=balanced"
JOB = {"data": "digits", "loss": WEIGHTED, "global_batch_size": 20, "steps": 12, "eval_every": "6steps"}
QUIET = {"tensorboard": False, "monitor": False, "calibrate": False}
TWO = {"data": "synthetic-images:size=8,classes=2,train=60,test=40", "loss": "binary_cross_entropy", "global_batch_size": 10, "steps": 6}
COMBINATIONS = [("torch", 3), *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("torch", 1), ("tf", 1), ("tf", 3)))]


class WeightedReference(Reference):
    """Logistic regression with smoothed labels, divided by the sum of the labels' weights."""

    def __init__(self, initial, job, weights):
        super().__init__(initial, job)
        self.weights = weights

    def labels(self, y):
        return self.weights * (0.9 * np.eye(10)[y] + 0.01)

    def losses(self, x, y):
        _, p = super().losses(x, y)
        return -(self.labels(y) * np.log(p)).sum(1), p

    def step(self, x, y, lr):
        losses, p = self.losses(x, y)
        total, labels = self.weights[y].sum(), self.labels(y)
        error = (labels.sum(1, keepdims=True) * p - labels) / total
        self.apply({"dense.weight": error.T @ x.astype(np.float64), "dense.bias": error.sum(axis=0)}, lr)
        return losses.sum() / total


@pytest.fixture(scope="module")
def expected():
    """Return the losses of 12 updates and the loss of the test split after them, in float64."""
    data = open_dataset("digits")
    job = Job(data="digits", backend="torch", batch_size=20, loss=resolved_loss(WEIGHTED, data))
    reference = WeightedReference(build(data.info).initial(0), job, np.array(class_weights(job.loss, data.info)))
    x, y = data.inputs("train").reshape(-1, 64), data.labels("train")
    whole = make_sampler(job, data, "class_weights").whole(0, 0, 12)
    trained = [reference.step(x[whole.batch(i)], y[whole.batch(i)], 0.05) for i in range(12)]
    tested = data.labels("test")
    losses, _ = reference.losses(data.inputs("test").reshape(-1, 64), tested)
    return np.array(trained), losses.sum() / reference.weights[tested].sum()


@pytest.mark.parametrize(("backend", "nodes"), COMBINATIONS)
def test_weighted_loss_follows_its_formula(expected, tmp_path, backend, nodes):
    run = run_job(tmp_path, backend=backend, nodes=nodes, deterministic=True, **JOB, **QUIET)
    assert relative_difference(run.losses, expected[0]) <= 1e-5
    assert run.summary["eval"]["loss"] == pytest.approx(expected[1], rel=1e-5)
    assert 0 < run.summary["eval"]["f1"] < run.summary["eval"]["top5_accuracy"]
    assert json.loads((run.path / "job.json").read_text())["loss"] == WEIGHTED


@pytest.mark.thorough
def test_checkpoint_is_evaluated_with_its_weights(expected, tmp_path):
    run = run_job(tmp_path, backend="torch", nodes=2, accumulate=2, **JOB, **QUIET)
    assert relative_difference(run.losses, expected[0]) <= 1e-5
    for backend in ("torch", "tf"):
        done = trainer("evaluate", str(run.path), "--backend", backend, "--json")
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert figures["loss"] == pytest.approx(expected[1], rel=1e-5)
        assert figures["f1"] == pytest.approx(run.summary["eval"]["f1"], abs=1e-9)
    resumed = trainer("run", "--resume", str(run.path), "--steps", "+2", "--backend", "tf", "--json", "--quiet")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_loss_trains_asynchronously_to_a_target(tmp_path, backend):
    job = {**JOB, "steps": 400, "eval_every": "20steps", "until": "f1>=0.7", "keep_best": "f1", "checkpoint_every": "20steps"}
    run = run_job(tmp_path, backend=backend, mode="async", nodes=2, **job, **QUIET)
    assert run.summary["target_reached"] is True
    assert run.evals[-1].metrics["f1"] >= 0.7


@pytest.mark.thorough
def test_binary_loss_agrees_on_both_frameworks(tmp_path):
    runs = {
        (backend, nodes): run_job(tmp_path, backend=backend, nodes=nodes, deterministic=True, **TWO, **QUIET)
        for backend, nodes in (("torch", 1), ("torch", 3), ("tf", 1), ("tf", 3))
    }
    first = runs["torch", 1]
    assert {value.shape for value in first.weights.values()} == {(1, 192), (1,)}
    for run in runs.values():
        assert relative_difference(run.losses, first.losses) <= 1e-5
        assert run.summary["eval"]["auc"] == pytest.approx(first.summary["eval"]["auc"], abs=1e-3)


@pytest.mark.thorough
def test_imported_model_takes_a_loss(tmp_path):
    job = {"data": "glyphs", "global_batch_size": 12, "steps": 4, "lr": 0.001, "deterministic": True, "loss": "multi_label"}
    runs = [run_job(tmp_path, backend=backend, model=f"{NET}:Net", nodes=2, **job, **QUIET) for backend in ("torch", "tf")]
    assert relative_difference(runs[1].losses, runs[0].losses) <= 1e-4
    for run in runs:
        assert list(run.evals[-1].metrics) == ["accuracy", "top5_accuracy", "f1"]


def test_loss_that_does_not_fit_is_refused(tmp_path):
    def refused(*options):
        done = trainer("run", "--backend", "torch", "--out", str(tmp_path), *options)
        assert done.returncode == 2
        return done.stderr

    assert "loss: got 'binary_cross_entropy', which is for two classes; 'digits' has 10" in refused("--loss", "binary_cross_entropy")
    assert "Did you mean 'multi_label'?" in refused("--loss", "multilabel")
