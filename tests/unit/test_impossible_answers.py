"""What a leading task answers is believed only where it can be: steps that are outstanding, figures of workers that there are."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.backends.base import EvalResult, StepResult
from crosstrain.core.errors import RunFailedError
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo
from crosstrain.engine.loop import TrainingLoop
from crosstrain.engine.progress.base import QuietProgress
from crosstrain.engine.protocol.codec import eval_to_message, plan_from_message, steps_to_message
from crosstrain.engine.protocol.messages import Message
from crosstrain.models.objectives import CLASSIFICATION

INFO = DataInfo.of_images("toy", (1, 2, 2), 3, {"train": 64, "test": 5}, (0.0,), (1.0,))
BATCH = 8


class RefusedError(RunFailedError):
    """A leading task was given up."""


class Task:
    """A single leading task, made up, that answers at once; `change` turns the answers to a command into others."""

    def __init__(self, mode="sync", change=lambda answers: answers):
        self.mode, self.change, self.answers = mode, change, []

    def __len__(self):
        return 1

    def send(self, command):
        self.answers += self.change([*self.work(command), Message("done", {**tag(command), "seconds": 0.1, "drain_seconds": 0.0})])

    def work(self, command):
        if command.kind == "train":
            plan = plan_from_message(command)
            staleness = None if self.mode == "sync" else np.zeros(plan.count, np.int64)
            worker = None if self.mode == "sync" else 1
            losses = np.ones(plan.count, np.float32)
            yield steps_to_message(StepResult(plan.first_step, losses, plan.count * BATCH, 0.1, worker=worker, staleness=staleness))
        elif command.kind == "evaluate":
            yield eval_to_message(EvalResult("test", {"loss_sum": 1.0, "correct": 3.0, "examples": 5.0}, 0.1, 1))

    def receive(self, timeout_seconds):
        return (0, self.answers.pop(0)) if self.answers else None

    def refuse(self, leader, wrong):
        raise RefusedError(f"{leader}: {wrong}")


class Records:
    """Keeps nothing."""

    def step(self, record):
        assert record.count == len(record.losses)

    def evaluation(self, record):
        assert 0 <= record.metrics["accuracy"] <= 1

    def event(self, event, **detail):
        pass

    def check(self):
        pass


class Saver:
    active_at = 0.0

    def wait(self):
        pass


def tag(command):
    return {"sequence": command["sequence"], "command": command.kind}


def train(task, mode="sync", stall_timeout=5.0):
    shape = {"mode": mode, "nodes": 2 if mode == "async" else 1}
    job = Job(epochs=3, batch_size=BATCH, stall_timeout=stall_timeout, eval_every="1epochs", save_final=False, **shape)
    return TrainingLoop(
        job,
        data=INFO,
        objective=CLASSIFICATION,
        tasks=task,
        recorder=Records(),
        progress=QuietProgress(),
        clock=lambda: 1.0,
        saver=Saver(),
    ).run()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sound_answers_train(mode):
    assert train(Task(mode), mode).updates_reported == 24


def changed(kind, **fields):
    def change(answers):
        return [Message(each.kind, {**each.fields, **fields}, each.arrays) if each.kind == kind else each for each in answers]

    return change


@pytest.mark.parametrize(
    ("change", "mode", "told"),
    [
        (changed("steps", first_step=1_000_000), "sync", "which are not outstanding"),
        (changed("steps", first_step=1), "sync", "which are not outstanding"),
        (changed("steps", examples=10**9), "sync", "1000000000 examples in"),
        (changed("steps", examples=0), "sync", "0 examples in"),
        (changed("steps", worker=0), "sync", "in sync mode"),
        (changed("steps", worker=None), "async", "in async mode"),
        (changed("steps", worker=2), "async", "steps of worker 2, of 2"),
        (changed("evaluated", sums={"loss_sum": 1.0, "correct": 6.0, "examples": 5.0}), "sync", "accuracy 1.2, which lies"),
        (changed("evaluated", sums={"loss_sum": 1.0, "examples": 5.0}), "sync", "sums examples, loss_sum, instead of"),
        (lambda answers: [*answers[:-1], *answers], "sync", "which are not outstanding"),
        (lambda answers: answers[-1:], "sync", "updates that come before it were not reported"),
        (lambda answers: [Message("nothing"), *answers], "sync", "which the training loop does not know"),
    ],
)
def test_what_cannot_be_is_refused_and_the_task_blamed(change, mode, told):
    with pytest.raises(RefusedError, match=rf"^0: .*{told}"):
        train(Task(mode, change), mode)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["first_step", "examples", "worker"]), st.none() | st.integers(0, 2**53), st.sampled_from(["sync", "async"]))
def test_whatever_number_steps_carry_the_loop_trains_on_or_refuses_them(field, value, mode):
    if value is None and field != "worker":
        return
    with suppress(RefusedError):
        train(Task(mode, changed("steps", **{field: value})), mode)
