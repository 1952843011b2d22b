"""Runs inside of Slurm's allocations: srun starts the agents, and nothing outlives the run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import MarkedRun, wait_until
from slurm_cluster import slurm_cluster

pytestmark = pytest.mark.cluster

NODES = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(NODES, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def allocated(cluster, folder, *more, nodes=NODES):
    """`trainer run` in an allocation of its own, in the shell where salloc was typed."""
    job = ["run", "--eval-every", "end", "--out", str(folder), "--name", "run", *more]
    before = [*cluster.command_prefix, "salloc", "--quiet", "--nodes", str(nodes), "--immediate=30"]
    return MarkedRun(job, folder, cluster.environment, before=before)


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def on_nodes(cluster):
    """The processes on the nodes that are none of Slurm's."""
    return cluster.hosts.processes("slurm")


def test_slurm_allocation_is_the_cluster(cluster, tmp_path):
    with allocated(cluster, tmp_path, "--backend", "torch", "--steps", "20", "--json") as run:
        assert run.wait(120) == 0, run.stderr()
        assert json.loads(run.stdout())["steps"] == 20
    job = json.loads((tmp_path / "run/job.json").read_text())
    assert job["nodes"] == NODES
    assert job["sources"]["nodes"] == "SLURM_JOB_NODELIST"
    assert job["cluster"]["addresses"] == list(cluster.hosts.addresses)
    assert not on_nodes(cluster)


@pytest.mark.clusters
def test_slurm_part_of_allocation_runs_and_excess_is_refused(cluster, tmp_path):
    with allocated(cluster, tmp_path, "--backend", "torch", "--nodes", "2", "--steps", "4", "--json", nodes=3) as run:
        assert run.wait(120) == 0, run.stderr()
        assert json.loads(run.stdout())["nodes"] == 2
    with allocated(cluster, tmp_path, "--backend", "torch", "--nodes", "3", "--steps", "4", nodes=2) as run:
        assert run.wait(60) == 2
        assert "nodes: got 3, but Slurm has allocated 2 to this job" in run.stderr()


