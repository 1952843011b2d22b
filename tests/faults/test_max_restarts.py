"""``--max-restarts``: tasks and agents are killed at random, and the result is unchanged."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from restart_runs import agent, kill_when, losses, names, pids, train, when

from crosstrain.checkpoint import list_checkpoints
from crosstrain.core.errors import ResumableRunError, RunFailedError
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.records.store.run_directory import RunReader

TOY = Path(__file__).parent.parent / "toy"

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

CADENCE = {"checkpoint_every": "300steps", "sample_interval": 0.1, "steps": 6000, "eval_every": "end"}


@pytest.fixture(autouse=True)
def _toy_known(monkeypatch):
    monkeypatch.syspath_prepend(str(TOY))


def restarted(path):
    return [event.detail for event in RunReader(path).events() if event.event == "run_restarted"]


def newest_step(path):
    """Number of updates of a run's newest checkpoint; 0 without one."""
    return max((int(checkpoint.name.rpartition("-")[2]) for checkpoint in list_checkpoints(path)), default=0)


@pytest.mark.slow  # test_injected_faults.py does it with torch
def test_two_kills_leave_losses_unchanged_and_are_counted(tmp_path):
    undisturbed, _ = train(tmp_path, "undisturbed", **CADENCE)
    path = tmp_path / "run"
    first = kill_when(path, list_checkpoints)
    second = kill_when(path, lambda run: len(pids(run, "worker-0")) == 2 and newest_step(run) > 1200, "worker-0")
    _, summary = train(tmp_path, "run", max_restarts=2, **CADENCE)
    first.join()
    second.join()
    # The toy adds up in the order of its ranks: it repeats to the bit.
    np.testing.assert_array_equal(losses(path), losses(undisturbed))
    lost = [detail["seconds_lost"] for detail in restarted(path)]
    assert len(lost) == 2
    assert all(0 < seconds < 60 for seconds in lost)
    assert summary["restarts"] == 2
    assert summary["restart_seconds_lost"] == pytest.approx(sum(lost))
    assert summary["state"] == "succeeded"


@pytest.mark.thorough
def test_an_agent_that_is_killed_is_replaced(tmp_path):
    path = tmp_path / "run"
    killer = when(path, list_checkpoints, lambda: agent(1).kill())
    _, summary = train(tmp_path, "run", max_restarts=1, **CADENCE)
    killer.join()
    assert {"attempt_failed", "node_replaced", "run_restarted"} <= set(names(path))
    assert (summary["restarts"], summary["restart_seconds_lost"]) == (1, restarted(path)[0]["seconds_lost"])
    assert summary["steps"] == losses(path).size == 6000


def test_failure_beyond_max_restarts_ends_run_with_it(tmp_path):
    path = tmp_path / "run"
    first = kill_when(path, list_checkpoints)
    second = kill_when(path, lambda run: len(pids(run, "worker-1")) == 2)
    with pytest.raises(
        RunFailedError, match=r"restarted once, as often as --max-restarts allows: task worker-1 on node 1 was killed by SIGKILL"
    ):
        train(tmp_path, "run", max_restarts=1, **CADENCE)
    first.join()
    second.join()
    assert json.loads((path / "status.json").read_text())["task"] == "worker-1"


class Unreachable(LocalLauncher):
    """Nodes that are lost cannot be had back until `reachable`."""

    reachable = threading.Event()

    def replace(self, node):
        return super().replace(node) if self.reachable.is_set() else None


@pytest.mark.thorough
def test_run_continues_on_remaining_nodes_until_all_return(tmp_path, monkeypatch):
    import restart_runs

    monkeypatch.setattr(restart_runs, "LocalLauncher", Unreachable)
    monkeypatch.setattr("crosstrain.launch.driver.nodes.RETRY_SECONDS", 0.5)
    Unreachable.reachable.clear()
    path = tmp_path / "run"
    slow = {**CADENCE, "nodes": 3, "global_batch_size": 32, "steps": 12_000}
    killer = when(path, list_checkpoints, lambda: agent(2).kill())
    back = when(path, restarted, Unreachable.reachable.set)
    _, summary = train(tmp_path, "run", max_restarts=1, min_nodes=2, **slow)
    killer.join()
    back.join()
    event_names = names(path)
    assert (
        event_names.index("run_resized")
        < event_names.index("node_replaced")
        < len(event_names) - 1 - event_names[::-1].index("run_resized")
    )
    nodes = [event.detail["nodes"] for event in RunReader(path).events() if event.event == "run_resized"]
    assert nodes == [[0, 1], [0, 1, 2]]
    assert summary["steps"] == losses(path).size == 12_000
    assert summary["restarts"] == 2


class OneByOne(LocalLauncher):
    """Nodes that are lost cannot be had back until they are among `reachable`."""

    reachable: ClassVar[set[int]] = set()

    def replace(self, node):
        return super().replace(node) if node in self.reachable else None


def resized(path):
    return [event.detail["nodes"] for event in RunReader(path).events() if event.event == "run_resized"]


@pytest.mark.thorough
@pytest.mark.usefixtures("signals_as_before")
def test_two_lost_nodes_are_each_used_on_return(tmp_path, monkeypatch):
    import restart_runs

    monkeypatch.setattr(restart_runs, "LocalLauncher", OneByOne)
    monkeypatch.setattr("crosstrain.launch.driver.nodes.RETRY_SECONDS", 0.5)
    OneByOne.reachable.clear()
    path = tmp_path / "run"
    threads = [
        when(path, list_checkpoints, lambda: [lost.kill() for lost in [agent(1), agent(2)]]),
        when(path, lambda run: resized(run)[-1:] == [[0]], lambda: OneByOne.reachable.add(2)),
        when(path, lambda run: resized(run)[-1:] == [[0, 2]], lambda: OneByOne.reachable.add(1)),
        when(path, lambda run: resized(run)[-1:] == [[0, 1, 2]], lambda: os.kill(os.getpid(), signal.SIGTERM)),
    ]
    with pytest.raises(ResumableRunError):
        train(tmp_path, "run", max_restarts=2, min_nodes=1, **{**CADENCE, "nodes": 3, "global_batch_size": 32, "steps": 10_000_000})
    for thread in threads:
        thread.join()
    assert resized(path)[-3:] == [[0], [0, 2], [0, 1, 2]]
