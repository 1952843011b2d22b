"""Data order after a resume: no example is repeated or skipped, whatever has changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.data.batching import FixedCount
from crosstrain.data.sampler import Sampler, permutation

CALM = settings(deadline=None, derandomize=True, database=None)

SIZES = st.integers(1, 300)
BATCHES = st.integers(1, 320)
WORKERS = st.integers(1, 9)
SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 1000)
MODES = st.sampled_from(["sync", "async"])


@CALM
@given(SIZES, SEEDS, EPOCHS, st.lists(st.tuples(BATCHES, WORKERS, MODES, st.integers(0, 300)), min_size=1, max_size=5))
def test_segments_of_any_shape_complete_the_epoch(size, seed, epoch, segments):
    """Segments with different batches, workers and modes; the last one ends the epoch."""
    seen, skip = [], 0
    for batch, workers, mode, steps in segments:
        sampler = Sampler(size, seed, FixedCount(batch, workers, mode), workers)
        count = min(steps, sampler.steps_in_epoch(skip))
        seen.append(sampler.whole(epoch, 0, count, skip).indices)
        skip = sampler.examples_before(count, skip)
        assert sum(map(len, seen)) == skip
    seen.append(sampler.whole(epoch, 0, sampler.steps_in_epoch(skip), skip).indices)
    assert np.array_equal(np.concatenate(seen), permutation(seed, epoch, size))


@CALM
@given(SIZES, SEEDS, EPOCHS, BATCHES, WORKERS, MODES, st.data())
def test_stop_between_steps_changes_no_later_step(size, seed, epoch, batch, workers, mode, data):
    sampler = Sampler(size, seed, FixedCount(batch, workers, mode), workers)
    at = data.draw(st.integers(0, sampler.steps_per_epoch))
    if mode == "async":  # tickets restart with a new round, so only a stop between rounds keeps the cut
        at -= at % min(workers, batch)
    rest = sampler.steps_per_epoch - at
    skip = sampler.examples_before(at)
    uninterrupted = sampler.whole(epoch, at, rest)
    resumed = Sampler(size, seed, FixedCount(batch, workers, mode), workers).whole(epoch, 0, rest, skip)
    assert sampler.steps_in_epoch(skip) == rest
    assert np.array_equal(resumed.indices, uninterrupted.indices)
    assert np.array_equal(resumed.offsets, uninterrupted.offsets)
    assert np.array_equal(resumed.examples, uninterrupted.examples)


@CALM
@given(SIZES, SEEDS, EPOCHS, BATCHES, WORKERS, st.data())
def test_slices_of_ranks_form_rest_of_epoch(size, seed, epoch, batch, workers, data):
    skip = data.draw(st.integers(0, size))
    sampler = Sampler(size, seed, FixedCount(batch, workers, "sync"), workers)
    steps = sampler.steps_in_epoch(skip)
    whole = sampler.whole(epoch, 0, steps, skip)
    slices = [sampler.for_rank(epoch, 0, steps, rank, skip) for rank in range(workers)]
    for step in range(steps):
        assert np.array_equal(np.concatenate([piece.batch(step) for piece in slices]), whole.batch(step))
    assert [sampler.examples_before(step, skip) for step in range(steps + 1)] == [skip, *(skip + np.cumsum(whole.examples))]


def test_consumed_epoch_has_no_steps_left():
    sampler = Sampler(10, 0, FixedCount(3, 2, "sync"), 2)
    assert sampler.steps_in_epoch(10) == 0
    assert len(sampler.whole(0, 0, 0, 10)) == 0


@pytest.mark.parametrize("skip", [-1, 11])
def test_more_than_an_epoch_cannot_be_skipped(skip):
    with pytest.raises(ValueError, match="cannot be skipped of an epoch that has 10"):
        Sampler(10, 0, FixedCount(3, 2, "sync"), 2).steps_in_epoch(skip)


def test_steps_beyond_the_rest_are_refused():
    with pytest.raises(ValueError, match="not within the 2 steps of an epoch after 5 examples"):
        Sampler(10, 0, FixedCount(3, 2, "sync"), 2).whole(0, 1, 2, 5)
