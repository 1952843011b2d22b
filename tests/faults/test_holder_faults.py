"""The holder of the virtual network is killed: it is noticed, and nothing remains."""

import os
import random
import signal
import time
import uuid
from pathlib import Path

import psutil
import pytest
from processes import MARK, living_in, wait_until
from restart_runs import commands_of_children, train, trains, when

from crosstrain.core.errors import RunFailedError
from crosstrain.core.job import Job
from crosstrain.launch.driver.nodes import Nodes
from crosstrain.launch.driver.task_group import TaskGroup
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.records.store.run_directory import RunReader

TOY = Path(__file__).parent.parent / "toy"

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


def listen(control):
    for _ in range(10):
        control.receive(1.0)


def test_killed_network_holder_is_noticed_and_cleaned_up(monkeypatch):
    monkeypatch.syspath_prepend(str(TOY))
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    launcher = LocalLauncher(Job(backend="toy", nodes=2, epochs=1), print)
    control = TaskGroup(Nodes(launcher.start(), check=launcher.check), [])
    try:
        control.nodes.greet(60)
        if launcher.network is None:
            pytest.skip("no virtual network can be made here")
        holder = launcher.network.holder_pid
        namespaces = {os.stat(f"/proc/{channel.process.pid}/ns/net").st_ino for channel in control.nodes.channels}
        assert living_in(namespaces, mark)
        os.kill(holder, signal.SIGKILL)
        with pytest.raises(RunFailedError, match=rf"the holder of the virtual network \(process {holder}\) was killed by signal 9"):
            listen(control)
        control.end_tasks(0.0, graceful=False)
        control.nodes.finish(1)
    finally:
        launcher.close()
    wait_until(lambda: not living_in(namespaces, mark), 5, "the end of whatever lives in the namespaces")


@pytest.fixture
def kill_holder():
    """Kill the run's holder after some seconds of training; its process is recorded."""
    killers, killed = [], []

    def act(after):
        time.sleep(after)
        holders = [child for child, command in commands_of_children() if "crosstrain.launch.virtual.namespace_holder" in command]
        killed.extend(holders)
        for holder in holders:
            holder.kill()

    def start(path, after):
        killers.append(when(path, trains, lambda: act(after)))
        return killed

    yield start
    for killer in killers:
        killer.join()


@pytest.mark.thorough
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killed_network_holder_restart_uses_new_network(tmp_path, kill_holder, seed, case):
    draw = random.Random(f"{seed} {case}")
    limits = draw.choice([{}, {"bandwidth": "200mbit"}, {"cores_per_node": (0.9,)}])
    shape = {"backend": "torch", "mode": draw.choice(["sync", "async"]), "nodes": draw.choice([2, 3]), "network": "isolated", **limits}
    steps = 1500 if shape["mode"] == "sync" else 10_000
    job = {
        **shape,
        "steps": steps,
        "eval_every": "end",
        "max_restarts": 1,
        "checkpoint_every": "100steps",
    }
    killed = kill_holder(tmp_path / "run", after=draw.uniform(0, 1))
    path, summary = train(tmp_path, "run", **job)
    (holder,) = killed
    assert (summary["state"], summary["restarts"]) == ("succeeded", 1)
    assert sum(len(record.losses) for record in RunReader(path).steps()) == steps
    events = list(RunReader(path).events())
    (cause,) = [event.detail["cause"] for event in events if event.event == "attempt_failed"]
    assert cause == f"the holder of the virtual network (process {holder.pid}) was killed by signal 9"
    assert sorted(event.detail["node"] for event in events if event.event == "node_replaced") == list(range(shape["nodes"]))
    assert not [child for child in psutil.Process().children() if child.pid == holder.pid]
