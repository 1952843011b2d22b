"""Nodes that are started by ssh, on hosts with an sshd of their own: the same results as here, and errors that say what is wrong where."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import MarkedRun, living_in, wait_until
from ssh_hosts import GREETING, ssh_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.long]

NODES = 3


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with ssh_hosts(NODES, tmp_path_factory.mktemp("ssh")) as found:
        yield found


def run(hosts, folder, *more):
    job = ["run", "--eval-every", "end", "--out", str(folder), "--name", "run", "--hosts", f"node[0-{NODES - 1}]", *more]
    return MarkedRun(job, folder, hosts.environment, before=hosts.before)


def losses(folder):
    steps = [json.loads(line) for line in (folder / "run/steps.jsonl").read_text().splitlines()]
    return [loss for step in steps for loss in step["losses"]]


def agents(hosts):
    """The processes on the hosts that are no sshd."""
    commands = {pid: command_of(pid) for pid in living_in(hosts.hosts.numbers(), "none")}
    return [pid for pid, command in commands.items() if command and b"sshd" not in command]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_same_result_as_here(hosts, tmp_path):
    job = ["--backend", "torch", "--steps", "20", "--batch-size", "30", "--monitor"]
    (tmp_path / "local").mkdir()
    with run(hosts, tmp_path, *job) as there:
        assert there.wait(120) == 0, there.stderr()
        assert GREETING not in there.stdout() + there.stderr()
    command = [sys.executable, "-m", "crosstrain.cli.main", "run", *job, "--eval-every", "end", "--nodes", str(NODES), "--name", "run"]
    subprocess.run([*command, "--out", str(tmp_path / "local"), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    assert losses(tmp_path) == losses(tmp_path / "local")
    cluster = json.loads((tmp_path / "run/job.json").read_text())["cluster"]
    assert cluster["addresses"] == list(hosts.hosts.addresses)
    assert not agents(hosts)


def test_what_is_wrong_is_said(hosts, tmp_path):
    """An unknown host, a host whose key is not the known one, an interpreter that is not there, and one without crosstrain."""
    cases = [
        (["--hosts", "node0,nowhere"], r"node 1 \(host nowhere\) is out of reach.*Could not resolve hostname nowhere.*ssh nowhere true"),
        (["--python", "/no/such/python"], r"could not be started: there is no such program.*/no/such/python.*--python"),
        (["--python", "/usr/bin/python3"], r"ended with exit code 1.*No module named|ended with exit code 1.*ModuleNotFoundError"),
    ]
    for number, (more, message) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        with run(hosts, folder, "--backend", "torch", "--steps", "2", *more) as failed:
            assert failed.wait(60) == 1
            assert re.search(message, failed.stderr()), failed.stderr()
            assert "Traceback" not in failed.stderr()
    hosts.forget_key(1)
    try:
        with run(hosts, tmp_path, "--backend", "torch", "--steps", "2") as failed:
            assert failed.wait(60) == 1
            assert re.search(r"node 1 \(host node1\) is out of reach.*Host key verification failed", failed.stderr()), failed.stderr()
    finally:
        hosts.know_keys()
    wait_until(lambda: not agents(hosts), 10, "the end of every agent")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_nothing_is_left_when_the_driver_ends(hosts, tmp_path, name):
    with run(hosts, tmp_path, "--backend", "torch", "--epochs", "1000000", "--checkpoint-every", "100000steps") as running:
        steps = tmp_path / "run/steps.jsonl"
        wait_until(lambda: running.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
        assert running.process.poll() is None, running.stderr()
        assert len(agents(hosts)) >= 2 * NODES
        os.kill(running.process.pid, getattr(signal, name))
        killed = time.monotonic()
        wait_until(lambda: not agents(hosts) and not running.alive(), 10, "the end of agents, tasks and ssh")
        print(f"{time.monotonic() - killed:.1f} s")
        assert running.wait(5) == (-9 if name == "SIGKILL" else 75)


@pytest.mark.faults
@pytest.mark.alone  # times are compared
def test_a_cut_link_is_the_named_hosts(hosts, tmp_path):
    with run(hosts, tmp_path, "--backend", "torch", "--epochs", "1000000", "--node-timeout", "4") as running:
        steps = tmp_path / "run/steps.jsonl"
        wait_until(lambda: running.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
        assert running.process.poll() is None, running.stderr()
        hosts.hosts.set_link(2, "down")
        try:
            cut = time.monotonic()
            assert running.wait(60) == 1
            noticed_seconds = time.monotonic() - cut
            assert f"node 2 (host node2, {os.uname().nodename}, 10.99.0.3) has not been heard of for 4 s" in running.stderr()
            wait_until(lambda: not agents(hosts), 15, "the end of what is cut off")
            ended_seconds = time.monotonic() - cut
        finally:
            hosts.hosts.set_link(2, "up")
        print(f"noticed after {noticed_seconds:.1f} s, all ended after {ended_seconds:.1f} s")
        assert noticed_seconds < 4 + 5
        assert ended_seconds < 4 + 5


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "mode"), [("tf", "async"), ("tf", "sync"), ("torch", "async")])
def test_every_backend_and_mode(hosts, tmp_path, backend, mode):
    with run(hosts, tmp_path, "--backend", backend, "--mode", mode, "--steps", "20", "--json") as there:
        assert there.wait(120) == 0, there.stderr()
        assert json.loads(there.stdout())["steps"] == 20
    assert not agents(hosts)
