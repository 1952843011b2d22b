"""Steps filled by weight: varying steps per epoch, schedules and weighted losses."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.job import Job
from crosstrain.core.update_rules import learning_rates
from crosstrain.data.batching import FixedCount
from crosstrain.data.sampler import Sampler, permutation
from crosstrain.engine.epochs import START, DataCursor, EpochIndex

CALM = settings(deadline=None, derandomize=True, database=None)
WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=40)


@dataclass(frozen=True)
class MostWeight:
    """Examples in the epoch's order, up to a weight of `most` per step, and at least one."""

    weights: np.ndarray
    most: int
    by_count: bool = False
    buckets: None = None
    mode: str = "sync"

    def cut(self, order, skip):
        bounds, total = [skip], 0
        for position in range(skip, len(order)):
            weight = self.weights[order[position]]
            if total and total + weight > self.most:
                bounds.append(position)
                total = 0
            total += weight
        return np.array([*bounds, len(order)] if skip < len(order) else bounds, dtype=np.int64)


def by_weight(weights, most, workers=1):
    weights = np.array(weights)
    return Sampler(len(weights), 7, MostWeight(weights, most), workers, None, weights)


@CALM
@given(WEIGHTS, st.integers(1, 30), st.integers(1, 4))
def test_step_weights_are_global_on_every_rank(weights, most, workers):
    sampler = by_weight(weights, most, workers)
    for epoch in range(2):
        steps = sampler.steps_in_epoch(0, epoch)
        whole = sampler.whole(epoch, 0, steps)
        assert whole.weights.tolist() == [sum(weights[index] for index in whole.batch(step)) for step in range(steps)]
        assert whole.examples.tolist() == [len(whole.batch(step)) for step in range(steps)]
        assert whole.indices.tolist() == permutation(7, epoch, len(weights)).tolist()
        for rank in range(workers):
            rank_batches = sampler.for_rank(epoch, 0, steps, rank)
            np.testing.assert_array_equal(rank_batches.weights, whole.weights)
            np.testing.assert_array_equal(rank_batches.examples, whole.examples)
            np.testing.assert_array_equal(rank_batches.slice(steps - 1, 1).batch(0), rank_batches.batch(steps - 1))


def consumed(sampler, calendar, first, count):
    examples = []
    for step in range(first, first + count):
        place = calendar.place(step)
        assert 0 <= place.first_in_epoch < place.first_in_epoch + place.left == sampler.steps_in_epoch(place.skip, place.epoch)
        assert calendar.first_step_in_epoch(place.epoch) <= step < calendar.first_step_in_epoch(place.epoch + 1)
        indices = sampler.whole(place.epoch, place.first_in_epoch, 1, place.skip).indices
        examples += [(place.epoch, int(index)) for index in indices]
    return examples


@CALM
@given(WEIGHTS, st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), min_size=1, max_size=5))
def test_each_example_is_seen_once_when_steps_per_epoch_vary(weights, attempts):
    cursor, seen = START, []
    for most, count in attempts:
        sampler = by_weight(weights, most)
        calendar = EpochIndex(sampler, cursor)
        seen += consumed(sampler, calendar, cursor.step, count)
        cursor = calendar.cursor(cursor.step + count)
        assert len(seen) == cursor.epoch * len(weights) + cursor.examples
    expected = [(epoch, int(index)) for epoch in range(cursor.epoch + 1) for index in permutation(7, epoch, len(weights))]
    assert seen == expected[: len(seen)]


@CALM
@given(WEIGHTS, st.integers(1, 30), st.integers(0, 60))
def test_schedules_follow_the_epochs(weights, most, step):
    sampler = by_weight(weights, most)
    calendar = EpochIndex(sampler)
    places = calendar.epochs_at(0, step + 1) / calendar.steps_per_epoch
    assert (np.diff(places) > 0).all()
    for epoch in range(3):
        assert calendar.epochs(calendar.first_step_in_epoch(epoch)) == pytest.approx(epoch, abs=1e-12)
    resumed = EpochIndex(by_weight(weights, most), calendar.cursor(step))
    assert resumed.epochs(step) == pytest.approx(calendar.epochs(step), abs=1e-9)
    job = Job(lr=0.1, schedule="step", schedule_step_epochs=1, schedule_gamma=0.5)
    total = calendar.first_step_in_epoch(3)
    rates = learning_rates(job, 0, total, calendar.steps_per_epoch, total, calendar.epochs_at(0, total))
    expected = [0.1 * 0.5**epoch for epoch in range(3) for _ in range(sampler.steps_in_epoch(0, epoch))]
    assert rates == pytest.approx(expected)


def test_weight_and_count_rules_agree_for_equal_weights():
    weights = np.ones(23, dtype=np.int64)
    by_weight_, by_count = Sampler(23, 7, MostWeight(weights, 5), 2, None, weights), Sampler(23, 7, FixedCount(5, 2, "sync"), 2)
    first, second = EpochIndex(by_weight_, DataCursor(3, 0, 11)), EpochIndex(by_count, DataCursor(3, 0, 11))
    for step in range(3, 40):
        assert first.place(step) == second.place(step)
        assert first.cursor(step) == second.cursor(step)
    np.testing.assert_array_equal(first.epochs_at(3, 40), second.epochs_at(3, 40))


@pytest.mark.parametrize(("weights", "words"), [([1, 0, 2], "example 1 has the weight 0"), ([1, 2], "there are 2")])
def test_weights_that_divide_by_zero_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        Sampler(3, 0, FixedCount(2, 1, "sync"), 1, None, np.array(weights))
