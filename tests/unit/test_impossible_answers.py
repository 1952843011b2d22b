"""Impossible answers of a leading task are refused: unplanned steps, unknown workers."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_training import LeadingTask, run_to_end, training_loop
from msgspec import structs

from crosstrain.core.errors import RunFailedError
from crosstrain.engine.protocol.node_messages import Phase


class RefusedError(RunFailedError):
    """A leading task was rejected."""


class Task(LeadingTask):
    """A leading task whose answers to a command are replaced by `change`."""

    def __init__(self, mode="sync", change=lambda answers: answers):
        super().__init__()
        self.mode, self.change = mode, change

    def send(self, command):
        before = len(self.answers)
        super().send(command)
        self.answers[before:] = self.change(self.answers[before:])

    def trained(self, result):
        return result if self.mode == "sync" else replace(result, worker=1, staleness=np.zeros(result.count, np.int64))

    def refuse(self, leader, wrong):
        raise RefusedError(f"{leader}: {wrong}")


def train(task, mode="sync", stall_timeout=5.0):
    shape = {"mode": mode, "nodes": 2 if mode == "async" else 1}
    job = {"epochs": 3, "stall_timeout": stall_timeout, "eval_every": "1epochs", "save_final": False, **shape}
    return run_to_end(training_loop(job, task))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_valid_answers_train(mode):
    assert train(Task(mode), mode).updates_reported == 24


def changed(kind, **fields):
    def change(answers):
        return [structs.replace(answer, **fields) if answer.kind == kind else answer for answer in answers]

    return change


@pytest.mark.parametrize(
    ("change", "mode", "message"),
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
        (lambda answers: [Phase("nothing"), *answers], "sync", "which the training loop does not know"),
    ],
)
def test_impossible_answer_is_refused_and_task_blamed(change, mode, message):
    with pytest.raises(RefusedError, match=rf"^0: .*{message}"):
        train(Task(mode, change), mode)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["first_step", "examples", "worker"]), st.none() | st.integers(0, 2**53), st.sampled_from(["sync", "async"]))
def test_steps_with_any_number_are_trained_or_refused(field, value, mode):
    if value is None and field != "worker":
        return
    with suppress(RefusedError):
        train(Task(mode, changed("steps", **{field: value})), mode)
