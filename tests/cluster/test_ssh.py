"""Nodes started by ssh, on hosts with separate sshds: equal results and located errors."""

import json
import os
import random
import re
import shutil
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import MarkedRun, wait_until
from ssh_hosts import BANNER, GREETING, ssh_hosts

pytestmark = pytest.mark.cluster

NODES = 3


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with ssh_hosts(NODES, tmp_path_factory.mktemp("ssh")) as started:
        yield started


def run(hosts, folder, *more, environment=()):
    job = ["run", "--eval-every", "end", "--out", str(folder), "--name", "run", "--hosts", f"node[0-{NODES - 1}]", *more]
    return MarkedRun(job, folder, {**hosts.environment, **dict(environment)}, before=hosts.command_prefix)


def losses(folder):
    steps = [json.loads(line) for line in (folder / "run/steps.jsonl").read_text().splitlines()]
    return [loss for step in steps for loss in step["losses"]]


def agents(hosts):
    """The processes on the hosts that are no sshd."""
    return hosts.hosts.processes("sshd")


@pytest.mark.thorough
def test_ssh_run_equals_local_run(hosts, tmp_path):
    job = ["--backend", "torch", "--steps", "20", "--batch-size", "30", "--monitor"]
    (tmp_path / "local").mkdir()
    with run(hosts, tmp_path, *job) as remote:
        assert remote.wait(120) == 0, remote.stderr()
        assert GREETING not in remote.stdout() + remote.stderr()
        assert BANNER not in remote.stderr()
    command = [sys.executable, "-m", "crosstrain.cli.main", "run", *job, "--eval-every", "end", "--nodes", str(NODES), "--name", "run"]
    subprocess.run([*command, "--out", str(tmp_path / "local"), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    assert losses(tmp_path) == losses(tmp_path / "local")
    cluster = json.loads((tmp_path / "run/job.json").read_text())["cluster"]
    assert cluster["addresses"] == list(hosts.hosts.addresses)
    assert not agents(hosts)


@pytest.mark.quick_cases("unknown")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--hosts", "node0,nowhere"],
            r"1 of 2 hosts .*\nFAIL  nowhere  ssh  is out of reach.*resolve hostname nowhere.*`ssh nowhere true`",
        ),
        (
            ["--python", "/no/such/python"],
            r"3 of 3 .*\nFAIL  node0  ssh  could not be started: there is no /no/such/python: .*; --python PATH names",
        ),
        (
            ["--python", "/usr/bin/python3"],
            r"ended with exit code 1, as crosstrain is not installed for /usr/bin/python3: .*ModuleNotFoundError.*; type "
            r"`/usr/bin/python3 -m pip install crosstrain==\S+` there, or name another interpreter by --python PATH",
        ),
        (["--hosts", "node1,stranger"], r"1 of 2 hosts .*\nFAIL  stranger  ssh  is out of reach: .*Permission denied \(publickey\)\."),
    ],
    ids=["unknown", "no-interpreter", "no-crosstrain", "not-let-in"],
)
def test_ssh_unreachable_host_is_named_with_reason(hosts, tmp_path, more, message):
    with run(hosts, tmp_path, "--backend", "torch", "--steps", "2", *more) as failed:
        assert failed.wait(60) == 1
        assert re.search(message, failed.stderr()), failed.stderr()
        assert "Traceback" not in failed.stderr()
        assert BANNER not in failed.stderr()
    wait_until(lambda: not agents(hosts), 10, "the end of every agent")


@pytest.mark.clusters
def test_ssh_hosts_are_checked_concurrently(hosts, tmp_path):
    """First one has an unknown key and one cannot reach the others; then all is well."""

    def looked():
        command = [*hosts.command_prefix, sys.executable, "-m", "crosstrain.cli.main", "doctor", "--hosts", "node[0-2]", "--json"]
        done = subprocess.run(command, env={**os.environ, **hosts.environment}, capture_output=True, text=True, timeout=60)
        document = json.loads(done.stdout)
        assert done.returncode == (0 if document["can_train"] else 1)
        return {(finding["host"], finding["what"]): finding for finding in document["findings"]}

    hosts.forget_key(1)
    hosts.hosts.lose_route(2, 0)
    try:
        findings = looked()
    finally:
        hosts.know_keys()
        hosts.hosts.find_route(2, 0)
    assert "Host key verification failed" in findings["node1", "ssh"]["found"]
    assert re.search("10.99.0.3 on eth; does not reach node0: No route to host", findings["node2", "network"]["found"])
    bad = [place for place, finding in findings.items() if finding["state"] == "bad"]
    assert bad == [("node0", "network"), ("node1", "ssh"), ("node2", "network")]
    findings = looked()
    assert {what for (_, what), finding in findings.items() if finding["state"] != "ok"} == {"machine"}  # all of them are this one
    assert {what for _, what in findings} == {"crosstrain", "Python", "tensorflow", "torch", "machine", "clock", "network"}
    assert not agents(hosts)


