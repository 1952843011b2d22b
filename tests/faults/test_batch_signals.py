"""Signals of a batch system to every process of a job: only the driver decides."""

import os
import secrets
import signal
from contextlib import ExitStack

import pytest
from processes import MarkedRun, free_ports, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


def begun(run, folder):
    steps = folder / "run/steps.jsonl"
    wait_until(lambda: run.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
    assert run.process.poll() is None, run.stderr()


def local(tmp_path, *more):
    job = ["run", "--backend", "toy", "--nodes", "2", "--out", str(tmp_path), "--name", "run", "--eval-every", "end"]
    return MarkedRun([*job, *more], tmp_path)


def steps_done(folder):
    return len((folder / "run/steps.jsonl").read_bytes().splitlines())


def test_batch_signals_to_all_processes_are_handled_by_driver(tmp_path):
    """The driver saves and ends at the first notice, and further notices are none to hurry."""
    with local(tmp_path, "--epochs", "1000000", "--checkpoint-every", "1000000steps") as run:
        begun(run, tmp_path)
        pids = [*run.alive("launch.node.agent"), *run.alive("engine.task")]
        assert len(pids) == 4
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            for pid in pids:
                os.kill(pid, number)
        before = steps_done(tmp_path)
        wait_until(lambda: steps_done(tmp_path) > before + 3, 60, "further steps")
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            run.process.send_signal(number)
        assert run.wait(60) == 75, run.stderr()
        assert run.alive() == []
        assert list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.thorough
def test_batch_signals_do_not_end_joined_node(tmp_path):
    job = [
        "run",
        "--backend",
        "toy",
        "--nodes",
        "2",
        "--epochs",
        "1000000",
        "--eval-every",
        "end",
        "--rendezvous",
        f"127.0.0.1:{free_ports(1)}",
    ]
    job += ["--out", str(tmp_path), "--name", "run", "--checkpoint-every", "1000000steps"]
    secret = {"TRAINER_SECRET": secrets.token_hex(16)}
    with ExitStack() as entered:
        first, second = (entered.enter_context(MarkedRun([*job, "--node-rank", rank], tmp_path, secret)) for rank in "01")
        begun(first, tmp_path)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            for pid in second.alive():
                os.kill(pid, number)
        before = steps_done(tmp_path)
        wait_until(lambda: steps_done(tmp_path) > before + 3, 60, "further steps")
        message = "trainer: node 1 has joined a run, which its driver alone ends: press Ctrl-C there (node 0, at 127.0.0.1)"
        wait_until(lambda: message in second.stderr(), 10, "what Ctrl-C does on this node")
        first.process.send_signal(signal.SIGUSR2)
        assert (first.wait(60), second.wait(60)) == (75, 75), first.stderr()


@pytest.mark.quick_cases("12")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_batch_signal_during_start_ends_run_cleanly(tmp_path, number):
    with local(tmp_path, "--epochs", "1000000") as run:
        wait_until(lambda: run.process.poll() is not None or len(run.alive()) > 1, 30, "the first child")
        run.process.send_signal(number)
        assert run.wait(60) == 130, run.stderr()
        assert "interrupted" in run.stderr()
        assert run.alive() == []
