"""``trainer diverge``: equal trainings agree, and planted faults are found."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until

from crosstrain.conformance.runs import run_job, trainer
from crosstrain.lockstep.layer_check import check_layers

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]
NETS = Path(__file__).parents[1] / "imported/keras_nets.py"
SITE = Path(__file__).parents[1] / "planted_faults/site"
JOB = {"data": "glyphs", "steps": 6, "global_batch_size": 16, "momentum": 0.9, "eval_every": "end", "tensorboard": False, "monitor": False}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return {backend: run_job(out, backend=backend, model="cnn", calibrate=False, **JOB).path for backend in ("torch", "tf")}


def diverged(*arguments):
    done = trainer("diverge", *map(str, arguments), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def faulty_python(folder, fault):
    """Return an interpreter whose processes have a planted fault."""
    return python_with(folder, f"TRAINER_PLANTED_FAULT={fault} PYTHONPATH={SITE}:$PYTHONPATH")


def python_with(folder, environment):
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n{environment} exec {sys.executable} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_frameworks_do_not_part_beyond_rounding(runs):
    compared = diverged(runs["torch"], runs["tf"], "--upto", 4)
    assert compared["findings"] == []
    assert compared["tensors"] > 100
    assert max(max(row["first"], row["second"]) for row in compared["layers"]) < 16 * 2**-24
    assert all(row["gradients"] < 1e-5 for row in compared["probes"])
    assert json.loads((runs["torch"] / "diverge.json").read_text())["sentence"] == compared["sentence"]
    page = runs["torch"].parent / "page.html"
    assert trainer("report", str(runs["torch"]), "-o", str(page)).returncode == 0
    assert "Compared with another training" in page.read_text()
    assert "over depth" in page.read_text()


@pytest.mark.parametrize(
    ("fault", "part", "layer", "cause"),
    [
        ("one_layer_in_bf16", "forward", "conv2", "its products are bf16"),
        ("bias_gradient_is_mean", "backward", "fc2", "it is scaled by 0.0625"),
        ("lr_1e-5", "optimiser", "", "the learning rate is 1.00001 times that of the schedule"),
        ("other_order", "data", "", "the order of the examples: another seed or shuffling"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_planted_fault_is_found(runs, tmp_path, backend, fault, part, layer, cause):
    compared = diverged(runs[backend], "--with", f"python={faulty_python(tmp_path, fault)}", "--upto", 1)
    first = compared["findings"][0]
    assert (first["update"], first["part"], first["layer"], first["cause"]) == (0, part, layer, cause)
    assert " with python=" in first["side"]


def test_planted_fault_in_a_graph_is_found(tmp_path):
    net = Path(__file__).parents[2] / "examples/own_torch/net.py"
    run = run_job(tmp_path / "runs", backend="torch", model=f"{net}:Net", calibrate=False, **JOB).path
    changes = "--with", "backend=tf", "--with", f"python={faulty_python(tmp_path, 'norm_epsilon_10_percent')}"
    (finding, *_) = diverged(run, *changes, "--upto", 0, "--trust-run")["findings"]
    assert (finding["part"], finding["layer"]) == ("forward", "stem.1")
    (fitted, wanted) = re.fullmatch("its epsilon is (.*) instead of (.*)", finding["cause"]).groups()
    assert (float(fitted), wanted) == (pytest.approx(1.1e-5, rel=0.02), "1e-05")  # its effect is of the size of rounding
    assert " with " in finding["side"]


def test_late_updates_begin_at_the_nearest_checkpoint(tmp_path):
    path = run_job(tmp_path, backend="torch", model="cnn", calibrate=False, **{**JOB, "steps": 60}, checkpoint_every="40 steps").path
    near = diverged(path, "--with", "backend=tf", "--upto", 50)
    assert near["findings"] == []
    assert [row["update"] for row in near["probes"]] == [0, 1, 2, 4, 8, 16, 32, 50]
    shutil.move(path / "checkpoints", tmp_path / "checkpoints")
    assert diverged(path, "--with", "backend=tf", "--upto", 50)["probes"] == near["probes"]
    shutil.move(tmp_path / "checkpoints", path / "checkpoints")
    (path / "checkpoints/step-000000040/parameters.safetensors").write_bytes(b"")
    done = trainer("diverge", str(path), "--with", "backend=tf", "--upto", "50")
    assert done.returncode == 2
    assert "is damaged" in done.stderr


def test_workers_of_one_batch_do_not_part(runs):
    assert diverged(runs["torch"], "--with", "nodes=3", "--upto", 2)["findings"] == []


def test_another_setting_is_named(runs):
    compared = diverged(runs["tf"], "--with", "lr=0.02", "--with", "seed=9", "--upto", 0)
    causes = [finding["cause"] for finding in compared["findings"]]
    assert "the setting lr is 0.02 instead of 0.05" in causes
    assert any(finding["part"] == "weights" for finding in compared["findings"])


def test_wrong_requests_are_explained(runs, tmp_path):
    def refused(*arguments):
        done = trainer("diverge", *map(str, arguments))
        assert done.returncode == 2
        return done.stderr

    assert "an asynchronous run has no update that another one makes too" in refused(runs["tf"], "--with", "mode=async")
    assert "model: 'cnn' and 'logreg' differ" in refused(runs["tf"], "--with", "model=logreg")
    assert "Did you mean 'momentum'?" in refused(runs["tf"], "--with", "momentun=0")
    assert "give another RUN, or --with" in refused(runs["tf"])
    assert "run: got 'none'" in refused("none")
    assert "run: got 'none'" in refused(runs["tf"], "none")
    assert "is no program that can be executed" in refused(runs["tf"], "--with", f"python={tmp_path}/none")
    assert "write SETTING=VALUE" in refused(runs["tf"], "--with", "backend")


def test_nothing_is_left_behind(runs, tmp_path):
    done = trainer(
        "diverge", str(runs["torch"]), "--with", "backend=tf", "--upto", "0", environment={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_loss_with_options_agrees_with_itself(tmp_path):
    path = run_job(tmp_path, backend="torch", model="cnn", calibrate=False, loss="cross_entropy?smoothing=0.1", **JOB).path
    assert diverged(path, "--with", "threads=1", "--upto", 0)["findings"] == []


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    job = {"model": "logreg", "data": "digits", "steps": 40, "weight_decay": 0.1, "eval_every": "end", "monitor": False}
    return run_job(tmp_path_factory.mktemp("small"), backend="torch", calibrate=False, momentum=0.5, **job).path


def test_workers_share_the_batch_of_the_first_run(small):
    assert diverged(small, "--with", "nodes=3")["findings"] == []
    assert diverged(small, "--with", "threads=1")["upto"] == 39


def test_a_loss_that_is_not_finite_ends_the_comparison(tmp_path):
    settings = {"lr": 1e4, "momentum": 0.9, "weight_decay": 0.5, "steps": 40, "eval_every": "end", "on_nan": "continue"}
    path = run_job(tmp_path, backend="torch", model="logreg", data="digits", calibrate=False, **settings).path
    done = trainer("diverge", str(path), "--with", "threads=1", "--upto", "39")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "not finite at update" in done.stderr


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("true", "ended with exit code 0 before it was ready"),
        ("echo garbage; sleep 60", "it wrote 'garbage'"),
        ("exec yes", "it wrote 'y'"),
        ("head -c 300000000 /dev/zero", "more than a line of"),
        ("exec sleep 600", "did not start within 5 s"),
        ("head -c 300000000 /dev/zero >&2", "ended with exit code 0"),
    ],
)
def test_other_programs_are_no_interpreters(small, tmp_path, program, words):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    done = trainer("diverge", str(small), "--with", f"python={path}", "--with", "start_timeout=5", timeout_seconds=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert words in done.stderr


def test_termination_leaves_nothing_behind(small, tmp_path):
    command = [sys.executable, "-m", "crosstrain.cli.main", "diverge", str(small), "--with", "backend=tf"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: list(tmp_path.iterdir()), 30, "a temporary folder")
        process.terminate()
        _, problem = process.communicate(timeout=60)
    assert (process.returncode, problem.strip()) == (130, "error: interrupted")
    assert list(tmp_path.iterdir()) == []


KERAS = """
import os

