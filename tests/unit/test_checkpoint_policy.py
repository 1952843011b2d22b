"""After which updates a run saves, and with which figures: the real loop, a made-up task, and a saver that keeps what it is told."""

from __future__ import annotations

import numpy as np
import pytest

from crosstrain.backends.base import EvalResult, StepResult
from crosstrain.core.job import Job
from crosstrain.data.base import DataInfo
from crosstrain.data.sampler import run_sampler
from crosstrain.engine.checkpoint_policy import CheckpointPolicy
from crosstrain.engine.epochs import DataCursor, EpochIndex
from crosstrain.engine.loop import TrainingLoop
from crosstrain.engine.loop_interfaces import ResumePoint
from crosstrain.engine.progress.base import QuietProgress
from crosstrain.engine.protocol.codec import eval_to_message, plan_from_message, steps_to_message
from crosstrain.engine.protocol.messages import Message
from crosstrain.engine.triggers import Triggers
from crosstrain.models.objectives import CLASSIFICATION
from crosstrain.records.schema import EvalRecord

INFO = DataInfo.of_images("toy", (1, 2, 2), 3, {"train": 64, "test": 5}, (0.0,), (1.0,))
BATCH = 8


class Task:
    """A single leading task, made up, that answers at once: of its evaluations, one after another, so many of five examples are right."""

    def __init__(self, right):
        self.right, self.answers = list(right), []

    def __len__(self):
        return 1

    def send(self, command):
        tag = {"sequence": command["sequence"], "command": command.kind}
        done = Message("done", {**tag, "seconds": 0.1, "drain_seconds": 0.0})
        if command.kind == "state":
            self.answers += [done, Message("state_begin", tag), Message("state_end", tag)]
        elif command.kind == "evaluate":
            sums = {"loss_sum": 1.0, "correct": float(self.right.pop(0)), "examples": 5.0}
            self.answers += [eval_to_message(EvalResult("test", sums, 0.1, 1)), done]
        else:
            plan = plan_from_message(command)
            result = StepResult(plan.first_step, np.ones(plan.count, np.float32), plan.count * BATCH, 0.1)
            self.answers += [steps_to_message(result), done]

    def receive(self, timeout_seconds):
        return (0, self.answers.pop(0)) if self.answers else None

    def refuse(self, leader, wrong):
        raise AssertionError(wrong)


class Records:
    def step(self, record):
        pass

    def evaluation(self, record):
        pass

    def event(self, event, **detail):
        pass

    def check(self):
        pass


class Saver:
    """Keeps after which update each checkpoint was, and the accuracy that it has."""

    active_at = 0.0

    def __init__(self):
        self.saved = []

    def begin(self, save, message):
        self.saved.append((save.cursor.step, save.evaluation and save.evaluation.metrics["accuracy"]))

    def end(self):
        pass

    def wait(self):
        pass


def saved(right, start=None, **options):
    """What a run saves that has so many examples right in its evaluations; a whole epoch has eight updates."""
    saver, task = Saver(), Task(right)
    job = Job(batch_size=BATCH, keep_best="accuracy", **{"checkpoint_every": "100steps", "save_final": False, "epochs": None, **options})
    TrainingLoop(
        job,
        data=INFO,
        objective=CLASSIFICATION,
        tasks=task,
        recorder=Records(),
        progress=QuietProgress(),
        clock=lambda: 1.0,
        saver=saver,
        start=start,
    ).run()
    assert not task.right
    return saver.saved


def test_an_evaluation_that_is_among_the_best_is_followed_by_a_checkpoint_with_its_figures():
    assert saved([3, 2, 4, 4], steps=16, eval_every="4steps") == [(4, 0.6), (12, 0.8)]
    assert saved([3, 2, 4, 4], steps=16, eval_every="4steps", keep_best_count=2) == [(4, 0.6), (8, 0.4), (12, 0.8), (16, 0.8)]


def test_also_where_it_is_of_the_state_that_the_run_was_resumed_from():
    """Which had not been evaluated when it was saved; what follows is no better, so that nothing else is saved."""
    start = ResumePoint(DataCursor(4, 0, 4 * BATCH))
    assert saved([5, 3, 4, 4], start, steps=16, eval_every="4steps") == [(4, 1.0)]


def test_also_where_its_state_has_just_been_saved_without_it():
    job = Job(batch_size=BATCH, epochs=1, checkpoint_every="4steps", keep_best="accuracy")
    calendar = EpochIndex(run_sampler(job, INFO.sizes["train"], None))
    policy = CheckpointPolicy(job, CLASSIFICATION, Triggers(job, calendar), ResumePoint(), Saver(), lambda: 1.0)
    assert policy.due(4)
    policy.on_requested(1, DataCursor(4, 0, 4 * BATCH))
    assert not policy.due(4)
    policy.evaluated(EvalRecord(4, 0.5, 1.0, 0.1, "test", 5, 1.0, {"accuracy": 0.8}, 4))
    assert policy.due(4)
    policy.on_requested(2, DataCursor(4, 0, 4 * BATCH))
    assert not policy.due(4)


@pytest.mark.parametrize("ending", [{"until": "accuracy>=0.9"}, {"patience": 9, "until": "accuracy>=0.9"}])
def test_also_where_it_is_the_one_that_ends_the_run(ending):
    assert saved([2, 5], steps=16, eval_every="4steps", **ending) == [(4, 0.4), (8, 1.0)]


def test_an_evaluation_that_ends_the_run_and_is_no_better_is_not_saved():
    assert saved([4, 3], steps=16, eval_every="4steps", patience=1) == [(4, 0.8)]


def test_the_last_state_is_saved_once():
    assert saved([4, 5], steps=8, eval_every="4steps", save_final=True, until="accuracy>=0.9") == [(4, 0.8), (8, 1.0)]
    assert saved([4, 3], steps=8, eval_every="4steps", save_final=True, patience=1) == [(4, 0.8), (8, 0.6)]
