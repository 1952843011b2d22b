"""`trainer sweep` as a user meets it: points, failures, interruptions and continuation."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from processes import MarkedRun, wait_until

from crosstrain.conformance.runs import trainer
from crosstrain.records.store.run_directory import RunReader

pytestmark = pytest.mark.cluster

TOY = Path(__file__).parent.parent / "toy"
EXAMPLES = 1437


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])]))


def sweep(out, *arguments):
    return trainer("sweep", "--backend", "toy", "--no-tensorboard", "--out", str(out), "--name", "s", *arguments)


def document(out):
    return json.loads((out / "s/sweep.json").read_text())


def states(out):
    return [point["state"] for point in document(out)["points"]]


@pytest.mark.slow
def test_sweep_runs_each_point_once(tmp_path):
    done = sweep(tmp_path, "--grid", "batch_size=16,32", "--repeats", "2", "--epochs", "1", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    points = json.loads(done.stdout)["points"]
    names = [f"batch_size={size},seed={seed}" for seed in (0, 1) for size in (16, 32)]
    assert [point["name"] for point in points] == names
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == sorted([*names, "sweep.json"])
    for point in points:
        reader = RunReader(point["path"])
        assert reader.state() == "succeeded"
        assert {field: reader.job()[field] for field in ("batch_size", "seed")} == point["settings"]
        assert point["summary"]["examples"] == reader.summary()["examples"] == EXAMPLES
    changed = [(tmp_path / "s" / name / "status.json").stat().st_mtime_ns for name in names]

    again = sweep(tmp_path, "--grid", "batch_size=16,32", "--repeats", "2", "--epochs", "1", "--tables")
    assert again.returncode == 0, again.stderr
    assert "4 points, 0 to run" in again.stderr
    assert [(tmp_path / "s" / name / "status.json").stat().st_mtime_ns for name in names] == changed
    rows = [line.split() for line in again.stdout.splitlines() if line.lstrip().startswith(("16 ", "32 "))]
    assert [row[0] for row in rows[:2]] == ["16", "32"]

    refused = sweep(tmp_path, "--grid", "batch_size=16,64", "--repeats", "2", "--epochs", "2")
    assert refused.returncode == 2
    for difference in ("batch_size=64,seed=0 is new", "batch_size=32,seed=0 is missing", "epochs was 1, now 2"):
        assert difference in refused.stderr or "more)" in refused.stderr
    assert "batch_size=64,seed=0 is new" in refused.stderr
    assert "another --name" in refused.stderr


@pytest.mark.slow
def test_sweep_grid_of_file_is_recorded(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("backend = 'toy'\ntensorboard = false\nsteps = 5\n[sweep]\ncases = [{batch_size = 8}, {global_batch_size = 9}]\n")
    done = trainer("sweep", str(path), "--out", str(tmp_path), "--name", "s", "--json")
    assert done.returncode == 0, done.stderr
    assert [point["summary"]["examples"] for point in json.loads(done.stdout)["points"]] == [40, 45]
    message = "describes a sweep"
    assert message not in done.stderr
    base = trainer("run", "--config", str(path), "--out", str(tmp_path), "--name", "base")
    assert (base.returncode, base.stderr.count(message)) == (0, 1)
    assert f"`trainer sweep {path}`" in base.stderr
    assert RunReader(tmp_path / "base").summary()["batch_size"] == 32


@pytest.mark.thorough
def test_sweep_failed_point_is_recorded_and_next_runs(tmp_path):
    arguments = ["--grid", "start_timeout=0.01,60", "--steps", "20"]
    done = sweep(tmp_path, *arguments)
    assert done.returncode == 1
    assert states(tmp_path) == ["failed", "succeeded"]
    failed = document(tmp_path)["points"][0]
    assert failed["cause"] == RunReader(tmp_path / "s/start_timeout=0.01").status()["cause"]
    assert f"1 of 2 points did not succeed: start_timeout=0.01 ({failed['cause']})" in done.stderr
    assert "trainer sweep --resume" in done.stderr
    assert RunReader(tmp_path / "s/start_timeout=60").summary()["steps"] == 20
    assert "60" in done.stdout

    again = trainer("sweep", "--resume", str(tmp_path / "s"))
    assert again.returncode == 1
    assert "2 points, 1 to run" in again.stderr
    assert [path.name for path in (tmp_path / "s/.earlier").iterdir()] == ["start_timeout=0.01-1"]
    assert document(tmp_path)["points"][0]["attempts"] == 2


@pytest.mark.thorough
def test_sweep_point_without_run_directory_has_command_output(tmp_path):
    (tmp_path / "empty").mkdir()
    done = sweep(tmp_path, "--grid", "data=mnist", "--data-dir", str(tmp_path / "empty"), "--steps", "5")
    assert done.returncode == 1
    (point,) = document(tmp_path)["points"]
    assert (point["state"], point["exit_code"]) == ("failed", 2)
    assert str(tmp_path / "empty") in point["cause"]


@pytest.mark.thorough
@pytest.mark.faults
def test_sweep_killed_and_interrupted_is_finished(tmp_path):
    """The sweep is killed in its first point and interrupted in the second; both resume."""
    epochs = 100
    arguments = ["sweep", "--backend", "toy", "--no-tensorboard", "--out", str(tmp_path), "--name", "s", "--grid", "batch_size=32,24"]
    arguments += ["--epochs", str(epochs), "--eval-every", "end", "--checkpoint-every", "1epoch"]
    runs = [tmp_path / "s" / f"batch_size={size}" for size in (32, 24)]

    def saved(started, path):
        wait_until(lambda: started.process.poll() is not None or any(path.glob("checkpoints/step-*")), 60, f"a checkpoint of {path.name}")
        assert started.process.poll() is None, started.stderr()

    with MarkedRun(arguments, tmp_path) as killed:
        saved(killed, runs[0])
        killed.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not killed.alive(), 10, "the end of what the sweep had started")
    assert states(tmp_path) == ["running", "waiting"]

    with MarkedRun(arguments, tmp_path) as interrupted:
        busy = trainer_when_at_work(interrupted, tmp_path, arguments)
        saved(interrupted, runs[1])
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.wait(30) == 130
        assert interrupted.alive() == []
        assert f"trainer sweep --resume {tmp_path / 's'}" in interrupted.stderr()
    assert (busy.returncode, "at work already" in busy.stderr) == (2, True)
    assert states(tmp_path) == ["succeeded", "interrupted"]
    assert document(tmp_path)["state"] == "interrupted"

    done = trainer("sweep", "--resume", str(tmp_path / "s"), "--json")
    assert done.returncode == 0, done.stderr
    assert states(tmp_path) == ["succeeded", "succeeded"]
    for path in runs:
        summary = RunReader(path).summary()
        assert summary["resumed"] >= 1
        assert summary["examples"] == epochs * EXAMPLES
        counted = [update for record in RunReader(path).steps() for update in range(record.step, record.step + record.count)]
        assert sorted(counted) == list(range(summary["steps"]))
    assert not (tmp_path / "s/.earlier").exists()


def trainer_when_at_work(started, out, arguments):
    """Start the same sweep again while the first one runs."""
    wait_until(lambda: started.process.poll() is not None or document(out)["pid"] == started.process.pid, 30, "the sweep")
    return trainer(*arguments)
