"""``trainer diverge``: equal trainings agree, and planted faults are found."""

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from crosstrain.conformance.runs import run_job, trainer

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]
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
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nTRAINER_PLANTED_FAULT={fault} PYTHONPATH={SITE}:$PYTHONPATH exec {sys.executable} "$@"\n')
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
    assert "give either another RUN or --with" in refused(runs["tf"])
    assert "is no program that can be executed" in refused(runs["tf"], "--with", f"python={tmp_path}/none")
    assert "write SETTING=VALUE" in refused(runs["tf"], "--with", "backend")


def test_nothing_is_left_behind(runs, tmp_path):
    done = trainer(
        "diverge", str(runs["torch"]), "--with", "backend=tf", "--upto", "0", environment={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
