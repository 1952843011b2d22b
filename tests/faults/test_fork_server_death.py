"""The process that tasks are forked from dies: its tasks end with it, and a run that may go on does so with tasks that agents start."""

import psutil
import pytest
from restart_runs import losses, pids, train, trains, when

from crosstrain.core.errors import RunFailedError

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

JOB = {"backend": "torch", "nodes": 2, "network": "auto", "steps": 2500, "eval_every": "end", "sample_interval": 0.1, "monitor": True}


@pytest.fixture
def kill_server():
    """Have the server of the run killed as soon as it trains; the names of its tasks' parents are kept."""
    killers, parents = [], []

    def act(path):
        parents.extend(psutil.Process(pids(path, f"worker-{worker}")[0]).parent() for worker in range(2))
        for server in set(parents):
            server.kill()

    def start(path):
        killers.append(when(path, lambda run: trains(run) and all(pids(run, f"worker-{worker}") for worker in range(2)), lambda: act(path)))
        return parents

    yield start
    for killer in killers:
        killer.join()


def test_the_run_fails_and_names_a_task_that_was_killed(tmp_path, kill_server):
    parents = kill_server(tmp_path / "run")
    with pytest.raises(RunFailedError, match=r"worker-[01] .*SIGKILL"):
        train(tmp_path, "run", **JOB)
    (server,) = set(parents)  # both were forked by the one server
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_run_that_may_goes_on_with_tasks_that_the_agents_start(tmp_path, kill_server):
    kill_server(tmp_path / "run")
    path, summary = train(tmp_path, "run", max_restarts=1, checkpoint_every="250steps", **JOB)
    assert (summary["state"], summary["restarts"]) == ("succeeded", 1)
    assert len(losses(path)) == 2500
    assert len(pids(path, "worker-0")) == 2