@pytest.mark.clusters
def test_ssh_custom_data_and_models(hosts, tmp_path):
    """A model on PYTHONPATH is found on every host with the same source.

    Files that are only here are named.
    """
    texts, models = tmp_path / "texts", tmp_path / "models"
    texts.mkdir()
    for language in ("en", "de"):
        words = ["".join(random.choices(string.ascii_lowercase, k=4)) for _ in range(2000)]
        (texts / f"some.{language}").write_text("".join(f"{' '.join(words[at : at + 4])}\n" for at in range(0, 2000, 4)))
    data = ["--data", f"parallel-text:{texts}/some:en-de?held-out=30", "--vocabulary", "320"]
    job = ["--model", "transformer:tiny", *data, "--steps", "2", "--backend", "torch"]
    own_data = {"TRAINER_DATA_CACHE": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    with hosts.hidden(1, texts), run(hosts, tmp_path, *job, environment=own_data) as refused:
        assert refused.wait(100) == 2
    wanted = rf"1 of 3 hosts .*\nFAIL  node1  data .*{texts}.*\n *→ rsync -a --mkpath {texts}/ node1:{texts}/"
    assert re.search(wanted, refused.stderr()), refused.stderr()
    shutil.copytree(Path(__file__).parents[1] / "small_networks", models / "my_networks")
    job = ["--model", "my_networks.normalised", "--steps", "2", "--backend", "torch"]
    environment = {"PYTHONPATH": str(models)}
    with hosts.hidden(2, models), run(hosts, tmp_path, *job, environment=environment) as refused:
        assert refused.wait(60) == 2
    assert re.search(r"1 of 3 hosts .*\nFAIL  node2  model .*my_networks", refused.stderr()), refused.stderr()
    with run(hosts, tmp_path, *job, environment=environment) as remote:
        assert remote.wait(60) == 0, remote.stderr()


@pytest.mark.clusters
@pytest.mark.faults
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_ssh_driver_end_leaves_no_process(hosts, tmp_path, name):
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


@pytest.mark.clusters
@pytest.mark.faults
def test_ssh_cut_link_names_its_host(hosts, tmp_path):
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


@pytest.mark.clusters
@pytest.mark.parametrize(("backend", "mode"), [("tf", "async"), ("tf", "sync"), ("torch", "async")])
def test_ssh_runs_every_backend_and_mode(hosts, tmp_path, backend, mode):
    with run(hosts, tmp_path, "--backend", backend, "--mode", mode, "--steps", "20", "--json") as remote:
        assert remote.wait(120) == 0, remote.stderr()
        assert json.loads(remote.stdout())["steps"] == 20
    assert not agents(hosts)


@pytest.mark.clusters
@pytest.mark.faults
def test_ssh_lost_agent_is_replaced_once_host_is_back(hosts, tmp_path):
    job = ["--backend", "torch", "--epochs", "1000000", "--checkpoint-every", "500steps", "--node-timeout", "4"]
    with run(hosts, tmp_path, *job, "--max-restarts", "2", "--min-nodes", "2", "--global-batch-size", "30") as running:
        path = tmp_path / "run"

        def events(name):
            lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
            records = [json.loads(line) for line in lines if line.endswith("\n")]
            return [event["detail"] for event in records if event["event"] == name]

        def wait_for(name, count, seconds):
            wait_until(lambda: running.process.poll() is not None or len(events(name)) >= count, seconds, f"{count} {name}")
            assert running.process.poll() is None, running.stderr()

        wait_until(lambda: running.process.poll() is not None or list((path / "checkpoints").glob("step-*")), 90, "a checkpoint")
        os.kill(next(pid for pid in agents(hosts) if f"node\0{1}\0" in Path(f"/proc/{pid}/cmdline").read_text()), signal.SIGKILL)
        wait_for("run_restarted", 1, 60)
        assert [detail["node"] for detail in events("node_replaced")] == [1]
        assert "of node 1" in events("attempt_failed")[0]["cause"]
        hosts.hosts.set_link(2, "down")
        try:
            wait_for("run_restarted", 2, 90)
            assert events("run_resized") == [{"nodes": [0, 1]}]
            assert "node 2 (host node2" in events("attempt_failed")[1]["cause"]
        finally:
            hosts.hosts.set_link(2, "up")
        wait_for("run_restarted", 3, 120)
        assert events("run_resized")[-1] == {"nodes": [0, 1, 2]}
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.wait(60) == 75, running.stderr()
        recorded = losses(tmp_path)
        summary = json.loads((path / "summary.json").read_text())
        assert (summary["restarts"], summary["steps"]) == (3, len(recorded))
    wait_until(lambda: not agents(hosts), 15, "the end of agents and tasks")
