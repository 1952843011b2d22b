"""``--compile`` with real processes: compiled steps equal others, and auto's choice is kept."""

import json
import re
import threading
import time

import numpy as np
import pytest

from crosstrain.conformance.cases import kill_task_once, train_logistic_regression
from crosstrain.conformance.runs import norm_wise_difference, options_of, read_run, relative_difference, run_job, trainer
from crosstrain.core.job import Job
from crosstrain.data.store.stored_dataset import open_dataset
from crosstrain.records.store.run_directory import RunReader

pytestmark = pytest.mark.cluster

LOGREG = {"global_batch_size": 30, "steps": 120, "lr": 0.05, "eval_every": "end"}
"""An epoch ends in a smaller batch, which is not compiled."""

CNN = {"model": "cnn", "data": "glyphs", "global_batch_size": 12, "steps": 6, "optimizer": "adam", "lr": 1e-3, "eval_every": "end"}
DROPPING = {"model": "alexnet", "data": "synthetic-images:size=64,classes=10,train=64,test=16", "global_batch_size": 4, "steps": 3}

slow = pytest.mark.slow
WAYS = {"one": {}, "native": {"nodes": 2}, "direct": {"nodes": 2, "exchange": "direct"}}
EVERY = [
    pytest.param("tf", "one"),
    pytest.param("tf", "native"),
    pytest.param("tf", "direct", marks=slow),
    *(pytest.param("torch", way, marks=slow) for way in WAYS),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Cache torch's compiled code for the following tests: it takes half a minute."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


def run(out, backend, compile_, **job):
    return run_job(out, backend=backend, compile=compile_, tensorboard=False, start_timeout=900, stall_timeout=900, **job)


def choices(path):
    return [record.detail for record in RunReader(path).events() if record.event == "compile_chosen"]


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "way"), EVERY)
def test_compiled_steps_equal_the_reference(backend, way, tmp_path):
    job = {**LOGREG, **WAYS[way]}
    compiled = run(tmp_path, backend, "on", **job)
    expected = train_logistic_regression(Job(backend="reference", **job), open_dataset("digits"))
    assert relative_difference(compiled.losses, expected.losses) <= 1e-5
    assert norm_wise_difference(compiled.weights, expected.weights) <= 1e-4
    assert compiled.summary["compiled"] is True
    assert choices(compiled.path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tf", pytest.param("torch", marks=slow)])
def test_calibration_compiles_half_batch_only_if_compile_is_fast(backend, tmp_path):
    """Whichever of the two it is here: the driver has seen how long warming up took."""
    began = time.monotonic()
    result = run(tmp_path, backend, "on", calibrate=True, **LOGREG)
    longest = time.monotonic() - began
    calibration = json.loads((result.path / "calibration.json").read_text())
    (worker,) = calibration["workers"]
    assert (worker["half_compute_seconds"] is None) == (calibration["half_untried"] is not None)
    if calibration["half_untried"] is not None:
        assert 10 <= int(re.search(r"may take the (\d+) s", calibration["half_untried"])[1]) <= longest


@slow
@pytest.mark.parametrize(("backend", "way"), EVERY)
def test_compiled_network_equals_uncompiled(backend, way, tmp_path):
    plain, compiled = (run(tmp_path / how, backend, how, **CNN, **WAYS[way]) for how in ("off", "on"))
    assert relative_difference(compiled.losses, plain.losses) <= 1e-4
    assert norm_wise_difference(compiled.weights, plain.weights) <= 1e-4


RESNET = {"model": "resnet18", "steps": 2, "optimizer": "sgd", "lr": 0.01}
"""The second loss has gone through one compiled update, and the weights through two. Later losses show nothing: the last stage normalises
each channel by twelve values, and a rounding that brings one of them above zero changes a gradient by up to percents. At equal weights
gradients are within 1e-5 of float64's, compiled or not, save where that happens, and it happens to either. Without compiling, the third
losses with one thread and with two are 1e-3 apart.
"""


@slow
@pytest.mark.parametrize("backend", ["tf", "torch"])
@pytest.mark.parametrize("more", [{"accumulate": 2, "clip_norm": 0.5}, {"ema_decay": 0.9}, RESNET], ids=str)
def test_compiled_training_options_equal_uncompiled(backend, more, tmp_path):
    plain, compiled = (run(tmp_path / how, backend, how, **{**CNN, **more}) for how in ("off", "on"))
    assert relative_difference(compiled.losses, plain.losses) <= 1e-3
    assert norm_wise_difference(compiled.weights, plain.weights) <= 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tf", pytest.param("torch", marks=slow)])
def test_async_workers_compute_compiled_gradients(backend, tmp_path):
    result = run(tmp_path, backend, "on", mode="async", nodes=2, batch_size=10, epochs=8, lr=0.02, eval_every="end")
    assert result.summary["updates_applied"] == result.summary["steps"]
    assert result.summary["compiled"] is True
    assert result.summary["eval"]["accuracy"] > 0.8


@slow
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_compiled_dropout_equals_uncompiled(backend, tmp_path):
    plain, compiled = (run(tmp_path / how, backend, how, **DROPPING) for how in ("off", "on"))
    assert relative_difference(compiled.losses, plain.losses) <= 1e-3


@slow
@pytest.mark.parametrize(("backend", "job"), [("tf", LOGREG), ("torch", LOGREG), ("torch", DROPPING)])
def test_compiled_deterministic_runs_are_bit_identical(backend, job, tmp_path):
    first, second = (run(tmp_path / name, backend, "on", nodes=2, exchange="direct", deterministic=True, **job) for name in ("one", "two"))
    np.testing.assert_array_equal(first.losses, second.losses)
    assert norm_wise_difference(first.weights, second.weights) == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"deterministic": True, "optimizer": "adam", "lr": 1e-3, "clip_norm": 0.1}, marks=slow),
        {"optimizer": "sgd", "momentum": 0.9, "schedule": "cosine", "ema_decay": 0.9},
    ],
    ids=lambda more: more["optimizer"],
)
def test_xla_loop_result_is_independent_of_its_length(more, tmp_path):
    """Steps per call, evaluations, ends of epochs and a resumed run interrupt the loop.

    To the bit, as XLA's code is the same for any number of steps.
    """
    job = {**LOGREG, **more, "steps": 100, "eval_every": "7steps"}
    whole = run(tmp_path, "tf", "on", name="whole", **{**job, "eval_every": "end"})
    for name, cut in (("calls", {"steps_per_call": 9}), ("evaluated", {})):
        result = run(tmp_path, "tf", "on", name=name, **job, **cut)
        np.testing.assert_array_equal(result.losses, whole.losses)
        assert norm_wise_difference(result.weights, whole.weights) == 0
    part = run(tmp_path, "tf", "on", name="part", **{**job, "steps": 41})
    done = trainer("run", "--resume", str(part.path), "--steps", "100", "--quiet")
    assert done.returncode == 0, done.stderr
    if "schedule" not in more:  # which follows the number of steps that were asked for
        np.testing.assert_array_equal(read_run(part.path).losses, whole.losses)
    plain = run(tmp_path, "tf", "off", name="plain", **job)
    assert relative_difference(whole.losses, plain.losses) <= 1e-5
    assert norm_wise_difference(whole.weights, plain.weights) <= 1e-4


