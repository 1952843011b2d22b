"""`trainer watch` during real runs: equal to the runs' final records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import MarkedRun, wait_until

from crosstrain.conformance.runs import trainer
from crosstrain.records.store.run_directory import RunReader

pytestmark = pytest.mark.cluster

TOY = Path(__file__).parent.parent / "toy"


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))


def started(folder, *arguments):
    command = [sys.executable, "-m", "crosstrain.cli.main", "watch", "run", "--out", str(folder), "--wait", "60", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watch_shows_figures_of_run(tmp_path):
    with started(tmp_path, "--json", "--interval", "0.1") as watch:
        options = ["--backend", "toy", "--nodes", "2", "--epochs", "180", "--eval-every", "60epoch", "--sample-interval", "0.2"]
        done = trainer("run", *options, "--out", str(tmp_path), "--name", "run", "--json")
        output, errors = watch.communicate(timeout=60)
    assert done.returncode == watch.returncode == 0, done.stderr + errors
    summary = {key: value for key, value in json.loads(done.stdout).items() if key != "path"}
    documents = [json.loads(line) for line in output.splitlines()]
    steps = [document["step"] for document in documents]
    assert steps == sorted(steps)
    assert documents[-1]["summary"] == summary
    assert steps[-1] == summary["steps"] == documents[-1]["total_steps"] == 180 * 23
    at_work = [document for document in documents if document["state"] == "running" and 0 < document["step"] < summary["steps"]]
    assert len(at_work) >= 3
    assert [node["node"] for node in at_work[-1]["nodes"]] == [0, 1]
    assert all(document["time_left_seconds"] >= 0 for document in at_work)
    assert all(document["progress"] == document["step"] / document["total_steps"] for document in at_work)
    reader = RunReader(tmp_path / "run")
    seen = [record["step"] for document in documents for record in document["evaluations"]]
    assert seen == [record.step for record in reader.evals()][-len(seen) :]
    assert documents[-1]["evaluation"]["accuracy"] == summary["eval"]["accuracy"]
    losses = [loss for record in reader.steps() for loss in record.losses][-20:]
    assert documents[-1]["loss"] == pytest.approx(sum(losses) / 20)


@pytest.mark.thorough
def test_watch_reports_killed_run(tmp_path):
    with started(tmp_path) as watch:
        command = ["run", "--backend", "toy", "--steps", "100000000", "--out", str(tmp_path), "--name", "run"]
        with MarkedRun(command, tmp_path) as run:
            records = tmp_path / "run" / "steps.jsonl"
            wait_until(lambda: records.exists() and records.stat().st_size > 100_000, 60, "updates")
            run.process.send_signal(signal.SIGKILL)
            output, errors = watch.communicate(timeout=60)
            assert (watch.returncode, output) == (1, "")
            assert f"died: its driver process {run.process.pid} on " in errors
            wait_until(lambda: not run.alive(), 30, "the end of its processes")


@pytest.mark.thorough
def test_watch_shows_how_to_open_tensorboard(tmp_path):
    shown = trainer("run", "--backend", "toy", "--steps", "5", "--out", str(tmp_path / "my runs"), "--tensorboard")
    assert f"tensorboard --logdir '{tmp_path}/my runs'" in shown.stderr.splitlines()[0]
    assert "tensorboard --logdir" not in trainer("run", "--backend", "toy", "--steps", "5", "--out", str(tmp_path / "other")).stderr
