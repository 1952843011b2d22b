"""A run that continues with fewer nodes by policy: real processes and kills."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from restart_runs import agent, kill_when, losses, names, train, trains, when

from crosstrain.checkpoint import list_checkpoints, newest_sound
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.launch.driver.restart_policy import Resize, Restart, Stop
from crosstrain.records.store.run_directory import RunReader
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.analysis.diagnosis_text import notes
from crosstrain.report.analysis.fit import observe
from crosstrain.report.compare.caveats import changed_text
from crosstrain.report.runs.run import Run

TOY = Path(__file__).parent.parent / "toy"

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

THREE = {"nodes": 3, "global_batch_size": 32}


@pytest.fixture(autouse=True)
def _toy_known(monkeypatch):
    monkeypatch.syspath_prepend(str(TOY))


class Decides:
    """Decides one thing after another, then that the run ends; keeps what it was asked."""

    def __init__(self, *decisions):
        self.asked = []
        self.decisions = list(decisions)

    def decide(self, failure, attempts, nodes):
        self.asked.append((failure.kind, failure.node, nodes))
        return self.decisions.pop(0) if self.decisions else Stop()


def job(path):
    return json.loads((path / "job.json").read_text())


def restarted(path):
    return next(event for event in RunReader(path).events() if event.event == "run_restarted")


def test_resize_run_continues_without_lost_node(tmp_path):
    """Its updates are equal, its records name the nodes, and scaled figures have a note."""
    cadence = {"checkpoint_every": "400steps", **THREE}
    undisturbed, _ = train(tmp_path, "undisturbed", **cadence)
    policy, path = Decides(Resize(2)), tmp_path / "run"
    killer = when(path, list_checkpoints, lambda: agent(1).kill())
    _, summary = train(tmp_path, "run", policy, calibrate=True, **cadence)
    killer.join()
    assert policy.asked == [("node", 1, 2)]
    assert json.loads((path / "status.json").read_text())["state"] == "succeeded"
    # Fewer ranks add up in another order.
    np.testing.assert_allclose(losses(path), losses(undisturbed), rtol=1e-4)
    assert [record.step for record in RunReader(path).evals()] == [1000, 2000, 3000]

    events = {event.event: event.detail for event in RunReader(path).events()}
    assert events["run_resized"] == {"nodes": [0, 2]}
    assert events["run_restarted"]["nodes"] == [0, 2]
    described = job(path)
    assert (described["nodes"], described["global_batch_size"], described["batch_size"]) == (3, 32, None)
    assert [(task["role"], task["index"], task["node"]) for task in described["cluster"]["tasks"]] == [("worker", 0, 0), ("worker", 1, 2)]
    assert [threads is None for threads in described["threads_per_task"]] == [False, True, False]
    assert described["total_steps"] == 3000
    checkpoint, _ = newest_sound(path)
    assert (checkpoint.meta.workers, checkpoint.meta.job["nodes"]) == (2, 3)

    part = described["segments"][-1]
    began = restarted(path)
    assert part["changed"] == {"nodes": [3, 2]}
    assert (part["step"], part["checkpoint"]) == (began.detail["step"], began.detail["checkpoint"])
    assert part["run_seconds"] <= began.time_seconds
    assert (summary["nodes"], summary["workers"], summary["resumed"]) == (3, 3, 1)
    assert summary["nodes_sharing_cores"] == 2
    shares = summary["time_shares"]
    assert shares["part_began_seconds"] == part["run_seconds"]
    assert [(worker["worker"], worker["node"]) for worker in shares["workers"]] == [(0, 0), (1, 2)]
    assert [worker["updates"] for worker in shares["workers"]] == [3000 - part["step"]] * 2
    assert shares["run"]["train_seconds"] <= summary["train_seconds"]
    assert sum(shares["run"].values()) == pytest.approx(summary["run_seconds"] - part["run_seconds"])
    trained = [node["train_seconds"] for node in summary["per_node"]]
    assert 0 < trained[1] < min(trained[0], trained[2])

    run = Run(path)
    assert (changed_text(run) or "").endswith(
        "(nodes): the figures add up parts under different settings; the settings are those that were asked for."
    )
    explained = diagnose(run).evidence.summary
    assert (explained["nodes"], explained["workers"]) == (2, 2)
    (restarted_note,) = [text for text in notes(diagnose(run)) if "was restarted (once" in text]
    assert f"after update {part['step']:,} on 2 nodes. Cause: " in restarted_note
    with pytest.raises(UsageError, match="nodes"):
        observe(run)


@pytest.mark.slow
def test_resize_node_lost_while_waiting_is_not_used(tmp_path):
    """Without a checkpoint the run starts from scratch, on other machines than the first node."""

    class Waits(Decides):
        def decide(self, *arguments):
            threading.Timer(0.2, agent(0).kill).start()
            return super().decide(*arguments)

    undisturbed, _ = train(tmp_path, "undisturbed", **THREE)
    policy, path = Waits(Resize(2, after_seconds=1.5)), tmp_path / "run"
    kill_when(path, trains)
    _, summary = train(tmp_path, "run", policy, **THREE)
    assert policy.asked == [("task", 1, 3)]
    np.testing.assert_allclose(losses(path), losses(undisturbed), rtol=1e-6)  # sums of two ranks, where there were three
    assert restarted(path).detail == {"step": 0, "epoch": 0, "examples": 0, "nodes": [1, 2]}
    assert {task["node"] for task in job(path)["cluster"]["tasks"]} == {1, 2}
    assert summary["per_node"][1]["train_seconds"] > 0


@pytest.mark.slow
def test_resize_lost_unused_node_changes_nothing(tmp_path):
    policy, path = Decides(Resize(1), Restart()), tmp_path / "run"

    def lose_another_and_then_a_task():
        agent(2).kill()
        time.sleep(0.5)  # the driver has noticed it by then, and trains on
        kill_when(path, trains, "worker-0")

    kill_when(path, trains)
    when(path, lambda path: trains(path) and "run_restarted" in names(path), lose_another_and_then_a_task)
    _, summary = train(tmp_path, "run", policy, **THREE, checkpoint_every="2000steps", steps=20_000, eval_every="end")
    assert policy.asked == [("task", 1, 3), ("task", 0, 2)]
    assert names(path).count("run_resized") == 1
    assert names(path).count("run_restarted") == 2
    assert {task["node"] for task in job(path)["cluster"]["tasks"]} == {0}
    assert summary["steps"] == 20_000


def test_resize_too_few_nodes_left_ends_run(tmp_path):
    path = tmp_path / "run"
    when(path, trains, lambda: agent(1).kill())
    with pytest.raises(RunFailedError, match=r"the agent of node 1 was killed by signal 9; no checkpoint was saved"):
        train(tmp_path, "run", Decides(Resize(2)), steps=1_000_000)
    assert json.loads((path / "status.json").read_text())["task"] == "agent-1"
    assert "run_resized" not in names(path)


def test_resize_too_many_nodes_is_reported_with_failure(tmp_path):
    path = tmp_path / "run"
    kill_when(path, trains)
    with pytest.raises(
        RunFailedError, match=r"the restart policy wants 5 nodes, and there are 2: task worker-1 on node 1 was killed by SIG"
    ):
        train(tmp_path, "run", Decides(Resize(5)), steps=1_000_000)
    assert json.loads((path / "status.json").read_text())["exit_code"] == 1


LOGREG = {
    "model": "logreg",
    "data": "digits",
    "nodes": 3,
    "steps": 600,
    "eval_every": "end",
    "checkpoint_every": "50steps",
}
ASYNC = {"steps": 2000, "mode": "async", "ps": 2, "batch_size": 10}


@pytest.mark.thorough  # of the toy backend without this marker
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_resize_sync_run_makes_equal_updates_on_fewer_nodes(tmp_path, backend):
    undisturbed, _ = train(tmp_path, "undisturbed", **LOGREG, backend=backend, global_batch_size=30)
    path = tmp_path / "run"
    when(path, list_checkpoints, lambda: agent(2).kill())
    _, summary = train(tmp_path, "run", Decides(Resize(2)), **LOGREG, backend=backend, global_batch_size=30)
    assert (summary["steps"], restarted(path).detail["nodes"]) == (600, [0, 1])
    np.testing.assert_allclose(losses(path), losses(undisturbed), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["torch", "tf"])
def test_resize_async_run_keeps_size_of_updates(tmp_path, backend):
    path = tmp_path / "run"
    when(path, list_checkpoints, lambda: agent(2).kill())
    _, summary = train(tmp_path, "run", Decides(Resize(2)), **LOGREG | ASYNC, backend=backend)
    assert summary["steps"] == 2000
    assert [task["node"] for task in job(path)["cluster"]["tasks"] if task["role"] == "worker"] == [0, 1]
    assert {record.worker for record in RunReader(path).steps() if record.step >= restarted(path).detail["step"]} == {0, 1}
    assert max(record.examples / record.count for record in RunReader(path).steps()) == 10
