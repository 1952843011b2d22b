"""Pods of an Indexed Job as local processes: effect of a loss, and resumption.

The same command resumes the run.
"""

import json
import os
import secrets
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from processes import MarkedRun, free_ports, wait_until
from restart_runs import losses

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

QUIET = ["--eval-every", "end", "--no-tensorboard", "--no-calibrate", "--no-monitor"]
JOB = ["--nodes", "3", *QUIET]


@pytest.fixture(autouse=True)
def _toy_installed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent / "toy"))


class Pods:
    """Three pods that can be started repeatedly with the same command and variables."""

    def __init__(self, folder, stack, *more):
        self.folder = folder
        self.stack = stack
        self.run = folder / "run"
        self.arguments = ["run", *JOB, "--name", "run", "--out", str(folder), "--resume", "auto", *more]
        self.shared = {"TRAINER_SECRET": secrets.token_hex(16), "TRAINER_RENDEZVOUS": f"localhost:{free_ports(1)}"}

    def pod(self, index):
        return self.stack.enter_context(MarkedRun(self.arguments, self.folder, {**self.shared, "JOB_COMPLETION_INDEX": str(index)}))

    def start(self, indices=(2, 1, 0)):
        """Start pods, by default all, not in their order: a cluster keeps none."""
        return {index: self.pod(index) for index in indices}

    def checkpoints(self):
        return sorted(path.name for path in self.run.glob("checkpoints/step-*"))

    def await_new_checkpoint(self, pods):
        before = self.checkpoints()
        wait_until(lambda: pods[0].process.poll() is not None or self.checkpoints()[-1:] > before[-1:], 60, "another checkpoint")
        assert pods[0].process.poll() is None, pods[0].stderr()


@pytest.fixture
def pods_of(tmp_path):
    """Makes the pods of a run with further options."""
    with ExitStack() as stack:
        yield lambda *more: Pods(tmp_path, stack, *more)


def kill(pod):
    for pid in pod.alive():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    pod.process.wait()


def codes(pods, without=()):
    return {index: pod.wait(60) for index, pod in sorted(pods.items()) if index not in without}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "steps"),
    [("toy", 5000), ("torch", 1500)],
)
def test_lost_pod_ends_others_with_75_and_resumes(pods_of, tmp_path, backend, steps):
    job = ["--backend", backend, "--steps", str(steps)]
    pods = pods_of(*job, "--checkpoint-every", f"{steps // 5}steps")
    first = pods.start()
    pods.await_new_checkpoint(first)
    kill(first[1])
    assert codes(first, without=[1]) == {0: 75, 2: 75}, first[0].stderr()
    assert "the agent of node 1" in first[0].stderr()
    status = json.loads((pods.run / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["task"]) == ("failed", 75, "agent-1")

    second = pods.start()
    pods.await_new_checkpoint(second)
    kill(second[0])  # the driver, with all of its state
    assert codes(second, without=[0]) == {1: 75, 2: 75}, second[1].stderr()

    third = pods.start((0, 1))
    wait_until(lambda: len(third[1].alive()) > 1, 60, "the tasks of pod 1, which has joined")
    kill(third[1])  # before the last one has come
    again = pods.start((1, 2))
    assert codes({0: third[0], **again}) == {0: 0, 1: 0, 2: 0}, third[0].stderr()
    assert "trainer: node 1 has " in third[0].stderr()  # gone, or been started again, whichever the driver sees first
    assert "resuming run from step" in third[0].stderr()

    arguments = ["run", *JOB, *job, "--name", "alone", "--out", str(tmp_path), "--network", "host"]
    with MarkedRun(arguments, tmp_path) as undisturbed:
        assert undisturbed.wait(60) == 0, undisturbed.stderr()
    recorded = losses(pods.run)
    assert len(recorded) == steps
    np.testing.assert_array_equal(recorded, losses(tmp_path / "alone"))


@pytest.mark.parametrize("evicted", [[2], pytest.param([0, 1, 2], marks=pytest.mark.slow)])
def test_evicted_pod_saves_checkpoint(pods_of, evicted):
    """One is evicted, or all of them at the end of their Job: neither is a second interrupt."""
    pods = pods_of("--backend", "toy", "--steps", "1000000", "--checkpoint-every", "1000000steps")
    started = pods.start()
    wait_until(lambda: (pods.run / "steps.jsonl").exists() and (pods.run / "steps.jsonl").stat().st_size, 60, "the first step")
    for index in evicted:
        started[index].process.send_signal(signal.SIGTERM)
    assert codes(started) == {0: 75, 1: 75, 2: 75}, started[0].stderr()
    assert len(pods.checkpoints()) == 1
    assert json.loads((pods.run / "status.json").read_text())["state"] == "interrupted"
