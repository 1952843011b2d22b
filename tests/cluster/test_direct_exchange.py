"""``--exchange direct`` with real processes: equal to native collectives, repeatable."""

import json
import threading

import numpy as np
import pytest

from crosstrain.checkpoint import find_checkpoint
from crosstrain.conformance.cases import kill_task_once, train_logistic_regression
from crosstrain.conformance.runs import norm_wise_difference, read_run, relative_difference, run_job, trainer
from crosstrain.core.job import Job
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.runs.run import Run

pytestmark = pytest.mark.cluster

BACKENDS = ("torch", "tf")
LARGE = {"model": "cnn", "data": "glyphs", "global_batch_size": 12, "steps": 6, "optimizer": "adam", "lr": 1e-3, "eval_every": "end"}
"""A model of 1.7 million parameters: gradients are sent in shares, and in several buckets."""

OTHERS = {
    "accumulated, clipped": {"accumulate": 2, "clip_norm": 0.5},
    "bf16": {"precision": "bf16"},
    "buffers": {"model": "resnet18", "global_batch_size": 8, "steps": 3},
    "averaged": {"ema_decay": 0.9},
}


def run(out, backend, exchange, **job):
    return run_job(out, backend=backend, exchange=exchange, tensorboard=False, **job)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("workers", "batch"), [pytest.param(2, 64, marks=pytest.mark.slow), (3, 10), (3, 2)])
def test_direct_exchange_equals_reference(backend, workers, batch, tmp_path):
    job = {"nodes": workers, "global_batch_size": batch, "steps": 200, "lr": 0.05}
    result = run(tmp_path, backend, "direct", **job)
    expected = train_logistic_regression(Job(backend="reference", **job), open_dataset("digits"))
    assert relative_difference(result.losses, expected.losses) <= 1e-5
    assert norm_wise_difference(result.weights, expected.weights) <= 1e-4
    assert result.summary["updates_applied"] == 200
    assert json.loads((result.path / "job.json").read_text())["exchange"] == "direct"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_direct_exchange_large_model_equals_native(backend, tmp_path):
    native, direct = (run(tmp_path, backend, exchange, nodes=3, **LARGE) for exchange in ("native", "direct"))
    assert relative_difference(direct.losses, native.losses) <= 1e-4
    assert norm_wise_difference(direct.weights, native.weights) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OTHERS)
def test_direct_exchange_training_options_equal_native(backend, name, tmp_path):
    job = {**LARGE, "nodes": 2, **OTHERS[name]}
    native, direct = (run(tmp_path, backend, exchange, **job) for exchange in ("native", "direct"))
    tolerance = 1e-2 if name == "bf16" else 1e-3
    assert relative_difference(direct.losses, native.losses) <= tolerance
    assert norm_wise_difference(direct.weights, native.weights) <= tolerance


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", pytest.param("tf", marks=pytest.mark.slow)])
def test_direct_exchange_resumed_runs_are_bit_identical(backend, tmp_path):
    job = {**LARGE, "nodes": 3, "deterministic": True, "checkpoint_every": "3steps"}
    first, second = (run(tmp_path, backend, "direct", name=name, **job) for name in ("one", "two"))
    np.testing.assert_array_equal(first.losses, second.losses)
    assert norm_wise_difference(first.weights, second.weights) == 0
    done = trainer("run", "--resume", str(second.path / "checkpoints/step-000000003"), "--steps", "6", "--quiet")
    assert done.returncode == 0, done.stderr
    resumed = read_run(second.path)
    np.testing.assert_array_equal(resumed.losses, first.losses)
    assert norm_wise_difference(find_checkpoint(second.path)[0].parameters, first.weights) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_direct_exchange_components_are_calibrated(backend, tmp_path):
    result = run(tmp_path, backend, "direct", nodes=2, global_batch_size=22, steps=60, calibrate=True)
    calibration = json.loads((result.path / "calibration.json").read_text())
    for worker in calibration["workers"]:
        for component in ("data", "compute", "communicate", "message"):
            assert worker[f"{component}_seconds"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "job"),
    [
        pytest.param("torch", {"global_batch_size": 22, "steps": 60}, id="torch"),
        pytest.param("tf", {"global_batch_size": 22, "steps": 60}, id="tf"),
        pytest.param("torch", LARGE, id="torch, in several buckets", marks=pytest.mark.slow),
        pytest.param("tf", LARGE, id="tf, in several buckets", marks=pytest.mark.slow),
        pytest.param("torch", {**LARGE, "accumulate": 2, "precision": "bf16"}, id="torch, accumulated", marks=pytest.mark.slow),
        pytest.param("tf", {**LARGE, "accumulate": 2, "deterministic": True}, id="tf, accumulated", marks=pytest.mark.slow),
    ],
)
def test_native_run_measures_direct_exchange_at_its_end(backend, job, tmp_path):
    """And still ends well."""
    result = run(tmp_path, backend, "native", nodes=2, calibrate=True, **job)
    assert result.summary["steps"] == job["steps"]
    calibration = RunReader(result.path).calibration()
    assert calibration is not None, [record for record in RunReader(result.path).events() if record.event == "calibration_failed"]
    assert calibration["direct_untried"] is None
    for worker in calibration["workers"]:
        for component in ("data", "compute", "communicate", "message", "direct", "direct_message", "direct_step"):
            assert worker[f"{component}_seconds"] > 0, component
    costs = diagnose(Run(result.path)).exchange_costs
    assert costs.no_estimate in (None, "other programs had the cores")


@pytest.mark.quick_cases("options0---exchange")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "async"], "--exchange"),
        (["--device", "gpu"], "on GPUs native is better"),
        (["--nodes", "5", "--procs-per-node", "13"], "64 at most"),
    ],
)
def test_direct_exchange_unsupported_options_are_refused(options, message, tmp_path):
    done = trainer("run", "--backend", "torch", "--exchange", "direct", "--nodes", "2", *options, "--out", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


@pytest.mark.thorough
@pytest.mark.faults
@pytest.mark.parametrize("backend", ["tf", pytest.param("torch", marks=pytest.mark.slow)])
def test_direct_exchange_killed_worker_ends_with_same_weights(backend, tmp_path):
    """The killed worker is blamed, not those that lost it; the next attempt uses another mesh."""
    job = {"nodes": 3, "global_batch_size": 10, "steps": 6000, "eval_every": "end", "checkpoint_every": "500steps", "deterministic": True}
    undisturbed = run(tmp_path, backend, "direct", **job)
    killer = threading.Thread(target=kill_task_once, args=(tmp_path / "run", "worker-1"))
    killer.start()
    result = run(tmp_path, backend, "direct", name="run", sample_interval=0.1, max_restarts=1, **job)
    killer.join()
    (failed,) = [event for event in RunReader(result.path).events() if event.event == "attempt_failed"]
    assert "worker-1" in failed.detail["cause"]
    assert "SIGKILL" in failed.detail["cause"]
    np.testing.assert_array_equal(result.losses, undisturbed.losses)
    assert norm_wise_difference(result.weights, undisturbed.weights) == 0


@pytest.mark.thorough
def test_direct_exchange_cnn_micro_batches_in_one_process(tmp_path):
    """On TensorFlow its gradients' sums lie in a loop within a loop."""
    whole, parts = (run(tmp_path, "tf", "native", accumulate=count, **LARGE) for count in (1, 3))
    assert relative_difference(parts.losses, whole.losses) <= 1e-4
