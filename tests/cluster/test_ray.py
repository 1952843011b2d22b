"""Nodes of a Ray cluster: equal results, clean ends, and messages about what Ray has not."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from processes import MarkedRun, wait_until
from ray_cluster import ray_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

NODES = 3
ENDLESS = ("--backend", "torch", "--epochs", "1000000", "--node-timeout", "4")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_cluster(NODES, tmp_path_factory.mktemp("ray")) as ray:
        yield ray


def run(cluster, folder, *more, environment=()):
    job = ["run", "--eval-every", "end", "--out", str(folder), "--name", "run", "--launcher", "ray", "--ray-address", cluster.address]
    return MarkedRun([*job, "--nodes", str(NODES), *more], folder, dict(environment), before=cluster.nodes[0].command_prefix)


def losses(folder):
    steps = [json.loads(line) for line in (folder / "run/steps.jsonl").read_text().splitlines()]
    return [loss for step in steps for loss in step["losses"]]


def trains(running, folder):
    """Wait for the first step."""
    steps = folder / "run/steps.jsonl"
    wait_until(lambda: running.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
    assert running.process.poll() is None, running.stderr()


def driver(running):
    """The number of the driver's process: what the command before it has started."""
    return next(pid for pid in running.alive("crosstrain.cli.main") if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(sys.executable))


def nothing_is_left(cluster):
    wait_until(lambda: not cluster.of_run(), 20, "the end of every agent, task and actor")
    state = cluster.state()
    assert (state["groups"], state["actors"]) == ([], [])
    return True


def test_ray_run_equals_local_run(cluster, tmp_path):
    job = ["--backend", "torch", "--steps", "20", "--batch-size", "30", "--monitor"]
    (tmp_path / "local").mkdir()
    with run(cluster, tmp_path, *job) as remote:
        assert remote.wait(120) == 0, remote.stderr()
        assert re.findall("ray|raylet|gcs|pid=", remote.stderr().replace(str(tmp_path), ""), re.IGNORECASE) == []
    command = [sys.executable, "-m", "crosstrain.cli.main", "run", *job, "--eval-every", "end", "--nodes", str(NODES), "--name", "run"]
    subprocess.run([*command, "--out", str(tmp_path / "local"), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    assert losses(tmp_path) == losses(tmp_path / "local")
    described = json.loads((tmp_path / "run/job.json").read_text())["cluster"]
    assert sorted(described["addresses"]) == sorted(cluster.hosts.addresses)
    assert nothing_is_left(cluster)


@pytest.mark.clusters
@pytest.mark.parametrize(("backend", "mode"), [("tf", "async"), ("tf", "sync"), ("torch", "async")])
def test_ray_runs_every_backend_and_mode(cluster, tmp_path, backend, mode):
    with run(cluster, tmp_path, "--backend", backend, "--mode", mode, "--steps", "20", "--json") as remote:
        assert remote.wait(120) == 0, remote.stderr()
        assert json.loads(remote.stdout())["steps"] == 20
    assert nothing_is_left(cluster)


@pytest.mark.clusters
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ray-address", "10.99.0.2:1234", "--start-timeout", "20"], r"Ray: .*10\.99\.0\.2:1234|Ray has not given the nodes within 20 s"),
        (
            ["--threads", "3", "--start-timeout", "5"],
            r"Ray has not given the nodes within 5 s .*: 3 nodes with 3 CPUs each; .*3 nodes, 0 of",
        ),
        (
            ["--nodes", "4", "--start-timeout", "5"],
            r"Ray has not given the nodes .*: 4 nodes with 1 CPU each; the cluster has 3 nodes, 3 of",
        ),
        (["--python", "/no/such/python"], r"3 of 3 hosts .*\nFAIL  node 0  Ray  could not be started: there is no /no/such/python: "),
        (
            ["--python", "/usr/bin/python3"],
            r"FAIL  node 2  Ray  ended with exit code 1, as crosstrain is not installed for /usr/bin/python3: .*; type `/usr/bin/python3 -",
        ),
    ],
    ids=["nobody-there", "too-much", "too-many", "no-interpreter", "no-crosstrain"],
)
def test_ray_unsupported_options_are_reported(cluster, tmp_path, more, message):
    with run(cluster, tmp_path, "--backend", "torch", "--steps", "2", *more) as failed:
        assert failed.wait(90) == 1
        assert re.search(message, failed.stderr()), failed.stderr()
        assert "Traceback" not in failed.stderr()
    assert nothing_is_left(cluster)


