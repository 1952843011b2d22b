"""The fork server dies: its tasks end, and a run with restarts uses tasks of the agents."""

import random
import time

import psutil
import pytest
from restart_runs import losses, pids, train, trains, when

from crosstrain.core.errors import RunFailedError
from crosstrain.records.store.run_directory import RunReader

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

JOB = {"backend": "torch", "nodes": 2, "network": "auto", "steps": 2500, "eval_every": "end", "sample_interval": 0.1, "monitor": True}


@pytest.fixture
def kill_server():
    """Kill the run's fork server as soon as it trains; the tasks' parents are recorded."""
    killers, parents = [], []

    def act(path, after):
        time.sleep(after)
        parents.extend(psutil.Process(pids(path, f"worker-{worker}")[0]).parent() for worker in range(2))
        for server in set(parents):
            server.kill()

    def start(path, after=0.0):
        ready = lambda run: trains(run) and all(pids(run, f"worker-{worker}") for worker in range(2))  # noqa: E731
        killers.append(when(path, ready, lambda: act(path, after)))
        return parents

    yield start
    for killer in killers:
        killer.join()


@pytest.mark.thorough
def test_the_run_fails_and_names_the_server_that_was_killed(tmp_path, kill_server):
    parents = kill_server(tmp_path / "run")
    with pytest.raises(RunFailedError) as failed:
        train(tmp_path, "run", **JOB)
    (server,) = set(parents)  # both were forked by the one server
    assert str(failed.value).startswith(
        f"the fork server (process {server.pid}) was killed by signal 9, which ended the tasks that it had forked"
    )
    assert RunReader(tmp_path / "run").status()["task"] == "fork-server"
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_dead_fork_server_restart_uses_tasks_of_agents(tmp_path, kill_server):
    kill_server(tmp_path / "run")
    path, summary = train(tmp_path, "run", max_restarts=1, checkpoint_every="250steps", **JOB)
    assert (summary["state"], summary["restarts"]) == ("succeeded", 1)
    assert len(losses(path)) == 2500
    assert len(pids(path, "worker-0")) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_dead_fork_server_is_named_and_run_restarts(tmp_path, kill_server, seed, mode):
    """Also where a single worker could restart: all tasks have ended."""
    job = {**JOB, "mode": mode, "steps": 2500 if mode == "sync" else 20_000}
    kill_server(tmp_path / "run", after=random.Random(seed).uniform(0, 2))
    path, summary = train(tmp_path, "run", max_restarts=1, checkpoint_every="250steps", **job)
    assert (summary["state"], summary["restarts"]) == ("succeeded", 1)
    (cause,) = [event.detail["cause"] for event in RunReader(path).events() if event.event == "attempt_failed"]
    assert cause.startswith("the fork server (process ")
