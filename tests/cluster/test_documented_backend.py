"""The backend of docs/adding-a-backend.md, copied from the page, equals the reference.

In both modes.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from documents import ROOT, write_package

from crosstrain.conformance.cases import train_logistic_regression
from crosstrain.conformance.runs import norm_wise_difference, relative_difference, run_job
from crosstrain.core.job import Job
from crosstrain.data.store.stored_dataset import open_dataset

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs/adding-a-backend.md"
OPTIONS = {"nodes": 2, "batch_size": 10, "epochs": 4, "lr": 0.02, "eval_every": "end"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Write the page's files, and have them found by the processes that are started."""
    assert "crosstrain_toy/__init__.py" in {path.relative_to(tmp_path).as_posix() for path in write_package(PAGE, tmp_path)}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.fixture(scope="module")
def expected():
    return train_logistic_regression(Job.model_validate({"backend": "reference", **OPTIONS}), open_dataset("digits"))


@pytest.mark.usefixtures("installed")
def test_documented_backend_trains_synchronously(expected, tmp_path):
    run = run_job(tmp_path, backend="toy", tensorboard=False, **OPTIONS)
    assert relative_difference(run.losses, expected.losses) <= 1e-5
    assert norm_wise_difference(run.weights, expected.weights) <= 1e-5


@pytest.mark.thorough
@pytest.mark.usefixtures("installed")
def test_documented_backend_trains_asynchronously(expected, tmp_path):
    """As many updates as batches, some of each worker; the result is as good as the reference."""
    run = run_job(tmp_path, backend="toy", mode="async", tensorboard=False, **OPTIONS)
    assert run.summary["updates_applied"] == len(run.losses) == 2 * len(expected.losses)
    assert min(run.summary["updates_by_worker"]) > 0  # how many depends on the machine: free workers get work
    data = open_dataset("digits")
    images, labels = data.inputs("test"), data.labels("test")
    logits = images.reshape(len(labels), -1) @ expected.weights["dense.weight"].T + expected.weights["dense.bias"]
    accuracy = float((logits.argmax(1) == labels).mean())
    assert run.summary["eval"]["accuracy"] == pytest.approx(accuracy, abs=0.03)
    assert np.mean(run.losses[-20:]) < 0.5 * np.mean(run.losses[:20])
