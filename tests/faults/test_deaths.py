"""Killed processes: the run ends soon, names the first to die, and leaves nothing."""

import json
import os
import re
import resource
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from processes import MarkedRun, living_in, wait_until

from crosstrain.conformance.runs import trainer

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


def endless(backend, mode, out, *more, nodes=3):
    shape = ["--backend", backend, "--mode", mode, "--nodes", str(nodes)]
    return ["run", *shape, "--epochs", "1000000", "--eval-every", "end", "--out", str(out), *more]


def start(tmp_path, backend="toy", mode="sync", *more, nodes=3):
    temporary_files = tmp_path / "tmp"
    temporary_files.mkdir()
    return MarkedRun(
        endless(backend, mode, tmp_path / "runs", "--name", "run", *more, nodes=nodes), tmp_path, {"TMPDIR": str(temporary_files)}
    )


def training(run, tmp_path):
    """Wait until steps have been recorded."""
    steps = tmp_path / "runs/run/steps.jsonl"
    wait_until(lambda: run.process.poll() is not None or (steps.exists() and steps.stat().st_size > 0), 90, "the first step")
    assert run.process.poll() is None, run.stderr()


def steps_done(tmp_path):
    return len((tmp_path / "runs/run/steps.jsonl").read_bytes().splitlines())


def status(tmp_path):
    return json.loads((tmp_path / "runs/run/status.json").read_text())


def task_pid(run, tmp_path, task):
    records = [json.loads(line) for line in (tmp_path / "runs/run/system.jsonl").read_text().splitlines()]
    return next(entry["pid"] for record in records for entry in record["tasks"] if entry["task"] == task)


