"""A restart policy of the driver restarts a run by itself: real processes and kills."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from restart_runs import JOB, agent, kill_when, lives, losses, names, pids, train, trains, when

from crosstrain.checkpoint import list_checkpoints
from crosstrain.core.errors import InterruptedRunError, RunFailedError
from crosstrain.core.settings.sources import resolve
from crosstrain.engine.progress import QuietProgress
from crosstrain.launch.driver import driver
from crosstrain.launch.driver.restart_policy import Restart, Stop
from crosstrain.launch.launchers.local import LocalLauncher
from crosstrain.records.store.run_directory import RunReader

TOY = Path(__file__).parent.parent / "toy"

pytestmark = [pytest.mark.faults, pytest.mark.cluster]


@pytest.fixture(autouse=True)
def _toy_known(monkeypatch):
    monkeypatch.syspath_prepend(str(TOY))


class RestartsOnce:
    """Starts a run again after the first task that dies, and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def decide(self, failure, attempts, nodes):
        self.asked.append((failure, list(attempts), nodes))
        return Stop() if attempts or failure.kind != "task" else Restart(after_seconds=0.2)


@pytest.mark.parametrize("saves", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_restart_resumes_from_last_checkpoint_or_beginning(tmp_path, saves):
    cadence = {"checkpoint_every": "400steps"} if saves else {}
    undisturbed, _ = train(tmp_path, "undisturbed", **cadence)
    policy = RestartsOnce()
    path = tmp_path / "run"
    ready = list_checkpoints if saves else trains
    killer = kill_when(path, ready)
    _, summary = train(tmp_path, "run", policy, mllog=True, **cadence)
    killer.join()
    ((failure, attempts, nodes),) = policy.asked
    assert (failure.kind, failure.task, failure.node, attempts, nodes) == ("task", "worker-1", 1, [], 2)
    assert failure.cause.startswith("task worker-1 on node 1 was killed by SIGKILL")
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["exit_code"], summary["steps"]) == ("succeeded", 0, 3000)
    # The toy adds up in the order of its ranks: it repeats to the bit.
    np.testing.assert_array_equal(losses(path), losses(undisturbed))
    assert [record.step for record in RunReader(path).evals()] == [1000, 2000, 3000]
    events = {event.event: event for event in RunReader(path).events()}
    assert events["attempt_failed"].detail == {"cause": failure.cause}
    assert names(path).count("run_started") == 1
    begun = events["run_restarted"]
    assert (begun.detail["step"] > 0, "checkpoint" in begun.detail) == (saves, saves)
    assert begun.time_seconds - events["attempt_failed"].time_seconds >= 0.2
    assert summary["run_seconds"] > begun.time_seconds
    assert (path / "mllog.txt").read_text().count('"run_stop"') == 1


@pytest.mark.thorough
def test_second_failure_ends_run_and_is_named(tmp_path):
    policy, path = RestartsOnce(), tmp_path / "run"
    kill_when(path, trains)
    kill_when(path, lambda path: "run_restarted" in (path / "events.jsonl").read_text(), "worker-0")
    with pytest.raises(RunFailedError, match=r"task worker-0 on node 0 was killed by SIGKILL; no checkpoint was saved"):
        train(tmp_path, "run", policy, steps=1_000_000)
    assert [(failure.task, len(attempts)) for failure, attempts, _ in policy.asked] == [("worker-1", 0), ("worker-0", 1)]
    ((earlier,),) = (attempts for _, attempts, _ in policy.asked if attempts)
    assert (earlier.first_step, earlier.failure.task) == (0, "worker-1")
    assert earlier.seconds > 0
    status = json.loads((path / "status.json").read_text())
    assert (status["state"], status["task"]) == ("failed", "worker-0")
    assert names(path).count("attempt_failed") == 1


class AlwaysRestarts:
    """Starts a run again whatever has failed."""

    def decide(self, failure, attempts, nodes):
        return Restart()


def test_lost_node_ends_run_under_any_restart_policy(tmp_path):
    path = tmp_path / "run"
    when(path, trains, lambda: agent(1).kill())
    with pytest.raises(RunFailedError, match=r"the agent of node 1 was killed by signal 9; no checkpoint was saved"):
        train(tmp_path, "run", AlwaysRestarts(), steps=1_000_000)
    assert json.loads((path / "status.json").read_text())["task"] == "agent-1"


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_with(path, code):
    """Whether the run at `path` has recorded that it was interrupted, and its exit code."""
    status = json.loads((path / "status.json").read_text())
    return (status["state"], status["exit_code"]) == ("interrupted", code)


