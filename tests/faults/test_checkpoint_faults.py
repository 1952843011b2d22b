"""Checkpoints whose writing fails: the run continues or can be resumed."""

import json
import os
import signal

import pytest
from processes import MarkedRun, wait_until

from crosstrain.checkpoint import find_checkpoint, list_checkpoints
from crosstrain.conformance.runs import read_run, trainer
from crosstrain.records.store.run_directory import RunReader

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

TOO_SMALL = "4m"
LARGE = ("--data", "synthetic-images:size=64,classes=100,train=60,test=10", "--batch-size", "5")
"""A model of 4.9 MB: the reserve of the last save is too small for it as well."""

"""Size of a disk on which no checkpoint has room."""


@pytest.fixture
def either_way(way, monkeypatch):
    """States are read from the task's memory, as on one machine, or sent by it, as from another."""
    if way == "sent":
        monkeypatch.setenv("TRAINER_PEER_MEMORY", "off")


READ = pytest.mark.parametrize("way", ["read", pytest.param("sent", marks=pytest.mark.slow)])
"""Cases that depend on the driver's files: the origin of its data makes little difference."""


def endless(path, *more):
    options = ["--steps", "100000000", "--checkpoint-every", "1steps", "--keep", "3", "--eval-every", "end", "--no-tensorboard", "--quiet"]
    return ["run", *options, *more] if more else ["run", *options, "--backend", "toy", "--name", path.name, "--out", str(path.parent)]


def drafts(path):
    return list((path / "checkpoints").glob(".step-*.draft-*"))


def kill_while_saving(path, folder, *more):
    """Kill the driver while it writes a checkpoint; return whether a draft remains."""
    with MarkedRun(endless(path, *more), folder) as run:
        before = len(list_checkpoints(path)) and find_checkpoint(path)[0].meta.step

        def saved():
            steps = [int(checkpoint.name[5:]) for checkpoint in list_checkpoints(path) if checkpoint.name.startswith("step-")]
            return any(step > before + 2 for step in steps)

        wait_until(lambda: (saved() and drafts(path)) or run.process.poll() is not None, 60, "a checkpoint in the making")
        assert run.process.poll() is None, run.stderr()
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait(5)
        wait_until(lambda: not run.alive(), 10, "the end of every process")
    return bool(drafts(path))


@pytest.mark.thorough
@READ
@pytest.mark.usefixtures("either_way")
def test_kill_during_save_resumes_from_sound_checkpoint(tmp_path):
    path = tmp_path / "run"
    hit = kill_while_saving(path, tmp_path)
    for _ in range(10):
        if hit:
            break
        hit = kill_while_saving(path, tmp_path, "--resume", str(path))
    assert hit, "no kill fell into a save"
    checkpoint, damaged = find_checkpoint(path)
    assert damaged == []
    step = checkpoint.meta.step
    done = trainer("run", "--quiet", "--resume", str(path), "--steps", str(step + 20))
    assert done.returncode == 0, done.stderr
    resumed = read_run(path)
    covered = [number for record in resumed.steps for number in range(record.step, record.step + record.count)]
    assert sorted(covered) == list(range(step + 20))
    assert drafts(path) == []
    assert find_checkpoint(path)[0].meta.step == step + 20


@pytest.mark.thorough
@READ
@pytest.mark.usefixtures("either_way")
def test_task_killed_during_save_fails_run_without_draft(tmp_path):
    """The checkpoint has half a gigabyte, and the kill comes in the middle."""
    path = tmp_path / "run"
    large = ["--backend", "torch", "--model", "alexnet", "--data", "synthetic-images:size=63,train=8,test=2", "--batch-size", "1"]
    with MarkedRun(endless(path, *large, "--name", "run", "--out", str(tmp_path)), tmp_path) as run:
        saved = lambda: len(list_checkpoints(path)) > 1  # noqa: E731
        wait_until(lambda: (saved() and drafts(path)) or run.process.poll() is not None, 120, "a checkpoint in the making")
        assert run.process.poll() is None, run.stderr()
        os.kill(run.alive("crosstrain.engine.task")[-1], signal.SIGKILL)
        assert run.wait(30) == 1
        assert "was killed by SIGKILL" in run.stderr()
        assert "was not saved" not in run.stderr()
        wait_until(lambda: not run.alive(), 10, "the end of every process")
    assert drafts(path) == []
    assert find_checkpoint(path)[1] == []


@pytest.mark.thorough
@READ
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("disk", [TOO_SMALL], indirect=True)
def test_full_disk_fails_saves_and_run_only_at_end(disk):
    options = [*LARGE, "--steps", "100", "--checkpoint-every", "40steps", "--no-tensorboard", "--name", "run", "--out", str(disk)]
    done = trainer("run", "--backend", "toy", "--json", *options)
    assert done.returncode == 1, done.stderr
    assert "the checkpoint after step 40 was not saved (No space left on device" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the last checkpoint, after step 100 (No space left on device")
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["steps"]) == ("failed", 100)
    assert summary["checkpoints"]["saved"] == 0
    assert summary["checkpoints"]["failed"] == 3
    failed = [record.detail for record in RunReader(disk / "run").events() if record.event == "checkpoint_failed"]
    assert [detail["step"] for detail in failed] == [40, 80, 100]
    assert all("No space left" in detail["cause"] for detail in failed)
    assert list_checkpoints(disk / "run") == []


@pytest.mark.thorough
@pytest.mark.parametrize("disk", [TOO_SMALL], indirect=True)
def test_interrupt_on_full_disk_reports_missing_checkpoint(disk):
    path = disk / "run"
    options = ["--backend", "toy", *LARGE, "--name", "run", "--out", str(disk), "--no-tensorboard"]
    with MarkedRun(["run", *options, "--steps", "100000000", "--checkpoint-every", "60s"], disk) as run:
        wait_until(lambda: (path / "steps.jsonl").exists() and (path / "steps.jsonl").stat().st_size > 0, 60, "the first step")
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(15) == 130
        assert "could not be saved; no checkpoint was saved. Run" in run.stderr()


@pytest.mark.thorough
def test_second_signal_ends_immediately(tmp_path):
    with MarkedRun(["run", "--backend", "toy", "--nodes", "2", "--steps", "100000000", "--checkpoint-every", "60s",
                    "--name", "run", "--out", str(tmp_path)], tmp_path) as run:  # fmt: skip
        steps = tmp_path / "run/steps.jsonl"
        wait_until(lambda: steps.exists() and steps.stat().st_size > 0, 60, "the first step")
        task = run.alive("crosstrain.engine.task")[-1]
        os.kill(task, signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        wait_until(lambda: "saving a checkpoint" in run.stderr(), 5, "the answer to the first signal")
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(3) == 130
        wait_until(lambda: not run.alive(), 10, "the end of every process")
