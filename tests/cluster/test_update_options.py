"""--accumulate, --clip-norm and --ema-decay: equal on both backends, in both modes.

From any number of micro-batches and shards. One asynchronous worker makes the updates of a synchronous run one after another, so the four
must agree.
"""

import json
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file

from crosstrain.checkpoint import list_checkpoints
from crosstrain.conformance.runs import norm_wise_difference, run_job, trainer

pytestmark = pytest.mark.cluster

JOB = {"data": "digits", "global_batch_size": 24, "lr": 0.01, "optimizer": "adam", "steps": 25, "network": "host", "calibrate": False}
UPDATES = {"accumulate": 3, "clip_norm": 0.5, "ema_decay": 0.9}
CLUSTERS = {
    ("torch", "sync"): {"procs_per_node": 2},
    ("torch", "async"): {"ps": 2},
    ("tf", "sync"): {"procs_per_node": 2},
    ("tf", "async"): {"ps": 2},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that makes a run on first use.

    It is one of `CLUSTERS`, "whole" without micro-batches, or "plain".
    """
    out = tmp_path_factory.mktemp("updates")

    @cache
    def made(which):
        if which in CLUSTERS:
            backend, mode = which
            return run_job(out, name=f"{backend}-{mode}", backend=backend, mode=mode, **CLUSTERS[which], **JOB, **UPDATES)
        options = {**UPDATES, "accumulate": 1} if which == "whole" else {}
        return run_job(out, name=which, backend="torch", **JOB, **options)

    return made


def slots(run):
    return load_file(list_checkpoints(run.path)[0] / "optimizer.safetensors")


QUICK = [("torch", "sync"), ("tf", "async")]
"""Each backend and each mode once; `make conformance` has the other two."""


@pytest.mark.thorough
@pytest.mark.parametrize("which", [pytest.param(which, marks=() if which in QUICK else pytest.mark.slow) for which in CLUSTERS])
def test_update_options_agree_on_all_backends(runs, which):
    """Within the 1e-6 of float32's sums, for other kernels within their rounding."""
    run, whole = runs(which), runs("whole")
    same_framework = which[0] == "torch"
    np.testing.assert_allclose(run.losses, whole.losses, rtol=1e-6)
    assert norm_wise_difference(run.weights, whole.weights) < 1e-6
    actual, expected = slots(run), slots(whole)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert np.linalg.norm(actual[name] - value) <= (1e-6 if same_framework else 2e-5) * np.linalg.norm(value), name
    assert run.evals[-1].loss == pytest.approx(whole.evals[-1].loss, rel=1e-6)
    assert run.summary["examples"] == 25 * 24


@pytest.mark.thorough
def test_update_options_change_the_weights(runs):
    assert norm_wise_difference(runs("plain").weights, runs("whole").weights) > 1e-2
    assert abs(runs("plain").evals[-1].loss - runs("whole").evals[-1].loss) > 1e-2


@pytest.mark.thorough
def test_ema_weights_are_evaluated(runs):
    """Also by a process that only reads the checkpoint, which also has the trained weights."""
    path = str(runs(("tf", "async")).path)
    recorded = runs(("tf", "async")).evals[-1].loss
    for options, weights, near in (([], "ema", True), (["--weights", "trained"], "trained", False)):
        evaluation = json.loads(trainer("evaluate", path, "--backend", "torch", *options, "--json").stdout)
        assert evaluation["weights"] == weights
        assert (abs(evaluation["loss"] - recorded) < 1e-6) == near
