"""Token batches: each example once per epoch, similar lengths, stable across resumes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.backends.base import Plan
from crosstrain.backends.parameter_server.tickets import TrainTicket, cut_plan, decode, encode
from crosstrain.core.job import Job
from crosstrain.data.batching import BucketedTokens, Buckets, FixedCount, batch_rule, bucket_edges, longer_than, padded_positions
from crosstrain.data.sampler import Sampler, padding_share, permutation
from crosstrain.engine.epochs import START, DataCursor, EpochIndex
from crosstrain.engine.protocol.task_messages import Train

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
MODES = st.sampled_from(["sync", "async"])
RULES = st.one_of(
    st.builds(BucketedTokens, st.integers(1, 200), st.integers(1, 4), MODES),
    st.builds(FixedCount, st.integers(4, 20), st.integers(1, 4), MODES),
)


def make_sampler_of(lengths, rule, workers=None):
    counted = {"source": np.array(lengths), "target": np.array(lengths[::-1])}
    return Sampler(len(lengths), 7, rule, workers or rule.workers, lengths=counted)


def longest(lengths):
    return np.maximum(lengths, lengths[::-1])


def consumed(sampler, calendar, first, count):
    """Return updates first … first + count − 1 as the engine plans and tasks take them.

    Each is (epoch, example).
    """
    examples, step = [], first
    while step < first + count:
        place = calendar.place(step)
        size = min(place.left, first + count - step)
        plan = Plan(step, size, place.epoch, place.first_in_epoch, np.full(size, 0.1), place.skip, place.arranged)
        plan = Train.from_plan(plan).plan()
        if sampler.rule.mode == "sync":
            parts = [
                sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, rank, plan.skip, plan.arranged)
                for rank in range(sampler.workers)
            ]
            for batch in range(size):
                examples += [(place.epoch, int(index)) for part in parts for index in part.batch(batch)]
        else:
            for ticket in map(decode, map(encode, cut_plan(plan, sampler.workers))):
                whole = sampler.whole(ticket.epoch, ticket.first_in_epoch, ticket.count, ticket.skip, ticket.arranged)
                examples += [(place.epoch, int(index)) for index in whole.indices]
        step += size
    return examples


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(LENGTHS, st.lists(st.tuples(RULES, st.integers(0, 12)), min_size=1, max_size=5))
def test_each_example_comes_once_per_epoch_across_resumes(lengths, parts):
    """Random lengths, budgets, workers, modes and cut points, also back to fixed batch sizes."""
    cursor, seen = START, []
    for rule, count in parts:
        sampler = make_sampler_of(lengths, rule)
        calendar = EpochIndex(sampler, cursor)
        seen += consumed(sampler, calendar, cursor.step, count)
        cursor = calendar.cursor(cursor.step + count)
        assert len(seen) == cursor.epoch * len(lengths) + cursor.examples
        assert calendar.epochs(cursor.step) == pytest.approx(len(seen) / len(lengths)), "what an evaluation and a summary call the epochs"
    sampler = make_sampler_of(lengths, parts[-1][0])
    calendar = EpochIndex(sampler, cursor)
    seen += consumed(sampler, calendar, cursor.step, calendar.first_step_in_epoch(cursor.epoch + 1) - cursor.step)
    for _, epoch in itertools.groupby(seen, key=lambda pair: pair[0]):
        assert sorted(index for _, index in epoch) == list(range(len(lengths)))


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(LENGTHS, RULES, RULES, st.integers(0, 12), st.integers(1, 200))
def test_example_budget_ends_with_completing_update(lengths, before, rule, done, budget):
    cursor = EpochIndex(make_sampler_of(lengths, before)).cursor(done)
    calendar = EpochIndex(make_sampler_of(lengths, rule), cursor)

    def seen(step):
        position = calendar.cursor(step)
        return position.epoch * len(lengths) + position.examples

    total = calendar.steps_until(budget)
    assert seen(total) >= budget or total == done
    assert total == done or seen(total - 1) < budget


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(LENGTHS, RULES, st.data())
def test_resumed_run_makes_the_same_batches(lengths, rule, data):
    sampler = make_sampler_of(lengths, rule)
    steps = sampler.steps_per_epoch
    at = data.draw(st.integers(0, 2 * steps))
    whole = EpochIndex(sampler)
    rest = EpochIndex(make_sampler_of(lengths, rule), whole.cursor(at))
    expected, resumed = (consumed(sampler, calendar, at, 2 * steps) for calendar in (whole, rest))
    assert resumed == expected
    assert rest.epochs_at(at, steps).tolist() == pytest.approx(whole.epochs_at(at, steps).tolist())


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(LENGTHS, st.integers(1, 200), st.integers(1, 4), MODES, st.integers(1, 4), st.integers(0, 5))
def test_step_is_one_bucket_within_token_budget(lengths, tokens, workers, mode, parts, epoch):
    """Of each worker, and of each of its micro-batches."""
    sampler = make_sampler_of(lengths, BucketedTokens(tokens, workers, mode, parts))
    buckets, example_lengths = Buckets.from_lengths(longest(np.array(lengths))), longest(np.array(lengths))
    batches = sampler.whole(epoch, 0, sampler.steps_per_epoch)
    assert len(batches) == buckets.steps(tokens, parts * (workers if mode == "sync" else 1))
    for step in range(len(batches)):
        chosen = batches.batch(step)
        assert len(set(buckets.bucket_of[chosen].tolist())) == 1
    ranks = range(workers) if mode == "sync" else ()
    for taken in [sampler.for_rank(epoch, 0, len(batches), rank) for rank in ranks] or [batches]:
        cut, counts = taken.in_micro_batches(parts)
        assert counts.max() <= parts
        for micro_batch in map(cut.batch, range(len(cut))):
            assert len(micro_batch) <= 1 or len(micro_batch) * example_lengths[micro_batch].max() <= tokens
    assert sampler.steps_in_epoch(0, epoch + 1) == len(batches)


def test_micro_batches_and_workers_are_equivalent():
    """A step is so many budget batches, on any worker: the same examples in the same order."""
    lengths = np.random.default_rng(1).integers(1, 60, 300)
    rules = (
        BucketedTokens(90, 1, "sync", 4),
        BucketedTokens(90, 2, "sync", 2),
        BucketedTokens(90, 4, "sync"),
        BucketedTokens(90, 3, "async", 4),
    )
    first, *rest = (sampler.whole(1, 0, sampler.steps_per_epoch) for sampler in (make_sampler_of(lengths, rule) for rule in rules))
    assert len(first) > 20
    for batches in rest:
        np.testing.assert_array_equal(batches.indices, first.indices)
        np.testing.assert_array_equal(batches.offsets, first.offsets)


def test_warm_up_batch_is_no_larger_than_training():
    assert make_sampler_of([5, 9, 30], BucketedTokens(64, 1, "sync")).examples_per_pass(64) == 2
    assert make_sampler_of([5, 9, 30], BucketedTokens(20, 1, "sync")).examples_per_pass(20) == 1
    assert [Sampler(10, 0, FixedCount(8, 1, "sync"), 1).examples_per_pass(most) for most in (4, 20)] == [4, 10]


def test_batches_are_shuffled_each_epoch_not_sorted_by_length():
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    sampler = make_sampler_of(lengths, BucketedTokens(120, 1, "sync"))
    first, second = (sampler.whole(epoch, 0, sampler.steps_per_epoch) for epoch in (0, 1))
    together = [{frozenset(batches.batch(step).tolist()) for step in range(len(batches))} for batches in (first, second)]
    assert len(together[0] & together[1]) < len(first) // 10
    means = [lengths[first.batch(step)].mean() for step in range(len(first))]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3
    bucket = [sampler._by_length.bucket_of[first.batch(step)[0]] for step in range(len(first))]
    in_order = permutation(7, 0, 500)
    for number in set(bucket):
        of_bucket = [first.batch(step) for step in range(len(first)) if bucket[step] == number]
        expected = in_order[sampler._by_length.bucket_of[in_order] == number]
        assert sorted(np.concatenate(of_bucket)) == sorted(expected)


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 4))
def test_bucket_edges_minimize_padding(lengths, most):
    values = sorted(set(lengths))

    def waste(edges):
        return sum(min(edge for edge in edges if edge >= length) - length for length in lengths)

    edges_found = bucket_edges(np.array(lengths), most).tolist()
    assert edges_found == sorted(set(edges_found))
    assert edges_found[-1] == values[-1]
    assert len(edges_found) <= most
    subsets = (itertools.combinations(values[:-1], size) for size in range(min(most, len(values))))
    assert waste(edges_found) == min(waste([*subset, values[-1]]) for same_size in subsets for subset in same_size)


def test_padding_is_counted():
    lengths = np.array([3, 1, 4, 4, 2])
    indices, offsets = np.array([0, 1, 2, 4], np.int32), np.array([0, 2, 2, 4])
    assert padded_positions(indices, offsets, lengths) == (2 * 3 + 2 * 4, 2 + 2)
    assert padded_positions(indices[:0], np.array([0, 0]), lengths) == (0, 0)


def test_realistic_corpus_has_at_most_a_quarter_padding():
    draw = np.random.default_rng(3)
    source = np.clip(draw.lognormal(3.0, 0.6, 20_000), 1, 200).astype(int) + 1
    target = np.clip(source * draw.normal(1.05, 0.2, 20_000), 2, 200).astype(int)
    sampler = Sampler(20_000, 1, BucketedTokens(4000, 1, "sync"), 1, lengths={"source": source, "target": target})
    batches = sampler.whole(0, 0, sampler.steps_per_epoch)
    paddings = [padded_positions(batches.indices, batches.offsets, lengths) for lengths in (source, target)]
    assert sum(padding for _, padding in paddings) / sum(positions for positions, _ in paddings) < 0.25


def test_batch_rule_follows_job():
    assert batch_rule(Job(batch_tokens=100, nodes=3)) == BucketedTokens(100, 3, "sync")
    accumulating = Job(batch_tokens=100, nodes=3, accumulate=4)
    assert batch_rule(accumulating) == BucketedTokens(100, 3, "sync", 4)
    assert (accumulating.micro_batch, accumulating.per_worker_batch, accumulating.global_batch) == (100, 400, 1200)
    assert batch_rule(Job(batch_size=10, nodes=3)) == FixedCount(30, 3, "sync")
    for setting in ({"batch_size": 3}, {"global_batch_size": 3}, {"scale_lr": "linear"}):
        with pytest.raises(ValueError, match="batch_tokens"):
            Job(batch_tokens=100, **setting)


def test_impossible_orders_are_refused():
    sampler = make_sampler_of([3, 4, 5], BucketedTokens(8, 1, "sync"))
    for skip, arranged in ((1, ((2, 8, 1),)), (4, ()), (2, ((1, 8, 1), (0, 9, 1)))):
        with pytest.raises(ValueError, match="the order"):
            EpochIndex(sampler, DataCursor(0, 0, skip, arranged))
    with pytest.raises(ValueError, match="need the lengths"):
        Sampler(3, 0, BucketedTokens(8, 1, "sync"), 1)
    with pytest.raises(ValueError, match="has no tokens"):
        make_sampler_of([3, 0, 0], BucketedTokens(8, 1, "sync"))


def test_ticket_retains_arrangement():
    plan = Plan(5, 4, 1, 0, np.linspace(0.1, 0.2, 4), 17, ((0, 512, 3), (12, 256, 1)))
    ticket = decode(encode(cut_plan(plan, 1)[0].remainder(0)))
    assert isinstance(ticket, TrainTicket)
    assert (ticket.skip, ticket.arranged) == (17, plan.arranged)


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(LENGTHS, st.integers(1, 70), MODES)
def test_examples_longer_than_a_batch_are_counted_and_single(lengths, tokens, mode):
    sampler = make_sampler_of(lengths, BucketedTokens(tokens, 1, mode))
    example_lengths = longest(lengths)
    assert longer_than(sampler.lengths, tokens) == ((example_lengths > tokens).sum(), example_lengths.max())
    whole = sampler.whole(0, 0, sampler.steps_per_epoch)
    assert all(len(whole.batch(step)) == 1 for step in range(len(whole)) if example_lengths[whole.batch(step)].max() > tokens)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_padding_share_counts_micro_batches(mode, micro_batches):
    """Two workers with four examples each per update, in micro-batches of four, two or one."""
    lengths = np.random.default_rng(4).integers(1, 60, 48)
    sampler = make_sampler_of(lengths, FixedCount(8, 2, mode))
    ordered = np.stack([lengths, lengths[::-1]])[:, sampler.order(0)].reshape(2, -1, 4 // micro_batches)
    positions = int((ordered.max(2) * ordered.shape[2]).sum())
    assert padding_share(sampler, micro_batches) == (positions - int(ordered.sum())) / positions


def test_images_have_no_padding():
    assert padding_share(Sampler(10, 0, FixedCount(4, 1, "sync"), 1), 2) is None