@pytest.mark.clusters
def test_ray_cluster_is_checked_without_run(cluster, tmp_path):
    """All of its nodes, also while a run has all of their CPUs; problems are as for hosts."""

    def looked(*more, code=0):
        command = [sys.executable, "-m", "crosstrain.cli.main", "doctor", "--ray-address", cluster.address, "--json", *more]
        done = subprocess.run([*cluster.nodes[0].command_prefix, *command], capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == code, done.stderr
        document = json.loads(done.stdout)
        assert document["hosts"] == [f"node {node}" for node in range(NODES)]
        return {(finding["host"], finding["what"]): finding for finding in document["findings"]}

    with run(cluster, tmp_path, *ENDLESS, "--threads", "2") as training:
        trains(training, tmp_path)
        findings = looked()
        assert {what for _, what in findings} == {"crosstrain", "Python", "tensorflow", "torch", "machine", "clock", "network"}
        assert [findings[f"node {node}", "network"]["found"].split()[0] for node in range(NODES)] == sorted(cluster.hosts.addresses)
        assert training.process.poll() is None
        os.kill(driver(training), signal.SIGTERM)
        training.wait(60)
    findings = looked("--launcher", "ray", "--python", "/no/such/python", code=1)
    assert {(finding["what"], finding["state"]) for finding in findings.values()} == {("Ray", "bad")}
    assert nothing_is_left(cluster)


@pytest.mark.clusters
def test_ray_run_from_outside_of_cluster(cluster, tmp_path):
    """Through Ray's client server; the agents dial the machine that is no node."""
    job = ["run", "--backend", "torch", "--steps", "20", "--nodes", str(NODES), "--out", str(tmp_path), "--name", "run"]
    address = f"ray://{cluster.hosts.addresses[0]}:10001"
    with MarkedRun([*job, "--ray-address", address], tmp_path, before=cluster.hosts.in_network(None)) as remote:
        assert remote.wait(120) == 0, remote.stderr()
    assert nothing_is_left(cluster)


@pytest.mark.clusters
@pytest.mark.faults
def test_a_lost_actor_is_replaced(cluster, tmp_path):
    with run(cluster, tmp_path, *ENDLESS[:2], "--steps", "4000", "--max-restarts", "1") as running:
        trains(running, tmp_path)
        (pid,) = cluster.nodes[2].processes("NodeHolder")
        os.kill(pid, signal.SIGKILL)
        assert running.wait(150) == 0, running.stderr()
        events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
        assert [event["event"] for event in events].count("node_replaced") == 1
    assert nothing_is_left(cluster)


@pytest.mark.clusters
@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_ray_driver_end_leaves_no_process(cluster, tmp_path, name):
    with run(cluster, tmp_path, *ENDLESS, "--checkpoint-every", "100000steps") as running:
        trains(running, tmp_path)
        assert len(cluster.of_run()) >= 3 * NODES
        os.kill(driver(running), getattr(signal, name))
        killed = time.monotonic()
        wait_until(lambda: not cluster.of_run() and not running.alive(), 15, "the end of agents, tasks and actors")
        print(f"{time.monotonic() - killed:.1f} s")
        assert running.wait(5) == (-9 if name == "SIGKILL" else 75)
    assert nothing_is_left(cluster)


@pytest.mark.clusters
@pytest.mark.faults
@pytest.mark.parametrize("victim", ["NodeHolder", "ray_cluster.client", "node.agent"])
def test_ray_killed_process_leaves_no_process(cluster, tmp_path, victim):
    """Ray's actor on the last node, the client next to the driver, or an agent."""
    with run(cluster, tmp_path, *ENDLESS) as running:
        trains(running, tmp_path)
        node = cluster.nodes[0 if victim == "ray_cluster.client" else 2]
        (pid,) = node.processes(victim)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        assert running.wait(30) == 1
        print(f"{victim}: the run has ended after {time.monotonic() - killed:.1f} s: {running.stderr()}")
        if victim == "ray_cluster.client":
            assert "Ray: its client process has ended" in running.stderr()
        else:
            how = "has gone with Ray's actor there: its worker process has died" if victim == "NodeHolder" else "was killed by signal 9"
            assert re.search(rf"the agent of node \d \(host .*, 10\.99\.0\.3\) {how}", running.stderr()), running.stderr()
    assert nothing_is_left(cluster)


@pytest.mark.clusters
@pytest.mark.faults
class TestLostNode:
    def test_ray_dead_node_is_named_and_no_process_remains(self, cluster, tmp_path):
        with run(cluster, tmp_path, *ENDLESS) as running:
            trains(running, tmp_path)
            cluster.hosts.set_link(2, "down")
            died = time.monotonic()
            cluster.nodes[2].end()
            try:
                assert running.wait(60) == 1
                seconds = time.monotonic() - died
                assert re.search(r"\(host .*10\.99\.0\.3\) has not been heard of for 4 s", running.stderr()), running.stderr()
                assert nothing_is_left(cluster)
            finally:
                cluster.hosts.set_link(2, "up")
                cluster.restart(2, tmp_path)
            print(f"noticed after {seconds:.1f} s")
            assert seconds < 4 + 5 + 10  # and the client's leave of a cluster that has not noticed yet
