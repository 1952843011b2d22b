"""Packets lost in one direction while the driver hears all nodes: the victim is named."""

import json
import random
import subprocess
import time
from datetime import datetime

import pytest
from processes import MarkedRun, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

NODES = 3
NODE_TIMEOUT_SECONDS = 5
MORE_SECONDS = 5
"""Within how much time after the time-out the failure has been recorded."""

NOBODY = "02:00:00:00:0f:0f"


def lose(run, dead):
    """Lose packets from the first to the second node of each pair, by a wrong hardware address."""
    for sender, receiver in sorted(dead):
        agent = run.alive(f"crosstrain.launch.node.agent --node {sender} ")[0]
        entry = ["ip", "neigh", "replace", f"10.77.0.{receiver + 1}", "lladdr", NOBODY, "nud", "permanent", "dev", "eth0"]
        done = subprocess.run(["nsenter", f"--net=/proc/{agent}/ns/net", *entry], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no link of a virtual node can be cut here: {done.stderr}")


def drawn(seed):
    """Return the pairs of sender and receiver whose link is dead, and how the cause must begin."""
    draw = random.Random(seed)
    node = draw.randrange(NODES)
    first, second = [candidate for candidate in range(NODES) if candidate != node]
    begins = f"node {node} is cut off from node {first} and node {second}"
    kind = draw.choice(["to", "from", "both", "pair"])
    print(f"--seed {seed}: {kind} {node}")
    if kind == "to":
        return {(first, node), (second, node)}, f"{begins}: nothing that they send arrives at node {node}"
    if kind == "from":
        return {(node, first), (node, second)}, f"{begins}: nothing that node {node} sends arrives there"
    if kind == "both":
        return {(first, node), (node, second)}, begins
    pair = f"node {min(node, first)} and node {max(node, first)} do not reach each other"
    return {(node, first)}, f"{pair}: nothing that node {node} sends arrives at node {first}"


def started(tmp_path, backend, exchange, *more):
    job = ["run", "--backend", backend, "--exchange", exchange, "--nodes", str(NODES), "--network", "isolated"]
    job += [] if "--steps" in more else ["--epochs", "1000000"]
    job += ["--eval-every", "end", "--node-timeout", str(NODE_TIMEOUT_SECONDS), "--out", str(tmp_path), "--name", "run", *more]
    return MarkedRun(job, tmp_path)


def begun(run, tmp_path):
    steps = tmp_path / "run/steps.jsonl"
    wait_until(lambda: run.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
    assert run.process.poll() is None, run.stderr()


slow = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "exchange"),
    [
        ("torch", "native"),
        ("torch", "direct"),
        pytest.param("tf", "native", marks=slow),
        pytest.param("tf", "direct", marks=slow),
    ],
)
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow), pytest.param(3, marks=slow)])
def test_cut_off_node_is_named_in_time(tmp_path, seed, backend, exchange, case):
    dead, message = drawn(seed + case)
    with started(tmp_path, backend, exchange) as run:
        begun(run, tmp_path)
        time.sleep(1)
        lose(run, dead)
        cut = time.time()
        assert run.wait(60) == 1
        status = json.loads((tmp_path / "run/status.json").read_text())
        seconds = datetime.fromisoformat(status["changed_at"]).timestamp() - cut
        print(f"{seconds:.1f} s: {status['cause']}")
        assert status["cause"].startswith(message)
        assert seconds < NODE_TIMEOUT_SECONDS + MORE_SECONDS
        wait_until(lambda: not run.alive(), 10, "the end of every process")


@pytest.mark.thorough
@pytest.mark.parametrize("exchange", ["native", pytest.param("direct", marks=slow)])
def test_restart_over_dead_link_is_reported_with_reason(tmp_path, seed, exchange):
    dead, message = drawn(seed)
    with started(tmp_path, "torch", exchange, "--max-restarts", "2") as run:
        begun(run, tmp_path)
        cut = time.time()
        lose(run, dead)
        assert run.wait(90) == 1
        lines = [line for line in run.stderr().splitlines() if message in line]
        assert [line.rpartition("; the run ")[2] for line in lines[:2]] == [
            "restarts from its beginning, as no checkpoint was saved",
            "starts again",
        ]
        assert lines[2].startswith("error: restarted 2 times, as often as --max-restarts allows: ")
        seconds = time.time() - cut
        assert seconds < 3 * (NODE_TIMEOUT_SECONDS + MORE_SECONDS) + 10, seconds


@pytest.mark.thorough
def test_dead_direction_below_timeout_does_not_end_run(tmp_path, seed):
    dead, _ = drawn(seed)
    with started(tmp_path, "torch", "native") as run:
        begun(run, tmp_path)
        lose(run, dead)
        time.sleep(NODE_TIMEOUT_SECONDS - 2)
        for sender, receiver in dead:
            agent = run.alive(f"crosstrain.launch.node.agent --node {sender} ")[0]
            entry = ["ip", "neigh", "del", f"10.77.0.{receiver + 1}", "dev", "eth0"]
            subprocess.run(["nsenter", f"--net=/proc/{agent}/ns/net", *entry], check=True)
        size = (tmp_path / "run/steps.jsonl").stat().st_size
        wait_until(
            lambda: run.process.poll() is not None or (tmp_path / "run/steps.jsonl").stat().st_size > size + 1000, 40, "further steps"
        )
        assert run.process.poll() is None, run.stderr()


@pytest.mark.slow
def test_saturated_slow_link_does_not_end_run(tmp_path):
    """Its steps take several times the timeout, without any message of a task."""
    more = ["--model", "cnn", "--bandwidth", "20kbit", "--start-timeout", "600", "--stall-timeout", "600", "--node-timeout", "3"]
    with started(tmp_path, "torch", "native", *more, "--steps", "1") as run:
        assert run.wait(300) == 0, run.stderr()
    (record,) = (json.loads(line) for line in (tmp_path / "run/steps.jsonl").read_text().splitlines())
    assert record["seconds"] > 3 * 3