@pytest.mark.thorough
def test_compile_unsupported_by_xla_is_refused(tmp_path):
    """XLA has no repeatable gradient of a max pool."""
    settings = {"compile": "on", "deterministic": True, "model": "cnn", "data": "glyphs", "steps": 5}
    refused = trainer("run", "--backend", "tf", "--out", str(tmp_path), "--quiet", *options_of(settings))
    assert refused.returncode == 2, refused.stderr
    assert "--compile: got 'on', but XLA cannot compile model 'cnn' here: " in refused.stderr
    assert "MaxPool" in refused.stderr


@pytest.mark.thorough
def test_compile_auto_resume_reuses_choice(tmp_path):
    """The recorded choice holds even if the machine would choose differently now."""
    result = run(tmp_path, "tf", "auto", nodes=2, **LOGREG)
    (choice,) = choices(result.path)
    assert result.summary["compiled"] is choice["compiled"]
    assert choice["plain_seconds"] > 0
    described = result.path / "job.json"
    job = json.loads(described.read_text())
    assert (job["compile"], job["compiled"]) == ("auto", choice["compiled"])
    described.write_text(json.dumps({**job, "compiled": not choice["compiled"]}))
    done = trainer("run", "--resume", str(result.path), "--steps", "150", "--quiet")
    assert done.returncode == 0, done.stderr
    resumed = read_run(result.path)
    assert len(choices(result.path)) == 1
    assert resumed.summary["compiled"] is not choice["compiled"]
    assert len(resumed.losses) == 150


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_compile_auto_restart_reuses_choice(backend, tmp_path):
    killer = threading.Thread(target=kill_task_once, args=(tmp_path / "run", "worker-1"))
    killer.start()
    result = run(tmp_path, backend, "auto", name="run", nodes=2, sample_interval=0.1, max_restarts=1, **{**LOGREG, "steps": 6000})
    killer.join()
    assert result.summary["restarts"] == 1
    (choice,) = choices(result.path)
    assert result.summary["compiled"] is choice["compiled"]


@slow
def test_compile_uneven_slices_compile_before_clock_starts(tmp_path):
    """Of 10 examples three ranks have 4, 3 and 3: each warms up with its sizes."""
    job = {**LOGREG, "global_batch_size": 10, "nodes": 3}
    plain, compiled = (run(tmp_path / on, "torch", on, **job) for on in ("off", "on"))
    assert relative_difference(compiled.losses, plain.losses) <= 1e-5
    assert compiled.summary["run_seconds"] < compiled.summary["init_seconds"]
    slowest = max(record.seconds for record in RunReader(compiled.path).steps())
    assert slowest < 2.0  # less than any compilation takes


@pytest.mark.thorough
def test_compile_without_compiler_reports_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    settings = {"compile": "on", "steps": 5}
    refused = trainer("run", "--backend", "torch", "--out", str(tmp_path / "on"), "--quiet", *options_of(settings))
    assert refused.returncode == 2, refused.stderr
    assert (
        "--compile: got 'on', as typed or as 'auto' has chosen for this run before, but torch.compile needs a C++ compiler"
        in refused.stderr
    )
    assert "apt install g++" in refused.stderr
    result = run(tmp_path / "auto", "torch", "auto", **LOGREG)
    (choice,) = choices(result.path)
    assert (choice["compiled"], choice["compiled_seconds"]) == (False, None)
    assert "C++ compiler" in choice["reason"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tf", "torch"])
def test_compile_sequences_are_refused(backend, tmp_path):
    settings = {"compile": "on", "steps": 5, "model": "transformer:tiny", "data": "numbers"}
    refused = trainer("run", "--backend", backend, "--out", str(tmp_path), "--quiet", *options_of(settings))
    assert refused.returncode == 2, refused.stderr
    assert "--compile: got 'on', but the examples of" in refused.stderr
