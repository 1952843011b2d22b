"""Image models on the TensorFlow backend in real processes: resumed runs are bit-identical.

Also buffers and large vectors.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from processes import free_ports, script_process

pytestmark = pytest.mark.cluster

FOLDER = Path(__file__).parent
process = partial(script_process, FOLDER / "tf_image_tasks.py")

RESUMED = {
    # running statistics of each rank's own, and a rank whose slices are empty at times
    "resnet18-2": {"nodes": 2, "model": "resnet18", "global_batch_size": 7, "momentum": 0.9, "side": 32},
    "cnn-3": {"nodes": 3, "model": "cnn", "global_batch_size": 2, "augment": "crop", "optimizer": "adam", "lr": 0.01, "side": 32},
    "alexnet-1": {"nodes": 1, "model": "alexnet", "batch_size": 10, "momentum": 0.9, "lr": 0.01, "side": 20, "augment": "crop+flip"},
}


@pytest.mark.slow  # of the torch backend without this marker, and of logistic regression in the conformance suite
@pytest.mark.parametrize("name", RESUMED)
def test_tf_resumed_run_is_bit_identical(tmp_path, name):
    """Trained without a break, and by fresh processes from the state in its middle."""
    options = {**RESUMED[name], "deterministic": True}
    for phase in ("whole", "resumed"):
        scenario = tmp_path / f"{phase}.json"
        scenario.write_text(json.dumps({"port": free_ports(5), "jobs": {name: options}, "phase": phase}))
        with ExitStack() as stack:
            started = [stack.enter_context(process("rank", str(rank), str(scenario))) for rank in range(options["nodes"])]
            assert [task.wait(200) for task in started] == [0] * options["nodes"]
    with np.load(tmp_path / f"{name}-whole.npz") as whole, np.load(tmp_path / f"{name}-resumed.npz") as again:
        assert len(whole["losses"]) == 4
        assert whole["updates"] == 7
        assert set(whole.files) == set(again.files)
        for key in whole.files:
            assert whole[key].tobytes() == again[key].tobytes(), key
            assert np.isfinite(whole[key]).all(), key
        assert not np.array_equal(whole["losses"][0], whole["losses"][1])
        buffers = [key for key in whole.files if key.startswith("buffers/")]
        assert len(buffers) == (40 if name.startswith("resnet18") else 0)
        with np.load(tmp_path / f"{name}-middle.npz") as middle:
            assert middle["updates"] == 3
            assert all(not np.array_equal(middle[key], whole[key]) for key in [*buffers, *(k for k in middle.files if "weight" in k)])


def asynchronous(folder, options, side, updates, tasks, kind="task"):
    """Run an async job to its end; returns its figures."""
    scenario = folder / "scenario.json"
    scenario.write_text(json.dumps({"port": free_ports(8), "options": options, "side": side, "updates": updates}))
    with ExitStack() as stack:
        chief, *tasks_of_chief = [stack.enter_context(process(kind, name, str(scenario))) for name in tasks]
        assert chief.wait(200) == 0
        assert all(task.poll() is None for task in tasks_of_chief)  # servers end with their agents
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.slow
def test_buffers_lie_on_the_parameter_servers(tmp_path):
    """One worker with two servers equals a sync rank, batch normalisation's buffers included.

    States are restored to the bit.
    """
    options = {"model": "resnet18", "nodes": 1, "batch_size": 10, "ps": 2, "momentum": 0.5}
    figures = asynchronous(tmp_path, options, 32, 7, ["chief-0", "ps-0", "ps-1", "worker-0"])
    assert figures["covered"] == list(range(7))
    assert figures["evaluated"] == figures["again"]
    arrays = {name: dict(np.load(tmp_path / f"{name}.npz")) for name in ("initial", "trained", "back", "without-slots")}
    assert {key: value.tobytes() for key, value in arrays["back"].items()} == {
        key: value.tobytes() for key, value in arrays["initial"].items()
    }
    for key, value in arrays["trained"].items():
        expected = np.zeros_like(value) if key.startswith("slots/") else value
        assert np.array_equal(arrays["without-slots"][key], expected), key
        if key != "updates":
            assert not np.array_equal(arrays["initial"][key], value), key
    scenario = tmp_path / "sync.json"
    sync_options = {**options, "ps": 1, "mode": "sync", "side": 32}
    scenario.write_text(json.dumps({"port": free_ports(5), "jobs": {"sync": sync_options}, "phase": "whole"}))
    with process("rank", "0", str(scenario)) as started:
        assert started.wait(100) == 0
    with np.load(tmp_path / "sync-whole.npz") as sync, np.load(tmp_path / "sync-before.npz") as before:
        np.testing.assert_allclose(figures["losses"], [*before["losses"], *sync["losses"]], rtol=2e-3)
        for key in sync.files:
            if key.startswith(("buffers/", "parameters/")):
                distance = np.linalg.norm(sync[key] - arrays["trained"][key]) / np.linalg.norm(sync[key])
                assert distance < 5e-3, key


@pytest.mark.slow
def test_alexnet_on_two_workers_in_bf16(tmp_path):
    """A message holds all 228 MB of parameters; dropout and changed images reach the workers."""
    options = {"model": "alexnet", "nodes": 2, "batch_size": 5, "precision": "bf16", "lr": 0.01, "augment": "crop+flip"}
    figures = asynchronous(tmp_path, options, 20, 8, ["chief-0", "ps-0", "worker-0", "worker-1"])
    assert figures["covered"] == list(range(8))
    assert np.isfinite(figures["losses"]).all()
    assert figures["evaluated"][0] == 30


@pytest.mark.slow
def test_fp16_on_workers_scales_the_loss(tmp_path):
    """An update whose gradient overflows counts, but changes nothing.

    The scale falls for all workers, rises after 2000 updates, and cancels out.
    """
    options = {"model": "cnn", "nodes": 2, "batch_size": 5, "momentum": 0.9, "weight_decay": 0.1, "lr": 0.01, "steps_per_call": 3}
    figures = asynchronous(tmp_path, options, 32, 0, ["chief-0", "ps-0", "worker-0", "worker-1"], kind="half")
    start, overflowed, low, high = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("start", "overflowed", "low", "high"))
    assert {name: values["updates"] for name, values in figures.items()} == {
        f"{2.0**60:g}": 7, "16": 7, "512": 7, f"{2.0**22:g}": 96, "32": 24,
    }  # fmt: skip
    first = figures[f"{2.0**60:g}"]
    assert 2.0**53 <= first["loss_scale"] < 2.0**60
    assert first["clean_steps"] == 0
    for name in start.keys() - {"updates"}:
        assert np.array_equal(start[name], overflowed[name]), name
    assert figures["16"]["clean_steps"] == 1997
    moved = [name for name in start if name.startswith("parameters/")]
    first, second, third = (np.concatenate([state[name].ravel() for name in moved]) for state in (start, low, high))
    # two workers are never quite equal; the scales are 32 apart
    assert np.linalg.norm(third - second) < 0.3 * np.linalg.norm(second - first)
    reached = figures[f"{2.0**22:g}"]["loss_scale"]
    assert 2.0**4 < reached < 2.0**20
    assert (figures["32"]["loss_scale"], figures["32"]["clean_steps"]) == (64, 14)


REFUSED_WHERE_DETERMINISTIC = {
    "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits", "AdjustContrast", "AdjustContrastv2", "Bincount",
    "DenseBincount", "CropAndResizeGradBoxes", "CropAndResizeGradImage", "Dilation2DBackpropFilter", "Dilation2DBackpropInput",
    "FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient", "MaxPoolGradWithArgmax", "ResizeNearestNeighborGrad",
    "ScatterAdd", "ScatterDiv", "ScatterMax", "ScatterMin", "ScatterMul", "ScatterSub", "ScatterUpdate", "SparseTensorDenseMatMul",
    "Timestamp", "FusedBatchNormGradV3 outside training",
}  # fmt: skip
"""Ops whose GPU kernels raise where determinism is asked for: in TensorFlow 2.21, what lies below ``OpDeterminismRequired()`` in
tensorflow/core/kernels. Others there raise with cuDNN before 7.6.3 (DepthwiseConv2dNativeBackpropFilter), in builds without deterministic
kernels of segment reductions, and without a seed (random ops)."""

OF_CPU_ALONE = {"ScatterNd", "TensorScatterAdd", "TensorScatterUpdate"}
"""These are computed by the CPU then (release notes of TensorFlow 2.8)."""

IMAGE_MODELS = ["logreg", "cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet18", "alexnet"))]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [*IMAGE_MODELS, "transformer:tiny"])
def test_a_deterministic_run_has_no_op_that_gpus_refuse(tmp_path, model):
    assert not ops_of(tmp_path, model, deterministic=True) & (REFUSED_WHERE_DETERMINISTIC | OF_CPU_ALONE)


@pytest.mark.thorough
def test_ops_gpus_refuse_are_seen_in_other_runs(tmp_path):
    assert ops_of(tmp_path, "logreg", deterministic=False) & REFUSED_WHERE_DETERMINISTIC == {"SparseSoftmaxCrossEntropyWithLogits"}


def ops_of(folder, model, *, deterministic):
    """Types of the ops of all functions that a run has."""
    scenario, options = folder / "scenario.json", {"batch_size": 30, "momentum": 0.9, "augment": "crop+flip"}
    options |= {"deterministic": deterministic}
    scenario.write_text(json.dumps({"port": free_ports(1), "options": options, "side": 32}))
    with process("ops", model, str(scenario)) as started:
        assert started.wait(200) == 0
    ops = set(json.loads((folder / "ops.json").read_text()))
    assert ops & {"MatMul", "BatchMatMulV2"}
    return ops


@pytest.mark.thorough
def test_pieces():
    """The checks of tf_checks.py, in a process of their own, since they import TensorFlow."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / "tf_checks.py")],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
