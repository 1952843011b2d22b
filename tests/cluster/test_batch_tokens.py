"""Batches by tokens in real runs: the same on both frameworks, and a run that goes on within an epoch sees each example once."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from own_models import importable

from crosstrain.checkpoint import find_checkpoint
from crosstrain.conformance.runs import read_run, run_job, trainer

pytestmark = pytest.mark.cluster

ENVIRONMENT = importable(Path(__file__).parent.parent / "sequences")
JOB = {
    "model": "crosstrain_sequences.tagger",
    "data": "tagged",
    "procs_per_node": 2,
    "batch_tokens": 60,
    "lr": 5.0,
    "steps": 50,
    "eval_every": "end",
    "deterministic": True,
    "calibrate": False,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def made(backend):
        return run_job(folder, name=backend, backend=backend, environment=ENVIRONMENT, **JOB)

    return made


def test_both_frameworks_take_the_same_batches(runs):
    one, other = runs("torch"), runs("tf")
    np.testing.assert_allclose(one.losses, other.losses, rtol=2e-5)
    assert sorted(record.examples for record in one.steps) == sorted(record.examples for record in other.steps)
    assert 0 < one.summary["padding_share"] < 0.15
    assert one.summary["padding_share"] == other.summary["padding_share"]
    assert one.summary["global_batch_size"] == 2 * one.summary["batch_size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("tf", ("--batch-tokens", "90", "--procs-per-node", "1")),
        ("torch", ("--batch-tokens", "45", "--mode", "async", "--no-deterministic")),
        pytest.param("torch", ("--batch-size", "7"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_within_an_epoch_in_other_batches(backend, options, runs, tmp_path):
    path = shutil.copytree(runs("torch").path, tmp_path / "copy")
    meta = find_checkpoint(path)[0].meta
    assert 0 < meta.examples < 300
    assert meta.arranged == ((0, 60, 2),)
    typed = ["--resume", str(path), "--backend", backend, "--epochs", str(meta.epoch + 2), "--checkpoint-every", "3steps", "--keep", "90"]
    done = trainer("run", *typed, *options, "--trust-run", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert read_run(path).summary["examples"] == 300 * (meta.epoch + 2)


def test_what_is_no_text_has_no_batches_by_tokens(tmp_path):
    found = trainer("run", "--backend", "torch", "--batch-tokens", "100", "--out", str(tmp_path))
    assert found.returncode == 2
    assert "the examples of 'digits' are no sequences of tokens" in found.stderr
    assert not list(tmp_path.iterdir())


def test_the_share_of_padding_is_told(runs):
    done = trainer("explain", str(runs("torch").path), "--json", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert any("of the positions that were computed were padding" in note for note in json.loads(done.stdout)["notes"])