import keras
from keras import layers


class Scaled(layers.Layer):
    def call(self, x):
        return x * float(os.environ.get("FACTOR", "1"))


def model(input_shape, classes):
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu", name="conv")(inputs)
    x = layers.BatchNormalization(name="norm", epsilon=float(os.environ.get("EPSILON", "1e-3")))(x)
    x = Scaled(name="scaled")(x) + 0.5 * x
    x = layers.Dropout(float(os.environ.get("RATE", "0.2")), name="drop")(layers.MaxPooling2D()(x))
    return keras.Model(inputs, layers.Dense(classes)(layers.Flatten()(x)))
"""
OWN_LOSS = """
import math

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.hidden, self.out = nn.Linear(math.prod(input_shape), 16), nn.Linear(16, classes)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x.flatten(1))))

    def loss(self, columns):
        return functional.cross_entropy(self(columns["image"]), columns["label"], reduction="none")
"""


@pytest.fixture(scope="module")
def keras_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keras")
    (folder / "net.py").write_text(KERAS)
    return run_job(folder, backend="torch", model=f"{folder}/net.py:model", calibrate=False, **JOB).path


@pytest.mark.parametrize(
    ("environment", "faulty"),
    [
        ("FACTOR=1", []),
        ("FACTOR=1.0001", [("forward", "scaled", "it is scaled by 1.0001"), ("backward", "scaled", "it is scaled by 1.0001")]),
        ("EPSILON=2e-3", [("forward", "norm", "its epsilon is 0.002 instead of 0.001"), ("backward", "norm", "")]),
        ("RATE=0.4", [("forward", "drop", "its dropout has the rate 0.4 instead of 0.2"), ("backward", "drop", "")]),
    ],
)
def test_layers_of_keras_are_compared(keras_run, tmp_path, environment, faulty):
    python = python_with(tmp_path, environment)
    compared = diverged(keras_run, "--with", "backend=tf", "--with", f"python={python}", "--upto", 1, "--trust-run")
    assert [(finding["part"], finding["layer"], finding["cause"]) for finding in compared["findings"]] == faulty
    assert {finding["side"] for finding in compared["findings"]} <= {compared["second"]["name"]}
    assert {"Conv2D", "relu", "BatchNormalization", "Scaled", "MaxPooling2D", "Dropout", "Dense", "loss"} <= {
        row["operation"] for row in compared["layers"]
    }
    assert {"given 0", "output 0", "slope of input 0", "buffer norm/moving_mean", "gradient of conv/kernel"} <= {
        row["tensor"] for row in compared["layers"]
    }


def test_layers_of_an_intricate_keras_model_differ_by_rounding():
    checked = check_layers(f"{NETS}:intricate", "glyphs", None, ["torch", "tf"])
    assert checked.problem is None
    assert checked.findings == ()
    assert [row.operation for row in checked.rows if row.tensor == "output 0"].count("tanh") == 2
    assert {"MultiHeadAttention", "Doubled", "Bidirectional", "GroupNormalization", "result"} <= {row.operation for row in checked.rows}


def test_own_loss_of_a_module_is_compared(tmp_path):
    (tmp_path / "net.py").write_text(OWN_LOSS)
    path = run_job(tmp_path, backend="torch", model=f"{tmp_path}/net.py:Net", calibrate=False, **JOB).path
    compared = diverged(path, "--with", "backend=tf", "--upto", 1, "--trust-run")
    assert compared["findings"] == []
    assert {"aten.linear.default", "aten.tanh.default", "loss"} <= {row["operation"] for row in compared["layers"]}
