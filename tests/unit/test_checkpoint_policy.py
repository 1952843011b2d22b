"""When runs save, and with which figures: real loop, simulated task, recording saver."""

from __future__ import annotations

import pytest
from made_up_training import BATCH, LeadingTask, Saver, data_info, run_to_end, training_loop

from crosstrain.core.job import Job
from crosstrain.data.sampler import run_sampler
from crosstrain.engine.epochs import DataCursor, EpochIndex
from crosstrain.engine.loop_interfaces import ResumePoint
from crosstrain.engine.policies import CheckpointPolicy, Triggers
from crosstrain.models.objectives import CLASSIFICATION
from crosstrain.records.store.schema import EvalRecord


class Task(LeadingTask):
    """A task whose successive evaluations have so many of five examples right."""

    def __init__(self, right):
        super().__init__()
        self.right = list(right)

    def sums(self):
        return {"loss_sum": 1.0, "correct": float(self.right.pop(0)), "examples": 5.0}


def saved(right, start=None, **options):
    """Return what a run saves whose evaluations have so many examples right.

    A whole epoch has eight updates.
    """
    saver, task = Saver(), Task(right)
    job = {"checkpoint_every": "100steps", "save_final": False, "epochs": None, "keep_best": "accuracy", **options}
    run_to_end(training_loop(job, task, saver=saver, start=start))
    assert not task.right
    return saver.saved


def test_best_evaluation_is_saved_with_figures():
    assert saved([3, 2, 4, 4], steps=16, eval_every="4steps") == [(4, 0.6), (12, 0.8)]
    assert saved([3, 2, 4, 4], steps=16, eval_every="4steps", keep_best_count=2) == [(4, 0.6), (8, 0.4), (12, 0.8), (16, 0.8)]


def test_best_evaluation_of_resumed_state_is_saved():
    """It was saved without an evaluation; nothing after it is better, so nothing else is saved."""
    start = ResumePoint(DataCursor(4, 0, 4 * BATCH))
    assert saved([5, 3, 4, 4], start, steps=16, eval_every="4steps") == [(4, 1.0)]


def test_best_evaluation_of_saved_state_is_saved_again():
    job = Job(batch_size=BATCH, epochs=1, checkpoint_every="4steps", keep_best="accuracy")
    calendar = EpochIndex(run_sampler(job, data_info(5).sizes["train"], None))
    policy = CheckpointPolicy(job, CLASSIFICATION, Triggers(job, calendar), ResumePoint(), Saver(), lambda: 1.0)
    assert policy.due(4)
    policy.on_requested(1, DataCursor(4, 0, 4 * BATCH))
    assert not policy.due(4)
    policy.evaluated(EvalRecord(4, 0.5, 1.0, 0.1, "test", 5, 1.0, {"accuracy": 0.8}, 4))
    assert policy.due(4)
    policy.on_requested(2, DataCursor(4, 0, 4 * BATCH))
    assert not policy.due(4)


@pytest.mark.parametrize("ending", [{"until": "accuracy>=0.9"}, {"patience": 9, "until": "accuracy>=0.9"}])
def test_best_evaluation_that_ends_run_is_saved(ending):
    assert saved([2, 5], steps=16, eval_every="4steps", **ending) == [(4, 0.4), (8, 1.0)]


def test_worse_evaluation_that_ends_run_is_not_saved():
    assert saved([4, 3], steps=16, eval_every="4steps", patience=1) == [(4, 0.8)]


def test_last_state_is_saved_once():
    assert saved([4, 5], steps=8, eval_every="4steps", save_final=True, until="accuracy>=0.9") == [(4, 0.8), (8, 1.0)]
    assert saved([4, 3], steps=8, eval_every="4steps", save_final=True, patience=1) == [(4, 0.8), (8, 0.6)]


def test_interrupted_run_with_keep_best_saves_state():
    """It may become the best after a resume; a run without intermediate saves ends immediately."""
    job = {"epochs": 1000, "eval_every": "end", "save_final": False}
    saver, task = Saver(), Task([])
    loop = training_loop({**job, "keep_best": "accuracy"}, task, saver=saver)
    trained = task.trained

    def interrupting(result):
        if result.first_step >= 3 * BATCH:
            assert loop.interrupt()
        return trained(result)

    task.trained = interrupting
    outcome = run_to_end(loop)
    assert outcome.interrupted
    assert [step for step, _ in saver.saved] == [outcome.updates_reported]
    assert not training_loop(job, Task([])).interrupt()
