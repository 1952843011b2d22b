"""Image models on the torch backend in real processes: resumed runs are bit-identical.

Also buffers and large vectors.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from processes import free_ports, script_process

pytestmark = pytest.mark.cluster

FOLDER = Path(__file__).parent
process = partial(script_process, FOLDER / "torch_image_tasks.py")

RESUMED = {
    # several of DDP's buckets, whose rebuild changes the order of summation, and running statistics
    "resnet18-3": {"nodes": 3, "model": "resnet18", "global_batch_size": 10, "momentum": 0.9, "side": 32},
    "alexnet-2": {"nodes": 2, "model": "alexnet", "global_batch_size": 10, "momentum": 0.9, "lr": 0.01, "side": 20, "precision": "bf16"},
    "alexnet-1": {"nodes": 1, "model": "alexnet", "batch_size": 10, "deterministic": True, "side": 20},
    "cnn-1": {"nodes": 1, "model": "cnn", "batch_size": 10, "augment": "crop+flip", "optimizer": "adamw", "lr": 0.01, "side": 32},
    "cnn-3": {"nodes": 3, "model": "cnn", "global_batch_size": 2, "augment": "crop", "optimizer": "adam", "lr": 0.01, "side": 32},
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return a function from a job's name to its results, uninterrupted and resumed half-way.

    All jobs of one model share their processes.
    """

    @cache
    def trained(model):
        folder = tmp_path_factory.mktemp("torch-images")
        jobs = {name: job for name, job in RESUMED.items() if job["model"] == model}
        for phase in ("whole", "resumed"):
            scenario = folder / f"{phase}.json"
            scenario.write_text(json.dumps({"port": free_ports(5 * len(jobs)), "jobs": jobs, "phase": phase}))
            with ExitStack() as stack:
                started = [stack.enter_context(process("rank", str(rank), str(scenario))) for rank in range(3)]
                assert [task.wait(200) for task in started] == [0, 0, 0]
        return folder

    return lambda name: trained(RESUMED[name]["model"])


@pytest.mark.slow  # the conformance suite has one of logistic regression without this marker
@pytest.mark.parametrize("name", RESUMED)
def test_torch_resumed_run_is_bit_identical(resumed, name):
    folder = resumed(name)
    with np.load(folder / f"{name}-whole.npz") as whole, np.load(folder / f"{name}-resumed.npz") as again:
        assert len(whole["losses"]) == 4
        assert whole["updates"] == 7
        assert set(whole.files) == set(again.files)
        for key in whole.files:
            assert np.array_equal(whole[key], again[key]), key
            assert np.isfinite(whole[key]).all(), key
    with np.load(folder / f"{name}-middle.npz") as middle, np.load(folder / f"{name}-whole.npz") as whole:
        assert middle["updates"] == 3
        assert all(not np.array_equal(middle[key], whole[key]) for key in middle.files if "weight" in key and key.startswith("parameters"))


@pytest.mark.slow
def test_sync_averages_the_running_statistics(resumed):
    with np.load(resumed("resnet18-3") / "resnet18-3-whole.npz") as arrays:
        names = [key for key in arrays.files if key.startswith("buffers/")]
        assert len(names) == 40
        assert all(np.abs(arrays[name]).max() > 0 for name in names)


def asynchronous(folder, options, side, updates, tasks):
    """Run an async job to its end; returns (figures, folder)."""
    scenario = folder / "scenario.json"
    scenario.write_text(json.dumps({"port": free_ports(8), "options": options, "side": side, "updates": updates}))
    with ExitStack() as stack:
        started = [stack.enter_context(process("task", name, str(scenario))) for name in tasks]
        assert [task.wait(150) for task in started] == [0] * len(tasks)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.slow
def test_buffers_lie_on_the_parameter_servers(tmp_path):
    """One worker with two servers equals a sync rank, batch normalisation's buffers included.

    States are restored to the bit.
    """
    options = {"model": "resnet18", "nodes": 1, "batch_size": 10, "ps": 2, "momentum": 0.5}
    figures = asynchronous(tmp_path, options, 32, 7, ["chief-0", "ps-1", "worker-0"])
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
    session_options = {**options, "ps": 1, "mode": "sync", "side": 32, "nodes": 1}
    scenario = tmp_path / "sync.json"
    scenario.write_text(json.dumps({"port": free_ports(5), "jobs": {"sync": session_options}, "phase": "whole"}))
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
    options = {"model": "alexnet", "nodes": 2, "batch_size": 5, "precision": "bf16", "lr": 0.01}
    figures = asynchronous(tmp_path, options, 20, 8, ["chief-0", "worker-0", "worker-1"])
    assert figures["covered"] == list(range(8))
    assert np.isfinite(figures["losses"]).all()
    assert figures["evaluated"][0] == 30


@pytest.mark.thorough
@pytest.mark.parametrize("checks", ["torch_checks.py", "torch_async_checks.py"])
def test_pieces(checks):
    """In another process, since they import torch."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / checks)],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
