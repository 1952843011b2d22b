"""``--resume auto``: one command that starts a run or resumes it, until it has succeeded."""

import json
import os
import secrets
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import MarkedRun, free_ports, wait_until

from crosstrain.records.store.heartbeat import Heartbeat

pytestmark = pytest.mark.cluster

STEPS = 6000


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent / "toy"))


def command(folder, *more):
    job = ["run", "--backend", "toy", "--steps", str(STEPS), "--checkpoint-every", "1500steps", "--eval-every", "end", "--no-monitor"]
    return [*job, "--out", str(folder), "--name", "run", "--resume", "auto", *more]


def steps_done(folder):
    lines = (folder / "run/steps.jsonl").read_text().splitlines()
    return [step for line in lines for entry in [json.loads(line)] for step in range(entry["step"], entry["step"] + entry["count"])]


@pytest.mark.thorough
def test_resume_auto_same_command_starts_and_resumes(tmp_path):
    with MarkedRun(command(tmp_path), tmp_path) as first:
        wait_until(lambda: first.process.poll() is not None or list(tmp_path.glob("run/checkpoints/step-*")), 60, "a checkpoint")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    with MarkedRun(command(tmp_path), tmp_path) as second:
        assert second.wait(60) == 0, second.stderr()
        assert "resuming run from step" in second.stderr()
    assert len(steps_done(tmp_path)) == STEPS
    records = (tmp_path / "run/steps.jsonl").read_bytes()
    with MarkedRun([*command(tmp_path), "--json"], tmp_path) as third:
        assert third.wait(60) == 0, third.stderr()
        assert json.loads(third.stdout())["steps"] == STEPS
        assert "the run run has succeeded already" in third.stderr()
    assert (tmp_path / "run/steps.jsonl").read_bytes() == records


@pytest.mark.thorough
def test_resume_auto_without_checkpoint_starts_from_scratch(tmp_path):
    with MarkedRun([*command(tmp_path), "--checkpoint-every", "5000steps"], tmp_path) as first:
        wait_until(lambda: all((tmp_path / "run" / name).exists() for name in ("job.json", "status.json")), 60, "the run directory")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    with MarkedRun(command(tmp_path), tmp_path) as second:
        assert second.wait(60) == 0, second.stderr()
        assert "ended before its first checkpoint and restarts" in second.stderr()
    assert len(steps_done(tmp_path)) == STEPS
    assert (tmp_path / "run.before-1/job.json").exists()


@pytest.mark.thorough
def test_resume_auto_joining_nodes_need_no_run_name(tmp_path):
    """Node 1 has no run at all, and types the same as node 0, the first time and the second."""
    port, checkpoints = free_ports(1), tmp_path / "node0/run/checkpoints"
    for number in range(2):
        folders = [tmp_path / "node0", tmp_path / f"node1-{number}"]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        secret = {"TRAINER_SECRET": secrets.token_hex(16)}
        with ExitStack() as entered:
            place = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
            runs = [
                entered.enter_context(MarkedRun(command(folder, *place, "--node-rank", str(node)), folder, secret))
                for node, folder in enumerate(folders)
            ]
            if number == 0:
                wait_until(lambda: list(checkpoints.glob("step-*")), 60, "a checkpoint")
                os.kill(runs[0].process.pid, signal.SIGTERM)
            assert [run.wait(60) for run in runs] == ([75, 75] if number == 0 else [0, 0]), [run.stderr() for run in runs]
    assert len(steps_done(tmp_path / "node0")) == STEPS


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="another host's name is given by root")
def test_resume_auto_on_another_host_only_after_driver_ended(tmp_path):
    """The other host is another name of this one; its driver is visible in the run directory."""
    elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]
    with MarkedRun([*command(tmp_path), "--steps", "100000000"], tmp_path, before=elsewhere) as first:
        wait_until(lambda: first.process.poll() is not None or list(tmp_path.glob("run/checkpoints/step-*")), 60, "a checkpoint")
        with MarkedRun(command(tmp_path), tmp_path) as second:
            assert second.wait(60) == 2, second.stderr()
            assert f"the run run is still at work (process {first.process.pid} on elsewhere)" in second.stderr()
        assert first.process.poll() is None
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    done = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("run/checkpoints/step-*"))
    with MarkedRun([*command(tmp_path), "--steps", str(done + 1000)], tmp_path) as third:
        assert third.wait(120) == 0, third.stderr()
        assert "the driver on elsewhere has given no sign of life for 30 s and is taken for gone" in third.stderr()
        assert "resuming run from step" in third.stderr()
    assert steps_done(tmp_path) == list(range(done + 1000))
    assert not (tmp_path / "run/heartbeat").exists()


def test_driver_of_run_resumed_elsewhere_stops_writing(tmp_path):
    """Like a driver that was cut off from the disk for long."""
    with MarkedRun([*command(tmp_path), "--steps", "100000000"], tmp_path) as run:
        wait_until(lambda: run.process.poll() is not None or list(tmp_path.glob("run/checkpoints/step-*")), 60, "a checkpoint")
        other_heartbeat = Heartbeat(tmp_path / "run")
        status = (tmp_path / "run/status.json").read_bytes()
        assert run.wait(60) == 1, run.stderr()
        assert "another process has gone on with this run, and this one ends" in run.stderr()
        assert run.alive() == []
        assert (tmp_path / "run/status.json").read_bytes() == status
        other_heartbeat.check()
        other_heartbeat.close()
