"""Runs of the Transformer: the suite for models, and losses independent of the distribution.

Any worker may have the long sentences.
"""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from own_models import importable

from crosstrain.conformance.model_suite import ModelConformance
from crosstrain.conformance.runs import read_run, relative_difference, run_job, trainer

pytestmark = pytest.mark.cluster

PAIRS = Path(__file__).parent.parent / "pairs"


@pytest.fixture(scope="module", autouse=True)
def pairs():
    """The datasets of pairs, for this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", importable(PAIRS)["PYTHONPATH"])
        patch.syspath_prepend(str(PAIRS))
        yield


@pytest.mark.thorough
class TestTransformer(ModelConformance):
    """Fifty steps take the loss from 4.9 to 3.0 and rounding to 3e-6: 1e-3 is not chance."""

    model = "transformer:tiny"
    data = "reversed"
    options: ClassVar = {
        "deterministic": True,
        "optimizer": "adam",
        "lr": 1e-3,
        "warmup_steps": 100,
        "calibrate": False,
        "threads": 1,
    }
    quick_steps = 8
    quick_workers = 1

    @pytest.mark.slow
    def test_gradients_agree(self, tmp_path):
        """Without the marker `slow` it is tests/unit/test_transformer.py that compares gradients."""
        super().test_gradients_agree(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("backend", [pytest.param("tf", marks=pytest.mark.slow), "torch"])
def test_loss_is_mean_over_target_tokens_of_all_workers(backend, workers, tmp_path):
    """Workers with 41, 2 and 3 tokens: the mean of their means would be another loss.

    The expected loss is that of an evaluation of the same three pairs; with a learning rate of (almost) 0 it stays.
    """
    job = {"model": "transformer:tiny?dropout=0", "data": "uneven", "global_batch_size": 3, "steps": 2, "lr": 1e-12, "threads": 1}
    job |= {"tensorboard": False}
    run = run_job(tmp_path, backend=backend, procs_per_node=workers, calibrate=False, eval_every="end", **job)
    done = trainer("evaluate", str(run.path), "--split", "train", "--json")
    assert done.returncode == 0, done.stderr
    assert run.losses == pytest.approx([json.loads(done.stdout)["loss"]] * 2, rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("tf", marks=pytest.mark.slow), "torch"])
def test_run_with_arguments_resumes_and_is_evaluated(backend, tmp_path):
    """Its name has the arguments, and the other framework loads its checkpoint."""
    job = {"model": "transformer?dropout=0.0&size=tiny", "data": "reversed", "steps": 20, "optimizer": "adam", "lr": 1e-3, "threads": 1}
    run = run_job(tmp_path, backend=backend, calibrate=False, eval_every="end", **job)
    assert json.loads((run.path / "job.json").read_text())["model"] == "transformer:tiny?dropout=0"
    assert "-transformer_tiny_dropout_0-" in run.path.name
    other_backend = {"tf": "torch", "torch": "tf"}[backend]
    done = trainer("run", "--resume", str(run.path), "--backend", other_backend, "--steps", "+5", "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["model"]) == (25, "transformer:tiny?dropout=0")
    wrong = trainer("run", "--resume", str(run.path), "--model", "transformer:base", "--steps", "+5", "--quiet")
    assert wrong.returncode == 2
    assert "--model 'transformer:tiny?dropout=0'" in wrong.stderr
    last = read_run(run.path).evals[-1].metrics
    done = trainer("evaluate", str(run.path), "--backend", backend, "--json", "--model", job["model"])
    assert done.returncode == 0, done.stderr
    ours = json.loads(done.stdout)
    assert ours["perplexity"] == pytest.approx(last["perplexity"], rel=1e-5)
    assert ours["perplexity"] < 24
    assert ours["token_accuracy"] == pytest.approx(last["token_accuracy"], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transformer_async_workers_learn(precision, tmp_path):
    job = {"model": "transformer:tiny", "data": "reversed", "optimizer": "adam", "lr": 1e-3, "warmup_steps": 20, "epochs": 3, "threads": 1}
    for backend in ("tf", "torch"):
        run = run_job(tmp_path, backend=backend, mode="async", procs_per_node=2, precision=precision, batch_size=16, **job)
        assert np.mean(run.losses[-20:]) < 0.6 * run.losses[0]


@pytest.mark.slow
def test_bf16_is_near_float32_on_both(tmp_path):
    job = {"model": "transformer:tiny?dropout=0", "data": "reversed", "optimizer": "adam", "lr": 1e-3, "warmup_steps": 100, "steps": 10}
    for backend in ("tf", "torch"):
        full, low = (run_job(tmp_path, backend=backend, precision=precision, threads=1, **job) for precision in ("fp32", "bf16"))
        assert 0 < relative_difference(low.losses, full.losses) < 5e-3