@pytest.mark.parametrize(
    ("backend", "mode", "victim"),
    [
        ("toy", "sync", "worker-1"),
        pytest.param("torch", "sync", "worker-1", marks=pytest.mark.thorough),
        ("torch", "async", "worker-2"),
        pytest.param("tf", "sync", "worker-1", marks=pytest.mark.thorough),
        pytest.param("tf", "async", "worker-2", marks=pytest.mark.thorough),
        pytest.param("tf", "async", "ps-0", marks=pytest.mark.slow),
    ],
)
def test_a_killed_task_fails_the_run_and_is_named(tmp_path, backend, mode, victim):
    with start(tmp_path, backend, mode, nodes=2 if victim == "ps-0" else 3) as run:
        training(run, tmp_path)
        os.kill(task_pid(run, tmp_path, victim), signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(10) == 1
        assert time.monotonic() - killed < 10
        assert run.alive() == []
        status_of_run = status(tmp_path)
        assert (status_of_run["state"], status_of_run["task"], status_of_run["exit_code"]) == ("failed", victim, 1)
        assert f"task {victim} " in run.stderr()
        assert "SIGKILL" in run.stderr()


@pytest.mark.thorough
def test_the_log_of_the_task_that_failed_is_shown(tmp_path):
    """The toy's rank 1 notices its killed peer first; the peer is blamed, and its log shown."""
    with start(tmp_path, "toy", "sync") as run:
        training(run, tmp_path)
        log = tmp_path / "runs/run/logs/0/worker-0.log"
        log.write_text(log.read_text() + "the last words of rank 0\n")
        os.kill(task_pid(run, tmp_path, "worker-0"), signal.SIGKILL)
        assert run.wait(10) == 1
        assert status(tmp_path)["task"] == "worker-0"
        assert "SIGKILL" in run.stderr()
        assert "the last words of rank 0" in run.stderr()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("soft", "hard", "strangers", "ends"),
    [
        (600, None, 700, "well"),
        pytest.param(600, 600, 700, "badly", marks=pytest.mark.slow),
    ],
)
def test_idle_connections_end_task_only_at_reported_limit(tmp_path, soft, hard, strangers, ends):
    """gloo accepts any connection, keeps it, and aborts when it can accept no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4 * strangers:
        pytest.skip(f"the system allows {before[1]} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * strangers, before[1]))
    limits = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard or before[1]})); "
    limits += "os.execv(sys.argv[1], sys.argv[1:])"
    job = ["run", "--backend", "torch", "--nodes", "2", "--network", "host", "--epochs", "1000000", "--eval-every", "end"]
    job += ["--checkpoint-every", "1000000steps", "--sample-interval", "0.1", "--out", str(tmp_path / "runs"), "--name", "run"]
    try:
        with MarkedRun(job, tmp_path, before=[sys.executable, "-c", limits]) as run, ExitStack() as connections:
            training(run, tmp_path)
            pid = task_pid(run, tmp_path, "worker-1")
            listening = [
                connection.laddr for connection in psutil.Process(pid).net_connections("tcp") if connection.status == psutil.CONN_LISTEN
            ]
            assert listening
            for address in listening:
                for _ in range(strangers):
                    connections.enter_context(socket.create_connection(address))
            if ends == "well":
                wait_until(lambda: psutil.Process(pid).num_fds() > strangers, 20, "the connections")
                done = steps_done(tmp_path)
                wait_until(lambda: run.process.poll() is not None or steps_done(tmp_path) > done + 3, 20, "further steps")
                assert run.process.poll() is None, run.stderr()
                os.kill(run.process.pid, signal.SIGTERM)
                assert run.wait(30) == 75, run.stderr()
            else:
                assert run.wait(30) == 1
                message = r'error: task worker-1 on node 1 was killed by SIGABRT; its log ends with "what\(\): .*Too many open files"'
                assert re.search(message, run.stderr())
                assert "Too many open files" in status(tmp_path)["cause"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_ctrl_c_ends_cleanly(tmp_path):
    with start(tmp_path) as run:
        training(run, tmp_path)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(15) == 130
        assert "no checkpoint was saved (--checkpoint-every" in run.stderr()
        assert "runs/run" in run.stderr()
        assert status(tmp_path)["state"] == "interrupted"
        assert json.loads((tmp_path / "runs/run/summary.json").read_text())["state"] == "interrupted"
        assert run.alive() == []


def test_a_killed_agent_fails_the_run_and_leaves_nothing(tmp_path):
    with start(tmp_path) as run:
        training(run, tmp_path)
        agent = run.alive("crosstrain.launch.node.agent --node 1")[0]
        os.kill(agent, signal.SIGKILL)
        assert run.wait(10) == 1
        assert status(tmp_path)["task"] == "agent-1"
        wait_until(lambda: not run.alive(), 10, f"the end of {run.alive()}")


@pytest.mark.thorough
def test_frozen_task_stalls_run(tmp_path):
    with start(tmp_path, "toy", "sync", "--stall-timeout", "3") as run:
        training(run, tmp_path)
        os.kill(task_pid(run, tmp_path, "worker-2"), signal.SIGSTOP)
        assert run.wait(20) == 1
        assert "stalled" in run.stderr()
        assert "worker-2" in run.stderr()
        assert run.alive() == []


@pytest.mark.thorough
def test_frozen_chief_is_named_where_heartbeats_end_first(tmp_path):
    with start(tmp_path, "tf", "sync", "--stall-timeout", "100") as run:
        training(run, tmp_path)
        os.kill(task_pid(run, tmp_path, "worker-0"), signal.SIGSTOP)
        assert run.wait(60) == 1
        assert "stopped by a signal: worker-0" in run.stderr()


@pytest.mark.thorough
def test_driver_stopped_beyond_stall_timeout_continues(tmp_path):
    with start(tmp_path, "toy", "sync", "--stall-timeout", "2") as run:
        training(run, tmp_path)
        os.kill(run.process.pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(run.process.pid, signal.SIGCONT)
        steps = tmp_path / "runs/run/steps.jsonl"
        before = steps.stat().st_size
        wait_until(lambda: run.process.poll() is not None or steps.stat().st_size > before + 1000, 30, "further steps")
        assert run.process.poll() is None, run.stderr()
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(15) == 130


@pytest.mark.thorough
def test_frozen_async_worker_is_named_while_others_train(tmp_path):
    with start(tmp_path, "torch", "async", "--stall-timeout", "3", nodes=2) as run:
        training(run, tmp_path)
        steps = tmp_path / "runs/run/steps.jsonl"
        wait_until(lambda: steps.read_bytes().count(b"\n") >= 300, 40, "plans that are long enough for a worker to be left behind")
        pid = task_pid(run, tmp_path, "worker-1")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: run.process.poll() is not None or "worker-1 has finished no step for " in run.stderr(), 40, "the warning")
        assert run.process.poll() is None
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: "worker-1 has finished steps again" in run.stderr(), 40, "the worker's return")
        events = [json.loads(line) for line in (tmp_path / "runs/run/events.jsonl").read_text().splitlines()]
        events = [(line["event"], line["detail"]["worker"]) for line in events if line["event"].startswith("worker_")]
        assert events == [("worker_silent", 1), ("worker_answers", 1)]


@pytest.mark.slow
def test_frozen_async_worker_is_named_in_both_cases(tmp_path):
    """TensorFlow's coordinator does the one or the other, as the work happens to be shared out."""
    with start(tmp_path, "tf", "async", "--stall-timeout", "3") as run:
        training(run, tmp_path)
        os.kill(task_pid(run, tmp_path, "worker-1"), signal.SIGSTOP)
        wait_until(lambda: "worker-1" in run.stderr(), 60, "the name of the worker")
        assert "worker-1 has finished no step for " in run.stderr() or "stopped by a signal: worker-1" in run.stderr()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", pytest.param("tf", marks=pytest.mark.slow)])
