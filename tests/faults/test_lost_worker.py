"""A lost async worker restarts alone while others train; each update is applied once.

Real processes.
"""

import os
import signal

import pytest
from restart_runs import lives, names, pids, train, trains, when

from crosstrain.core.errors import ResumableRunError
from crosstrain.launch.driver.restart_policy import RestartTask
from crosstrain.records.store.run_directory import RunReader

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

ASYNC = {
    "backend": "torch",
    "mode": "async",
    "nodes": 3,
    "ps": 2,
    "data": "digits",
    "batch_size": 10,
    "eval_every": "end",
    "calibrate": False,
    "sample_interval": 0.1,
    "spare_processes": True,
    "max_restarts": 1,
}


def events(path, name):
    return [event for event in RunReader(path).events() if event.event == name]


def check(path, summary, steps, worker):
    """Check that every step occurs once and the others' steps continue, in the first attempt.

    Between the worker's loss and its next step.
    """
    records = list(RunReader(path).steps())
    assert sorted(step for record in records for step in range(record.step, record.step + record.count)) == list(range(steps))
    assert summary["state"] == "succeeded"
    assert summary["steps"] == summary["updates_applied"] == steps
    assert {"attempt_failed", "run_restarted"}.isdisjoint(names(path))
    (failed,), (back,) = events(path, "task_failed"), events(path, "task_restarted")
    assert failed.detail["task"] == back.detail["task"] == f"worker-{worker}"
    assert back.detail["absent_seconds"] == pytest.approx(back.time_seconds - failed.time_seconds, abs=0.5)
    times = [record.time_seconds for record in records if record.worker == worker]
    assert min(times) < failed.time_seconds
    assert max(times) > back.time_seconds
    next_own = min(time for time in times if time > back.time_seconds)
    away = {record.worker for record in records if failed.time_seconds < record.time_seconds < next_own}
    assert away - {worker} == {0, 1, 2} - {worker}
    assert len(pids(path, f"worker-{worker}")) == 2
    assert (summary["restarts"], summary["restart_seconds_lost"], summary["worker_restarts"]) == (1, 0, 1)
    assert summary["worker_absent_seconds"] == pytest.approx(back.detail["absent_seconds"], abs=0.5)


def send(path, number):
    return lambda: os.kill(pids(path, "worker-1")[-1], number)


def all_workers_train(path):
    """Whether each worker has a recorded step: on a busy machine one may still be starting."""
    return (
        trains(path) and all(f'"worker":{worker},' in (path / "steps.jsonl").read_text() for worker in range(3)) and lives(path, "worker-1")
    )


@pytest.mark.parametrize(("backend", "steps"), [("torch", 20_000), pytest.param("tf", 15_000, marks=pytest.mark.thorough)])
def test_killed_worker_restarts_while_others_train(tmp_path, backend, steps):
    path = tmp_path / "run"
    killer = when(path, all_workers_train, send(path, signal.SIGKILL))
    _, summary = train(tmp_path, "run", **{**ASYNC, "backend": backend, "steps": steps})
    killer.join()
    assert "task worker-1 on node 1 was killed by SIGKILL" in events(path, "task_failed")[0].detail["cause"]
    check(path, summary, steps, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "steps"), [("300steps", 40_000), ("end", 100_000)])
def test_stopped_worker_is_killed_and_restarted(tmp_path, saves, steps):
    """Others deliver during its pause; or all wait for it, as a checkpoint does."""
    path = tmp_path / "run"
    stopper = when(path, all_workers_train, send(path, signal.SIGSTOP))
    _, summary = train(tmp_path, "run", steps=steps, stall_timeout=8, checkpoint_every=saves, **ASYNC)
    stopper.join()
    assert events(path, "task_failed")[0].detail["cause"].startswith("stalled: worker-1 has finished")
    check(path, summary, steps, 1)


@pytest.mark.usefixtures("signals_as_before")
def test_interrupt_during_lone_restart_decision_saves_checkpoint(tmp_path):
    class InterruptedPolicy:
        def decide(self, failure, attempts, nodes):
            os.kill(os.getpid(), signal.SIGINT)
            return RestartTask()

    path = tmp_path / "run"
    killer = when(path, all_workers_train, send(path, signal.SIGKILL))
    with pytest.raises(ResumableRunError, match="interrupted by the user; saved last: step-"):
        train(tmp_path, "run", InterruptedPolicy(), **{**ASYNC, "steps": 1_000_000, "checkpoint_every": "500000steps"})
    killer.join()
    assert [event.detail["task"] for event in events(path, "task_failed")] == ["worker-1"]
    assert {"attempt_failed", "run_restarted"}.isdisjoint(names(path))
    assert RunReader(path).status()["exit_code"] == ResumableRunError.exit_code
