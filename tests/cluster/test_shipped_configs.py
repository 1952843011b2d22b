"""The shipped configurations run: a few steps of each that is small enough for a test."""

from __future__ import annotations

import json

import pytest

from crosstrain.conformance.runs import trainer

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        pytest.param("eecs598-cnn-checkpoint", marks=pytest.mark.slow),
        pytest.param("hw2-cnn-batch", marks=pytest.mark.slow),
        pytest.param("eecs598-cnn", marks=pytest.mark.slow),
        pytest.param("eecs598-fastest-90", marks=pytest.mark.slow),
    ],
)
def test_shipped_config_trains_a_few_steps(tmp_path, name):
    done = trainer("run", "--config", name, "--steps", "6", "--quiet", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["steps"]) == ("succeeded", 6)
    assert summary["non_finite_losses"] == 0
    assert 0 < summary["eval"]["accuracy"] < 1
