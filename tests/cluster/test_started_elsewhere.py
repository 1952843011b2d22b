"""Runs with external launchers: TF_CONFIG or --rendezvous by hand, and a real torchrun."""

import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import MarkedRun, free_ports, wait_until
from strangers import Strangers, listens

pytestmark = pytest.mark.cluster

TOY = Path(__file__).parent.parent / "toy"
BRIEF = ["--epochs", "2", "--global-batch-size", "64", "--eval-every", "end"]


def environment(**more):
    path = os.pathsep.join([str(TOY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TRAINER_SECRET": secrets.token_hex(16), **more}


def by_rendezvous(tmp_path, port, *more):
    return ["run", "--backend", "toy", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--out", str(tmp_path), *more]


def start_all(tmp_path, commands):
    """Start each command of (arguments, environment); wait for all; return the runs in order."""
    runs = [MarkedRun(arguments, tmp_path, more).__enter__() for arguments, more in commands]
    try:
        for run in runs:
            run.wait(100)
    finally:
        for run in runs:
            run.__exit__()
    return runs


def summary_of(tmp_path, run):
    assert run.process.returncode == 0, run.stderr()
    return json.loads((tmp_path / "run/summary.json").read_text())


@pytest.mark.parametrize(
    ("backend", "mode"), [("toy", "sync"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("torch", "async"), ("tf", "sync")))]
)
def test_three_nodes_by_rendezvous(tmp_path, backend, mode):
    shared = environment()
    port = free_ports(1)
    arguments = ["run", "--backend", backend, "--mode", mode, "--nodes", "3", "--out", str(tmp_path), "--name", "run", *BRIEF]
    commands = [([*arguments, "--rendezvous", f"127.0.0.1:{port}", "--node-rank", str(rank)], shared) for rank in (2, 0, 1)]
    runs = start_all(tmp_path, commands)
    summary = summary_of(tmp_path, runs[1])
    assert [run.process.returncode for run in runs] == [0, 0, 0]
    assert (summary["nodes"], summary["workers"], summary["state"]) == (3, 3, "succeeded")
    assert summary["network_source"] == "sockets"
    assert summary["eval"]["accuracy"] > 0.7
    assert {path.name for path in (tmp_path / "run/logs").iterdir()} >= {"0", "1", "2"}
    assert runs[0].stdout() == ""


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "mode"), [("toy", "sync"), pytest.param("tf", "async", marks=pytest.mark.slow)])
def test_tf_config(tmp_path, backend, mode):
    """Hosts of 127.0.0.0/8 with a task or more; async chief and ps are separate processes."""
    ports = itertools.count(free_ports(5))
    workers = [f"127.0.0.{host}:{next(ports)}" for host in ((1, 2, 3) if mode == "sync" else (1, 3))]
    cluster = {"worker": workers}
    if mode == "async":
        cluster |= {"chief": [f"127.0.0.1:{next(ports)}"], "ps": [f"127.0.0.1:{next(ports)}"]}
    shared = environment()
    arguments = ["run", "--backend", backend, "--mode", mode, "--out", str(tmp_path), "--name", "run", *BRIEF]
    commands = [
        (arguments, {**shared, "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})})
        for role, addresses in cluster.items()
        for index in range(len(addresses))
    ]
    runs = start_all(tmp_path, commands)
    assert [run.process.returncode for run in runs] == [0] * len(commands), [run.stderr() for run in runs]
    summary = summary_of(tmp_path, runs[0])
    assert (summary["nodes"], summary["workers"]) == (len(workers), len(workers))
    job = json.loads((tmp_path / "run/job.json").read_text())
    assert f"127.0.0.3:{job['cluster']['ports'][f'worker-{len(workers) - 1}']}" == workers[-1]


@pytest.mark.thorough
def test_a_real_torchrun(tmp_path):
    torchrun = Path(sys.executable).parent / "torchrun"
    assert torchrun.exists(), f"torch is installed without {torchrun}"
    command = [str(torchrun), "--nnodes", "1", "--nproc-per-node", "3", "--master-port", str(free_ports(1)), "-m", "crosstrain.cli.main"]
    command += ["run", "--backend", "torch", "--out", str(tmp_path), "--name", "run", *BRIEF]
    (tmp_path / "tmp").mkdir()
    variables = {**os.environ, **environment(), "TMPDIR": str(tmp_path / "tmp")}  # torchrun leaves folders behind
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["nodes"], summary["workers"], summary["state"]) == (1, 3, "succeeded")


@pytest.mark.thorough
@pytest.mark.parametrize("procs", [1, 2])
def test_the_four_variables_of_torch(tmp_path, procs):
    """Launchers that do not set a local rank: one process per node, unless the job has more."""
    shared = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)))
    arguments = ["run", "--backend", "toy", "--out", str(tmp_path), "--name", "run", "--procs-per-node", str(procs), *BRIEF]
    runs = start_all(tmp_path, [(arguments, {**shared, "RANK": rank}) for rank in "01"])
    assert [run.process.returncode for run in runs] == [0, 0], [run.stderr() for run in runs]
    summary = summary_of(tmp_path, runs[0])
    assert (summary["nodes"], summary["workers"], summary["state"]) == (2 // procs, 2, "succeeded")
    assert runs[1].stdout() == ""


@pytest.mark.thorough
def test_unused_secret_file_variable_is_reported(tmp_path):
    arguments = ["run", "--backend", "toy", "--steps", "2", "--out", str(tmp_path), "--name", "run"]
    (run,) = start_all(tmp_path, [(arguments, environment(TRAINER_SECRET_FILE=str(tmp_path / "none")))])
    assert run.process.returncode == 0, run.stderr()
    assert "TRAINER_SECRET_FILE: this run starts all of its nodes itself" in run.stderr()


def test_a_secret_is_required(tmp_path):
    without = {key: value for key, value in environment().items() if key != "TRAINER_SECRET"}
    arguments = by_rendezvous(tmp_path, free_ports(1), "--node-rank", "0")
    (run,) = start_all(tmp_path, [(arguments, without)])
    assert run.process.returncode == 2
    assert "TRAINER_SECRET" in run.stderr()
    assert list(tmp_path.glob("*-toy-*")) == []


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_while_waiting_for_nodes_ends_run(tmp_path, number):
    """The interrupt ends it before the start timeout."""
    shared = environment()
    arguments = [*by_rendezvous(tmp_path, free_ports(1), "--name", "run", *BRIEF), "--nodes", "3", "--start-timeout", "300"]
    with MarkedRun([*arguments, "--node-rank", "0"], tmp_path, shared) as driver:
        wait_until(lambda: len(driver.alive("launch.node.agent")) == 1 and (tmp_path / "run/status.json").exists(), 60, "the driver")
        time.sleep(1)
        driver.process.send_signal(number)
        assert driver.wait(60) == 130
        assert "error: interrupted by the user, while nodes [1, 2] had not joined yet" in driver.stderr()
        assert not driver.alive()
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"


@pytest.mark.thorough
def test_wrong_secret_is_refused(tmp_path):
    """The stranger ends with 2; the run continues to wait for the right one, and works."""
    port = free_ports(1)
    shared = environment()
    arguments = by_rendezvous(tmp_path, port, "--name", "run", *BRIEF)
    with MarkedRun([*arguments, "--node-rank", "0"], tmp_path, shared) as driver:
        with MarkedRun([*arguments, "--node-rank", "1"], tmp_path, environment()) as stranger:
            assert stranger.wait(30) == 2
            assert "secret" in stranger.stderr()
        wait_until(lambda: "turned away" in driver.stderr(), 5, "the driver's note")
        with MarkedRun([*arguments, "--node-rank", "1"], tmp_path, shared) as right:
            assert right.wait(30) == 0
        assert driver.wait(30) == 0


def test_another_job_is_refused(tmp_path):
    port = free_ports(1)
    shared = environment()
    arguments = by_rendezvous(tmp_path, port, *BRIEF)
    runs = start_all(tmp_path, [([*arguments, "--node-rank", "0"], shared), ([*arguments, "--node-rank", "1", "--lr", "0.5"], shared)])
    assert [run.process.returncode for run in runs] == [2, 2]
    assert all("lr 0.5 instead of 0.05" in run.stderr() for run in runs)


@pytest.fixture
def finished(tmp_path):
    """A run of 20 steps on one machine, in the only folder of runs that has it."""
    here = tmp_path / "here"
    arguments = ["run", "--backend", "toy", "--steps", "20", "--name", "run", "--out", str(here), "--quiet"]
    (run,) = start_all(tmp_path, [(arguments, environment())])
    assert run.process.returncode == 0, run.stderr()
    return here


def resumed(tmp_path, here, *of_node_1):
    """Resume the run on two nodes, the second without a copy of it; return the two commands."""
    shared = environment()
    arguments = ["run", "--resume", "run", "--steps", "+20", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_ports(1)}"]
    driver = ([*arguments, "--node-rank", "0"], {**shared, "TRAINER_OUT": str(here)})
    second = ([*arguments, "--node-rank", "1", *of_node_1], {**shared, "TRAINER_OUT": str(tmp_path / "elsewhere")})
    return start_all(tmp_path, [driver, second])


@pytest.mark.thorough
def test_resume_needs_run_only_on_node_of_driver(tmp_path, finished):
    runs = resumed(tmp_path, finished)
    assert [run.process.returncode for run in runs] == [0, 0], [run.stderr() for run in runs]
    summary = json.loads((finished / "run/summary.json").read_text())
    assert (summary["steps"], summary["nodes"], summary["state"]) == (40, 2, "succeeded")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.thorough
def test_resume_node_with_other_settings_is_refused(tmp_path, finished):
    runs = resumed(tmp_path, finished, "--lr", "0.5", "--steps", "+30")
    assert [run.process.returncode for run in runs] == [2, 2]
    assert all("lr 0.5 instead of not given, steps '+30' instead of '+20'" in run.stderr() for run in runs)
    assert json.loads((finished / "run/summary.json").read_text())["steps"] == 20


@pytest.mark.thorough
def test_a_missing_node_is_named(tmp_path):
    arguments = by_rendezvous(tmp_path, free_ports(1), "--node-rank", "0", "--start-timeout", "2")
    (run,) = start_all(tmp_path, [(arguments, environment())])
    assert run.process.returncode == 1
    assert "nodes [1]" in run.stderr()


HOSTILE = """
import sys
from crosstrain.cli.main import main
from crosstrain.engine.protocol.messages import RawArray
from crosstrain.engine.protocol.node_messages import Log
from crosstrain.launch.node.agent import Agent

def ship(self):
    for name in ("../../../../written", sys.argv[1]):
        self._send(Log(name, arrays={"text": RawArray("|u1", [1], b"x")}))

Agent._ship_logs = ship
sys.exit(main(sys.argv[2:]))
"""
"""A node that knows the secret, trains, and sends logs under names that lead out of the run."""


@pytest.mark.thorough
def test_node_sending_files_for_other_folders_fails_run(tmp_path):
    out, port, shared = tmp_path / "a/b/c/d", free_ports(1), environment()
    arguments = by_rendezvous(out, port, "--name", "run", *BRIEF)
    (tmp_path / "elsewhere").mkdir()
    with MarkedRun([*arguments, "--node-rank", "0"], tmp_path, shared) as driver:
        command = [sys.executable, "-c", HOSTILE, str(tmp_path / "elsewhere/written"), *arguments, "--node-rank", "1"]
        subprocess.run(command, env={**os.environ, **shared}, timeout=60, check=False)
        assert driver.wait(30) == 1
        assert "node 1 sent a log called '../../../../written'" in driver.stderr()
        assert "Traceback" not in driver.stderr()
    assert list(tmp_path.rglob("*written*")) == []
    status = json.loads((out / "run/status.json").read_text())
    assert (status["state"], status["task"], status["exit_code"]) == ("failed", "agent-1", 1)
    assert json.loads((out / "run/summary.json").read_text())["state"] == "failed"


@pytest.mark.thorough
def test_the_remote_agent_ends_with_its_driver(tmp_path):
    port = free_ports(1)
    shared = environment()
    arguments = by_rendezvous(tmp_path, port, "--name", "run", "--epochs", "1000000", "--eval-every", "end")
    node_0, node_1 = (MarkedRun([*arguments, "--node-rank", rank], tmp_path, shared) for rank in "01")
    with node_0 as driver, node_1 as agent:
        steps = tmp_path / "run/steps.jsonl"
        wait_until(lambda: steps.exists() and steps.stat().st_size > 0, 30, "the first step")
        driver.process.kill()
        assert agent.wait(10) == 1
        wait_until(lambda: not driver.alive() and not agent.alive(), 10, "the end of every process")
    shutil.rmtree(tmp_path / "run")


class TestAlone:
    """Tests that need the machine alone: a separate class, so that others need not wait."""

    @pytest.mark.thorough
    @pytest.mark.alone  # the times of two runs are compared
    def test_rendezvous_with_100_strangers_costs_below_two_seconds(self, tmp_path):
        """They connect before the second node, are silent, drip or send garbage, and reconnect."""
        shared = environment()
        seconds = {}
        for strangers in (0, 100):
            port = free_ports(1)
            arguments = by_rendezvous(tmp_path, port, "--name", f"run-{strangers}", "--steps", "4", "--start-timeout", "20")
            with MarkedRun([*arguments, "--node-rank", "0"], tmp_path, shared) as driver, ExitStack() as stack:
                wait_until(lambda port=port: listens(port), 20, "the rendezvous")
                attack = stack.enter_context(Strangers(("127.0.0.1", port), strangers))
                wait_until(
                    lambda attack=attack, least=strangers // 3: attack.turned_away >= least, 20, "the end of those that sent garbage"
                )
                began = time.monotonic()
                with MarkedRun([*arguments, "--node-rank", "1"], tmp_path, shared) as second:
                    assert second.wait(60) == 0, driver.stderr()
                assert driver.wait(30) == 0, driver.stderr()
                seconds[strangers] = time.monotonic() - began
                assert driver.stderr().count("turned away") < 10
        assert seconds[100] < seconds[0] + 2.0