def test_frozen_async_worker_stalls_run_if_others_wait(tmp_path, backend):
    with start(tmp_path, backend, "async", "--stall-timeout", "3", "--checkpoint-every", "1s", nodes=2) as run:
        training(run, tmp_path)
        os.kill(task_pid(run, tmp_path, "worker-1"), signal.SIGSTOP)
        assert run.wait(40) == 1
        assert "stall" in run.stderr()
        assert "worker-1" in run.stderr()
        assert run.alive() == []


@pytest.mark.thorough
@pytest.mark.parametrize(("more", "code", "state"), [([], 1, "failed"), (["--on-nan", "continue"], 0, "succeeded")])
def test_a_loss_that_is_not_finite_fails_the_run(tmp_path, more, code, state):
    job = [
        "--backend",
        "toy",
        "--lr",
        "1e30",
        "--weight-decay",
        "1e30",
        "--steps",
        "20",
        "--out",
        str(tmp_path / "runs"),
        "--name",
        "run",
        *more,
    ]
    done = trainer("run", *job)
    assert done.returncode == code
    assert "the loss of step 2 is not a number (number 1 in steps.jsonl, which counts from 0), at the learning rate 1e+30" in done.stderr
    status_of_run = status(tmp_path)
    assert (status_of_run["state"], status_of_run["exit_code"]) == (state, code)
    assert code == 0 or "the loss of step 2 is not a number" in status_of_run["cause"]


@pytest.mark.quick_cases("toy-sync")
@pytest.mark.parametrize(("backend", "mode"), [("toy", "sync"), pytest.param("tf", "async", marks=pytest.mark.slow), ("torch", "async")])
def test_nothing_is_left_after_the_driver_is_killed(tmp_path, backend, mode):
    with start(tmp_path, backend, mode) as run:
        training(run, tmp_path)
        assert len(run.alive()) >= 7
        namespaces = run.namespaces()
        assert len(namespaces) >= 3
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait(5)
        wait_until(lambda: not run.alive(), 10, f"the end of {run.alive()}")
        wait_until(lambda: not living_in(namespaces, run.mark), 1, "the end of whatever lives in the namespaces")


def is_pending(pid, number):
    """Whether a signal sent to a process is still pending; another one would be lost."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))


def test_second_ctrl_c_ends_immediately(tmp_path):
    """With a frozen agent a clean end takes longer."""
    with start(tmp_path) as run:
        training(run, tmp_path)
        os.kill(psutil.Process(task_pid(run, tmp_path, "worker-1")).ppid(), signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGINT)
        wait_until(lambda: not is_pending(run.process.pid, signal.SIGINT), 10, "the first signal to be taken")
        time.sleep(0.1)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(3) == 130
        assert "interrupted twice by the user; ended at once; no checkpoint was saved" in run.stderr()
        wait_until(lambda: not run.alive(), 10, "the end of every process")
        assert status(tmp_path)["state"] == "interrupted"
        assert list((tmp_path / "tmp").iterdir()) == []
