"""Epoch index of a resumed run: no example is repeated or skipped, and schedules continue."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.job import Job
from crosstrain.core.update_rules import learning_rates
from crosstrain.data.batching import FixedCount
from crosstrain.data.sampler import Sampler, permutation
from crosstrain.engine.epochs import START, DataCursor, EpochIndex
from crosstrain.engine.policies import Triggers

CALM = settings(deadline=None, derandomize=True, database=None)
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 4), st.sampled_from(["sync", "async"]))


def make_epoch_index(size, shape, start=START):
    batch, workers, mode = shape
    sampler = Sampler(size, 7, FixedCount(batch, workers, mode), workers)
    return sampler, EpochIndex(sampler, start)


def consumed(sampler, calendar, first, count):
    """Return each update's examples with its epoch, as a task takes them from the plan."""
    examples = []
    for step in range(first, first + count):
        place = calendar.place(step)
        indices = sampler.whole(place.epoch, place.first_in_epoch, 1, place.skip).indices
        examples += [(place.epoch, int(index)) for index in indices]
    return examples


@CALM
@given(st.integers(1, 60), st.lists(st.tuples(SHAPES, st.integers(0, 12)), min_size=1, max_size=5))
def test_each_example_is_seen_once_when_settings_change(size, parts):
    cursor, seen = DataCursor(0, 0, 0), []
    for shape, count in parts:
        sampler, calendar = make_epoch_index(size, shape, cursor)
        seen += consumed(sampler, calendar, cursor.step, count)
        cursor = calendar.cursor(cursor.step + count)
        assert len(seen) == cursor.epoch * size + cursor.examples
        assert calendar.epochs(cursor.step) == pytest.approx(len(seen) / size), "what an evaluation and a summary call the epochs"
    expected = [(epoch, int(index)) for epoch in range(cursor.epoch + 1) for index in permutation(7, epoch, size)]
    assert seen == expected[: len(seen)]


@CALM
@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 200), st.integers(0, 30))
def test_resumed_run_equals_uninterrupted_run(size, batch, step, more):
    _, whole = make_epoch_index(size, (batch, 1, "sync"))
    _, resumed = make_epoch_index(size, (batch, 1, "sync"), whole.cursor(step))
    assert resumed.cursor(step + more) == whole.cursor(step + more)
    np.testing.assert_array_equal(resumed.epochs_at(step, more + 1), np.arange(step, step + more + 1))
    assert resumed.place(step + more).left == whole.place(step + more).left
    assert resumed.first_step_in_epoch(whole.cursor(step).epoch + 2) == whole.first_step_in_epoch(whole.cursor(step).epoch + 2)


@CALM
@given(st.integers(1, 60), SHAPES, SHAPES, st.integers(0, 30), st.integers(1, 300))
def test_example_budget_ends_with_completing_update(size, before, shape, done, budget):
    """Also after a resume with another batch: the same examples in either mode, to an update."""
    cursor = make_epoch_index(size, before)[1].cursor(done)
    _, calendar = make_epoch_index(size, shape, cursor)

    def seen(step):
        position = calendar.cursor(step)
        return position.epoch * size + position.examples

    total = calendar.steps_until(budget)
    assert total == Triggers(Job(examples=budget), calendar).total
    assert seen(total) >= budget or total == done
    assert total == done or seen(total - 1) < budget


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_learning_rates_after_resume_are_bit_identical(schedule):
    job = Job(lr=0.1, schedule=schedule, schedule_step_epochs=1.5, warmup_steps=5, epochs=4)
    whole, expected = rates(job, DataCursor(0, 0, 0))
    for step in (1, 17, 44, 45, 46, 100):
        resumed, resumed_rates = rates(job, whole.cursor(step))
        assert Triggers(job, resumed).total == Triggers(job, whole).total
        np.testing.assert_array_equal(resumed_rates, expected[step:])


def rates(job, cursor, batch=32):
    _, calendar = make_epoch_index(1437, (batch, 1, "sync"), cursor)
    total = Triggers(job, calendar).total
    count = total - cursor.step
    positions = calendar.epochs_at(cursor.step, count)
    last = calendar.epochs_at(total, 1)[0]
    return calendar, learning_rates(job, cursor.step, count, calendar.steps_per_epoch, last, positions)


@pytest.mark.parametrize("schedule", ["step", "cosine"])
@pytest.mark.parametrize("batch", [8, 64, 100])
def test_schedule_continues_by_examples_with_another_batch(schedule, batch):
    """The rate after the change equals the earlier rate at that epoch, and the end is the same."""
    job = Job(lr=0.1, schedule=schedule, epochs=4)
    whole, expected = rates(job, DataCursor(0, 0, 0))
    resumed, resumed_rates = rates(job, whole.cursor(100), batch)
    assert resumed_rates[0] == pytest.approx(expected[100], rel=0.01)
    for epoch in (3, 4):
        before_end = resumed.first_step_in_epoch(epoch) - resumed.start.step - 1
        assert resumed_rates[before_end] == pytest.approx(
            expected[whole.first_step_in_epoch(epoch) - 1], rel=0.5 if schedule == "cosine" else 1e-12, abs=1e-3
        )


def test_evaluations_and_checkpoints_end_a_plan():
    _, calendar = make_epoch_index(100, (10, 1, "sync"))
    budget = Triggers(Job(epochs=3, eval_every="7steps", checkpoint_every="1epoch"), calendar)
    assert [step for step in range(1, 31) if budget.evaluation_due(step)] == [7, 14, 21, 28, 30]
    assert [step for step in range(1, 31) if budget.checkpoint_due(step)] == [10, 20, 30]
    assert [budget.next_stop(step) for step in (0, 7, 10, 28, 29)] == [7, 10, 14, 30, 30]


def test_epochs_are_counted_from_start_of_run():
    _, calendar = make_epoch_index(100, (10, 1, "sync"), DataCursor(50, 3, 95))
    budget = Triggers(Job(epochs=6, eval_every="2epochs"), calendar)
    assert calendar.first_step_in_epoch(4) == 51
    assert budget.total == 71
    assert [step for step in range(50, 72) if budget.evaluation_due(step)] == [51, 71]


def test_end_of_an_epoch_is_the_start_of_the_next():
    _, calendar = make_epoch_index(100, (10, 1, "sync"), DataCursor(10, 0, 100))
    assert calendar.start == DataCursor(10, 1, 0)
    with pytest.raises(ValueError, match="before this part"):
        calendar.place(9)
