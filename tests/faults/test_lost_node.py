"""A lost or frozen node: the run ends within seconds, names it and what can be resumed."""

import json
import os
import secrets
import shlex
import signal
import time
from contextlib import ExitStack
from datetime import datetime

import pytest
from processes import MarkedRun, free_ports, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster, pytest.mark.alone]  # seconds until a failure is recorded are counted

STALL_SECONDS = 2


@pytest.fixture
def nodes(tmp_path):
    """The two commands of a run on two nodes by rendezvous; a checkpoint has been saved."""
    job = ["run", "--backend", "toy", "--nodes", "2", "--epochs", "1000000", "--eval-every", "end", "--checkpoint-every", "500steps"]
    job += ["--rendezvous", f"127.0.0.1:{free_ports(1)}", "--stall-timeout", str(STALL_SECONDS), "--out", str(tmp_path), "--name", "run"]
    secret = {"TRAINER_SECRET": secrets.token_hex(16)}
    with ExitStack() as runs:
        first, second = (runs.enter_context(MarkedRun([*job, "--node-rank", rank], tmp_path, secret)) for rank in "01")
        saved = tmp_path / "run/checkpoints"
        wait_until(lambda: first.process.poll() is not None or list(saved.glob("step-*")), 60, "the first checkpoint")
        assert first.process.poll() is None, first.stderr()
        yield first, second


def assert_reported(run, folder, *words):
    """Check that the failure names the node, and that the message shows how to resume."""
    message = run.stderr().splitlines()[-1]
    status = json.loads((folder / "run/status.json").read_text())
    assert (status["state"], status["task"], status["exit_code"]) == ("failed", "agent-1", 1)
    for word in words:
        assert word in message
        assert word in status["cause"]
    assert "saved last: step-0000" in message
    assert f"To go on: trainer run --resume {shlex.quote(str(folder / 'run'))}" in message


def test_a_node_that_is_lost_ends_the_run_within_three_seconds(tmp_path, nodes):
    first, second = nodes
    for pid in second.alive():
        os.kill(pid, signal.SIGKILL)
    lost = time.monotonic()
    assert first.wait(20) == 1
    assert time.monotonic() - lost < 3
    assert_reported(first, tmp_path, "the agent of node 1 (host ", "127.0.0.1) has gone")
    assert first.alive() == []


def end_time(folder):
    """Recorded time of the run's end, in seconds of time.time().

    The command itself may end later.
    """
    return datetime.fromisoformat(json.loads((folder / "run/status.json").read_text())["changed_at"]).timestamp()


@pytest.mark.thorough
def test_frozen_node_is_named_once_run_stalls(tmp_path, nodes):
    first, second = nodes
    os.kill(second.process.pid, signal.SIGSTOP)
    frozen = time.time()
    assert first.wait(40) == 1
    assert end_time(tmp_path) - frozen < STALL_SECONDS + 2
    assert_reported(first, tmp_path, "stalled", "the agent of node 1 (host ", "127.0.0.1) does not answer")
    assert first.alive() == []
    os.kill(second.process.pid, signal.SIGCONT)
    assert second.wait(10) == 1
    wait_until(lambda: not second.alive(), 10, "the end of the frozen node's processes")


@pytest.mark.thorough
def test_a_frozen_agent_of_this_machine_is_ended(tmp_path):
    (tmp_path / "tmp").mkdir()
    job = ["run", "--backend", "toy", "--nodes", "3", "--epochs", "1000000", "--stall-timeout", str(STALL_SECONDS)]
    with MarkedRun([*job, "--out", str(tmp_path), "--name", "run"], tmp_path, {"TMPDIR": str(tmp_path / "tmp")}) as run:
        steps = tmp_path / "run/steps.jsonl"
        wait_until(lambda: steps.exists() and steps.stat().st_size, 60, "the first step")
        os.kill(run.alive("crosstrain.launch.node.agent --node 1")[0], signal.SIGSTOP)
        frozen = time.time()
        assert run.wait(40) == 1
        assert end_time(tmp_path) - frozen < STALL_SECONDS + 2
        assert "the agent of node 1 does not answer; no checkpoint was saved" in run.stderr()
        wait_until(lambda: not run.alive(), 5, f"the end of {run.alive()}")
        assert list((tmp_path / "tmp").iterdir()) == []