@pytest.mark.quick_cases("True")
@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("saves", [True, False])
def test_an_interrupt_ends_the_wait_for_another_attempt(tmp_path, saves):
    """With a checkpoint the run can be resumed, and there is nothing newer to save."""

    class Later:
        def decide(self, failure, attempts, nodes):
            threading.Timer(0.5, interrupt).start()
            return Restart(after_seconds=600.0)

    path = tmp_path / "run"
    kill_when(path, list_checkpoints if saves else trains)
    message = "saved last: step-" if saves else "no checkpoint was saved"
    with pytest.raises(InterruptedRunError, match=f"interrupted by the user; {message}") as ended:
        train(tmp_path, "run", Later(), steps=1_000_000, **({"checkpoint_every": "400steps"} if saves else {}))
    assert ended.value.exit_code == (75 if saves else 130)
    assert interrupted_with(path, ended.value.exit_code)


@pytest.mark.usefixtures("signals_as_before")
def test_interrupt_during_restart_leaves_resumable_run(tmp_path):
    path = tmp_path / "run"
    kill_when(path, list_checkpoints)
    when(path, lambda path: trains(path) and names(path).count("tasks_started") == 2, interrupt)
    with pytest.raises(InterruptedRunError, match=r"interrupted by the user; saved last: step-") as ended:
        train(tmp_path, "run", AlwaysRestarts(), steps=1_000_000, checkpoint_every="400steps")
    assert ended.value.exit_code == 75
    assert interrupted_with(path, 75)


@pytest.mark.thorough
@pytest.mark.usefixtures("signals_as_before")
def test_failure_during_interrupted_save_does_not_restart(tmp_path):
    path, policy = tmp_path / "run", RestartsOnce()

    def act():
        victim = pids(path, "worker-1")[-1]
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.5)  # sent steps are done, or wait for this worker
        interrupt()
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)

    when(path, lambda path: list_checkpoints(path) and lives(path, "worker-1"), act)
    with pytest.raises(InterruptedRunError, match=r"before a failure: task worker-1 .*; saved last: step-") as ended:
        train(tmp_path, "run", policy, steps=1_000_000, checkpoint_every="400steps")
    assert ended.value.exit_code == 75
    assert interrupted_with(path, 75)
    assert "run_restarted" not in names(path)


class OnePort(LocalLauncher):
    """Gives worker 0 a port of the test's, as a contract of others would."""

    port = 0

    def start(self):
        channels = super().start()
        channels[0].ports = {"worker-0": self.port}
        return channels


@pytest.mark.thorough
@pytest.mark.parametrize("stays", [True, False])
def test_start_with_taken_port_is_tried_three_times(tmp_path, stays):
    path = tmp_path / "run"
    with socket.create_server(("", 0)) as taken:
        launcher = OnePort(resolve({**JOB, "out": tmp_path, "name": "run", "steps": 20}, {}).job, lambda text: None)
        launcher.port = taken.getsockname()[1]

        def free():
            log = path / "logs/0/worker-0.log"
            while not (log.exists() and "in use" in log.read_text()):
                time.sleep(0.01)
            taken.close()

        def go():
            return driver.run(launcher.job, driver.Invocation(["test"], {}), progress=QuietProgress(), launcher=launcher)

        if stays:
            with pytest.raises(RunFailedError, match=r"3 times a port was taken before a task could listen: .*in use"):
                go()
        else:
            threading.Thread(target=free, daemon=True).start()
            assert go()[1]["steps"] == 20
    state = json.loads((path / "status.json").read_text())["state"]
    assert (names(path).count("start_repeated") == 2, state) == (True, "failed") if stays else (False, "succeeded")


class Broken:
    """A policy that returns or raises its argument."""

    def __init__(self, answer):
        self.answer = answer

    def decide(self, failure, attempts, nodes):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.thorough
@pytest.mark.parametrize(("answer", "words"), [(ValueError("no idea"), "no idea"), (None, "decided None")])
def test_failing_restart_policy_is_logged_and_cause_kept(tmp_path, answer, words):
    kill_when(tmp_path / "run", trains)
    with pytest.raises(RunFailedError, match="worker-1"):
        train(tmp_path, "run", Broken(answer), steps=10**9)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["task"]) == ("failed", "worker-1")
    assert any(
        words in event.detail.get("why", "") for event in RunReader(tmp_path / "run").events() if event.event == "restart_policy_failed"
    )


def test_restart_with_negative_delay_is_refused():
    with pytest.raises(ValueError, match="-5 seconds"):
        Restart(-5.0)
