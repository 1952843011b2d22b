"""Unreachable nodes that have not ended: a link is down, or a process is stopped."""

import json
import os
import secrets
import signal
import time
from contextlib import ExitStack

import pytest
from bridged_hosts import bridged_hosts
from processes import MarkedRun, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

NODES = 3
MORE_SECONDS = 5
"""Within how much time after the time-out the driver has ended, and everything on the node that is cut off.

The driver waits one for further causes, and ending what runs takes longer on a busy machine.
"""


@pytest.fixture
def hosts():
    with bridged_hosts(NODES, "cut") as made:
        yield made


def begun(run, folder):
    steps = folder / "run/steps.jsonl"
    wait_until(lambda: run.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
    assert run.process.poll() is None, run.stderr()


def joined(entered, folder, hosts, *more):
    """The commands of all nodes of a run, which find each other; the driver is on the first."""
    job = ["run", "--nodes", str(NODES), "--epochs", "1000000", "--eval-every", "end", "--out", str(folder), "--name", "run"]
    job += ["--rendezvous", "10.99.0.1:29400", *more]
    secret = {"TRAINER_SECRET": secrets.token_hex(16)}
    return [
        entered.enter_context(MarkedRun([*job, "--node-rank", str(node)], folder, secret, before=hosts.command_prefix(node)))
        for node in range(NODES)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "more", "timeout_seconds"),
    [pytest.param("toy", [], 10, marks=pytest.mark.slow), ("torch", ["--node-timeout", "4"], 4)],
)
def test_node_with_cut_link_is_named_and_ends(tmp_path, hosts, backend, more, timeout_seconds):
    with ExitStack() as entered:
        runs = joined(entered, tmp_path, hosts, "--backend", backend, *more)
        begun(runs[0], tmp_path)
        time.sleep(2)
        hosts.set_link(2, "down")
        cut = time.monotonic()
        assert runs[0].wait(60) == 1
        driver_seconds = time.monotonic() - cut
        wait_until(lambda: not runs[2].alive(), 60, "the end of the node that is cut off")
        agent_seconds = time.monotonic() - cut
        print(f"driver {driver_seconds:.1f} s, node 2 {agent_seconds:.1f} s")
        wait_until(lambda: not any(run.alive() for run in runs), 10, "the end of every process")
        assert [run.wait(10) for run in runs] == [1, 1, 1]
        host = f"node 2 (host {os.uname().nodename}, 10.99.0.3) has not been heard of for {timeout_seconds} s (--node-timeout)"
        assert host in runs[0].stderr()
        assert f"agent of node 2: the driver has not been heard of for {timeout_seconds} s (--node-timeout)" in runs[2].stderr()
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert (status["state"], status["task"], status["exit_code"]) == ("failed", "agent-2", 1)
        assert driver_seconds < timeout_seconds + MORE_SECONDS
        assert agent_seconds < timeout_seconds + MORE_SECONDS


@pytest.mark.thorough
@pytest.mark.parametrize("exchange", ["native", pytest.param("direct", marks=pytest.mark.slow)])
def test_joined_nodes_without_connection_are_named(tmp_path, hosts, exchange):
    """The driver reaches both."""
    with ExitStack() as entered:
        runs = joined(entered, tmp_path, hosts, "--backend", "torch", "--node-timeout", "4", "--exchange", exchange)
        begun(runs[0], tmp_path)
        hosts.lose_route(1, 2)
        cut = time.monotonic()
        assert runs[0].wait(60) == 1
        assert time.monotonic() - cut < 4 + MORE_SECONDS + 2  # with the end of the command
        name = os.uname().nodename
        pair = f"node 1 (host {name}, 10.99.0.2) and node 2 (host {name}, 10.99.0.3) do not reach each other"
        assert f"error: {pair}: nothing that node 1 sends arrives at node 2" in runs[0].stderr()
        wait_until(lambda: not any(run.alive() for run in runs), 20, "the end of every process")


def local(tmp_path, *more):
    job = ["run", "--backend", "toy", "--nodes", "2", "--out", str(tmp_path), "--name", "run", "--eval-every", "end"]
    return MarkedRun([*job, *more], tmp_path)


def steps_done(folder):
    return len((folder / "run/steps.jsonl").read_bytes().splitlines())


@pytest.mark.thorough
def test_stopped_driver_continues_with_local_agents(tmp_path):
    """For more than twice the time after which a silent node is lost.

    At that time the system ends a connection.
    """
    with local(tmp_path, "--epochs", "1000000", "--checkpoint-every", "1000000steps", "--node-timeout", "3") as run:
        begun(run, tmp_path)
        os.kill(run.process.pid, signal.SIGSTOP)
        time.sleep(8)
        before = steps_done(tmp_path)
        os.kill(run.process.pid, signal.SIGCONT)
        wait_until(lambda: steps_done(tmp_path) > before + 3, 60, "further steps")
        time.sleep(4)  # longer than the time-out
        assert run.process.poll() is None, run.stderr()
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(60) == 75, run.stderr()