@pytest.mark.clusters
def test_slurm_nodes_are_checked_without_run(cluster):
    """Problems are reported for srun, which transports the check."""

    def looked(*more, code):
        command = [sys.executable, "-m", "crosstrain.cli.main", "doctor", "--launcher", "slurm", "--json", *more]
        before = [*cluster.command_prefix, "salloc", "--quiet", "--nodes", str(NODES), "--immediate=30"]
        environment = {**os.environ, **cluster.environment, "TRAINER_HOSTS": "nowhere"}  # for other runs
        done = subprocess.run([*before, *command], env=environment, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == code, done.stderr
        document = json.loads(done.stdout)
        assert document["hosts"] == ["node0", "node1", "node2"]
        return {(finding["host"], finding["what"]): finding for finding in document["findings"]}

    findings = looked(code=0)
    assert {what for _, what in findings} == {"crosstrain", "Python", "tensorflow", "torch", "machine", "clock", "network"}
    assert [findings[f"node{node}", "network"]["found"].split()[0] for node in range(NODES)] == list(cluster.hosts.addresses)
    findings = looked("--python", "/no/such/python", code=1)
    assert {(finding["what"], finding["state"]) for finding in findings.values()} == {("srun", "bad")}
    assert "there is no /no/such/python" in findings["node2", "srun"]["found"]
    assert "--python PATH names the interpreter" in findings["node2", "srun"]["found"]
    assert not on_nodes(cluster)


@pytest.mark.clusters
@pytest.mark.faults
@pytest.mark.parametrize("how", ["SIGKILL", "SIGUSR1", "scancel"])
def test_slurm_end_of_run_or_job_leaves_no_process(cluster, tmp_path, how):
    more = ["--backend", "torch", "--epochs", "1000000", "--checkpoint-every", "100000steps"]
    with allocated(cluster, tmp_path, *more) as run:
        steps = tmp_path / "run/steps.jsonl"
        wait_until(lambda: run.process.poll() is not None or (steps.exists() and steps.stat().st_size), 90, "the first step")
        assert run.process.poll() is None, run.stderr()
        assert len(on_nodes(cluster)) >= 2 * NODES
        if how == "scancel":
            (job,) = cluster.do("squeue", "--noheader", "--format", "%i").split()
            cluster.do("scancel", job)
        else:
            (driver,) = [pid for pid in run.alive("crosstrain.cli.main") if b"salloc" not in command_of(pid)]
            os.kill(driver, getattr(signal, how))
        ended = time.monotonic()
        wait_until(lambda: not on_nodes(cluster) and not run.alive(), 40, "the end of agents, tasks and srun")
        print(f"{how}: {time.monotonic() - ended:.1f} s")
        state = json.loads((tmp_path / "run/status.json").read_text())
        if how == "SIGUSR1":
            assert (state["state"], state["exit_code"]) == ("interrupted", 75), run.stderr()
    wait_until(lambda: not cluster.do("squeue", "--noheader"), 60, "the end of the job")


@pytest.mark.clusters
@pytest.mark.faults
def test_slurm_spare_host_replaces_failed_host(cluster, tmp_path):
    """In an allocation that outlives a node; Slurm ends the processes of the failed one."""
    job = ["run", "--backend", "torch", "--nodes", "2", "--epochs", "1000000", "--checkpoint-every", "500steps", "--max-restarts", "3"]
    job += ["--eval-every", "end", "--out", str(tmp_path), "--name", "run"]
    before = [*cluster.command_prefix, "salloc", "--quiet", "--no-kill", "--nodes", "3", "--immediate=30"]
    path = tmp_path / "run"

    def events(name):
        records = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [event["detail"] for event in records if event["event"] == name]

    with MarkedRun(job, tmp_path, cluster.environment, before=before) as run:
        wait_until(lambda: run.process.poll() is not None or list((path / "checkpoints").glob("step-*")), 90, "a checkpoint")
        assert run.process.poll() is None, run.stderr()
        cluster.do("scontrol", "update", "nodename=node1", "state=down", "reason=test")
        wait_until(lambda: run.process.poll() is not None or events("run_restarted"), 90, "the next start")
        assert run.process.poll() is None, run.stderr()
        assert [detail["node"] for detail in events("node_replaced")] == [1]
        addresses = json.loads((path / "job.json").read_text())["cluster"]["addresses"]
        assert addresses == [cluster.hosts.addresses[0], cluster.hosts.addresses[2]]
        (driver,) = [pid for pid in run.alive("crosstrain.cli.main") if b"salloc" not in command_of(pid)]
        os.kill(driver, signal.SIGTERM)
        assert run.wait(60) == 75, run.stderr()
    wait_until(lambda: not cluster.do("squeue", "--noheader") and not on_nodes(cluster), 60, "the end of the job")
    wait_until(lambda: cluster.do("sinfo", "-hNo", "%T").split() == ["idle"] * NODES, 60, "the return of the node")


@pytest.mark.clusters
@pytest.mark.parametrize(("backend", "mode"), [("tf", "async"), ("tf", "sync"), ("torch", "async")])
def test_slurm_runs_every_backend_and_mode(cluster, tmp_path, backend, mode):
    with allocated(cluster, tmp_path, "--backend", backend, "--mode", mode, "--steps", "20", "--json") as run:
        assert run.wait(120) == 0, run.stderr()
        assert json.loads(run.stdout())["steps"] == 20
    assert not on_nodes(cluster)


@pytest.mark.clusters
@pytest.mark.parametrize("how", [[], ["--signal=TERM", "--batch"]], ids=["plain", "by-signal"])
def test_slurm_cancelled_job_saves_and_is_not_requeued(cluster, tmp_path, how):
    """Slurm signals all processes; agents and tasks leave the reaction to the driver."""
    options = ["quickstart", "--nodes", "3", "--time", "10", "--name", "run", "--out", str(tmp_path)]
    more = ["--backend", "torch", "--steps", "100000000", "--checkpoint-every", "1000000steps", "--eval-every", "end"]
    number = cluster.do(sys.executable, "-m", "crosstrain.cli.main", "submit", "slurm", *options, *more).split()[1].rstrip(":")
    run = tmp_path / "run"
    steps = run / "steps.jsonl"
    wait_until(lambda: steps.exists() and steps.stat().st_size, 60, "the first step")
    cluster.do("scancel", *how, number)
    wait_until(lambda: not cluster.do("squeue", "--noheader") and not on_nodes(cluster), 60, "the end of the job")
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("interrupted", 75), (tmp_path / f"run-{number}.log").read_text()
    assert len([*(run / "checkpoints").glob("step-*")]) == 1


@pytest.mark.clusters
def test_slurm_submitted_run_is_requeued_and_completes(cluster, tmp_path):
    """Slurm's signal before the time limit, sent by hand.

    A checkpoint, exit 75, requeued, and the same run resumes.
    """
    more = ["--backend", "torch", "--steps", "3000", "--checkpoint-every", "100000steps", "--eval-every", "end", "--out", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "crosstrain.cli.main",
        "submit",
        "slurm",
        "quickstart",
        "--nodes",
        "3",
        "--time",
        "10",
        "--name",
        "run",
    ]
    number = cluster.do(*command, *more).split()[1].rstrip(":")
    run, log = tmp_path / "run", tmp_path / f"run-{number}.log"
    steps = run / "steps.jsonl"
    wait_until(lambda: steps.exists() and steps.stat().st_size, 60, "the first step")
    cluster.do("scancel", "--signal=USR1", "--batch", number)

    def ended():
        try:
            return json.loads((run / "status.json").read_text())["state"] == "succeeded"
        except FileNotFoundError:
            return False

    wait_until(ended, 200, "the end of the run, in its second job")
    assert "resuming run from step" in log.read_text()
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [step for line in lines for step in range(line["step"], line["step"] + line["count"])] == list(range(3000))
    assert json.loads((run / "summary.json").read_text())["resumed"] == 1
    wait_until(lambda: not cluster.do("squeue", "--noheader"), 90, "the end of the job")


@pytest.mark.clusters
@pytest.mark.timeout(540)
def test_slurm_time_limit_saves_and_next_job_resumes(cluster, tmp_path):
    """A real limit of two minutes, with the signal some time before it.

    Slurm checks its limits about every half minute.
    """
    more = ["--backend", "torch", "--steps", "100000000", "--checkpoint-every", "1000000steps", "--eval-every", "end"]
    limits = ["--nodes", "3", "--time", "2", "--warning", "20", "--name", "run", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "crosstrain.cli.main", "submit", "slurm", "quickstart", *limits, *more]
    number = cluster.do(*command).split()[1].rstrip(":")
    run, log = tmp_path / "run", tmp_path / f"run-{number}.log"

    def events(name):
        try:
            return [event for event in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if event["event"] == name]
        except FileNotFoundError:
            return []

    try:
        wait_until(lambda: events("run_started"), 100, "the first job's training")
        began = time.monotonic()
        wait_until(lambda: json.loads((run / "status.json").read_text())["exit_code"] is not None, 180, "the end of the first job's run")
        assert json.loads((run / "status.json").read_text())["exit_code"] == 75, log.read_text()
        print(f"Slurm's signal has ended the run after {time.monotonic() - began:.0f} s of training")
        (saved,) = (run / "checkpoints").glob("step-*")
        wait_until(lambda: events("run_resumed"), 200, "the second job's training")
    finally:
        cluster.do("scancel", number)
    wait_until(lambda: not cluster.do("squeue", "--noheader") and not on_nodes(cluster), 60, "the end of the job, which is not requeued")
    (resumed,) = events("run_resumed")
    assert resumed["detail"]["checkpoint"] == saved.name
    assert "resuming run from step" in log.read_text()
    assert "DUE TO TIME LIMIT" not in log.read_text()
