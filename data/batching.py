"""Division of an epoch's order into steps.

If steps are filled by tokens, epochs may differ in their number of steps, so a position in training is an epoch and its examples, not a
step. With `BatchRule.buckets` the order of an epoch follows from its seed and from `Arranged`: a run that resumes within an epoch with
other batches keeps what was consumed, and arranges the rest of the previous order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import split_evenly
from ..core.job import Job
from .base import Dataset, Split, TextFeatures

Indices = NDArray[np.int32]
Bounds = NDArray[np.int64]  # begin of each step in examples, and end of the epoch: strictly ascending, int64 [steps + 1]


Arranged = tuple[tuple[int, int, int], ...]
"""Consumed examples of an epoch at each change of the token budget: (examples, tokens, batches), ascending. (0, 0) keeps the order."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The limits of a bucket's step.

    `batches`: micro-batches of all workers, each of at most `tokens` padded tokens.
    """

    tokens: int
    batches: int


@dataclass(frozen=True, slots=True)
class FixedCount:
    """Steps of the same size except the last.

    `global_batch`: examples of all workers, whose parts are the steps in async mode. `by_count`: only the number of examples matters, so
    that all epochs have equal steps. `buckets`: None, as `cut` keeps the order.
    """

    global_batch: int
    workers: int
    mode: Literal["sync", "async"]

    by_count = True
    buckets = None

    def cut(self, order: Indices, skip: int) -> Bounds:
        """Return the bounds of an epoch's steps after `skip` consumed examples.

        Only the length of `order` matters.
        """
        size = len(order)
        starts = np.arange(skip, size, self.global_batch, dtype=np.int64)
        if self.mode == "async":
            within = np.array([start for start, stop in split_evenly(self.global_batch, self.workers) if stop > start], dtype=np.int64)
            starts = (starts[:, None] + within[None, :]).ravel()
            starts = starts[starts < size]
        return np.append(starts, size)


@dataclass(frozen=True, slots=True)
class BucketedTokens:
    """Steps of examples of similar length, with about the same number of tokens.

    `tokens` limits a worker's micro-batch, unless a single example has more. Its batch has `micro_batches` times that, of one bucket, so
    `Batches.in_micro_batches` can divide it by number. In sync mode a step has the batches of all `workers`, in async mode of one.
    """

    tokens: int
    workers: int
    mode: Literal["sync", "async"]
    micro_batches: int = 1

    by_count = False

    @property
    def buckets(self) -> TokenBudget:
        """The token budget of a step; the steps follow from the buckets."""
        return TokenBudget(self.tokens, self.micro_batches * (self.workers if self.mode == "sync" else 1))


BatchRule = FixedCount | BucketedTokens
"""The examples of a step: in sync mode of all workers together, in async mode of one worker."""


def batch_rule(job: Job) -> BatchRule:
    """Return the rule for a job's epochs."""
    if job.batch_tokens is not None:
        return BucketedTokens(job.batch_tokens, job.workers, job.mode, job.accumulate)
    return FixedCount(job.global_batch, job.workers, job.mode)


# An example is in the first bucket whose edge is at least the length of its longest column; a batch has as many examples as fit at that
# edge. So there are about nine shapes of batches, their tokens vary little, and all epochs have the same number of steps.

MAX_BUCKETS = 9


def example_lengths(data: Dataset, split: Split = "train") -> dict[str, NDArray[np.int64]] | None:
    """Return example lengths by column of tokens, int64 [n]; None for data other than text."""
    if not isinstance(data.info.features, TextFeatures):
        return None
    return {column.name: data.weights(split, f"{column.name}_tokens") for column in data.info.columns if column.varies} or None


def longer_than(lengths: Mapping[str, NDArray[np.int64]], tokens: int) -> tuple[int, int]:
    """Return how many examples have more than `tokens` tokens in a column, and the maximum."""
    longest = np.maximum.reduce(list(lengths.values()))
    return int(np.count_nonzero(longest > tokens)), int(longest.max(initial=0))


def bucket_edges(lengths: NDArray[np.int64], most: int = MAX_BUCKETS) -> NDArray[np.int64]:
    """Return at most `most` ascending edges that minimise Σ (edge − length).

    Exact, by dynamic programming.
    """
    values, counts = np.unique(lengths, return_counts=True)
    size = len(values)
    number, total = (np.concatenate([[0], np.cumsum(part)]) for part in (counts, counts * values))

    def waste(first: int) -> NDArray[np.int64]:
        """Return the padding of buckets from value `first` to each last value."""
        padding: NDArray[np.int64] = values[first:] * (number[first + 1 :] - number[first]) - (total[first + 1 :] - total[first])
        return padding

    wastes = [waste(first) for first in range(size)]
    best = wastes[0]
    choices: list[NDArray[np.int64]] = []
    for _ in range(1, min(most, size)):
        candidates = np.full((size, size), np.iinfo(np.int64).max)
        for first in range(1, size):
            candidates[first, first:] = best[first - 1] + wastes[first]
        choice = np.argmin(candidates, axis=0)
        choices.append(np.where(candidates[choice, np.arange(size)] < best, choice, -1))
        best = np.minimum(best, candidates[choice, np.arange(size)])
    edges, last = [size - 1], size - 1
    for choice in reversed(choices):
        first = int(choice[last])
        if first >= 0:
            last = first - 1
            edges.append(last)
    return values[edges[::-1]]


@dataclass(frozen=True, eq=False)
class Buckets:
    """The edge of each bucket, int64 [k], and the bucket of each training example, uint8 [n]."""

    edges: NDArray[np.int64]
    bucket_of: NDArray[np.uint8]

    @classmethod
    def from_lengths(cls, lengths: NDArray[np.int64]) -> Buckets:
        """Return the buckets of examples of these lengths. Raises ValueError for an empty example."""
        if len(lengths) and lengths.min() < 1:
            raise ValueError(f"example {int(np.argmin(lengths))} has no tokens, so that batches cannot be filled by them")
        edges = bucket_edges(lengths)
        return cls(edges, np.searchsorted(edges, lengths).astype(np.uint8))

    def examples_per_step(self, tokens: int, batches: int) -> NDArray[np.int64]:
        """Return the number of examples in a step of each bucket. A batch has at least one."""
        return batches * np.maximum(1, tokens // self.edges)

    def steps(self, tokens: int, batches: int) -> int:
        """Return the number of steps of a whole epoch, which does not depend on its order."""
        counts = np.bincount(self.bucket_of, minlength=len(self.edges))
        return int(-(-counts // self.examples_per_step(tokens, batches)).sum())

    def arranged(self, order: Indices, tokens: int, batches: int, seeds: list[int]) -> tuple[Indices, NDArray[np.int64]]:
        """Return the examples in steps of one bucket each, and the number in each.

        `seeds` shuffle the steps.
        """
        buckets = self.bucket_of[order]
        by_bucket = order[np.argsort(buckets, kind="stable")]
        sizes: list[NDArray[np.int64]] = []
        for count, most in zip(np.bincount(buckets, minlength=len(self.edges)), self.examples_per_step(tokens, batches), strict=True):
            whole, rest = divmod(int(count), int(most))
            sizes.append(np.array([most] * whole + [rest] * bool(rest), dtype=np.int64))
        size = np.concatenate(sizes)
        starts = np.cumsum(size) - size
        shuffled = np.argsort(np.random.Philox(np.random.SeedSequence(seeds)).random_raw(len(size)), kind="stable")
        size, starts = size[shuffled], starts[shuffled]
        ends = np.cumsum(size)
        places = np.arange(len(order)) + np.repeat(starts - (ends - size), size)
        return by_bucket[places], size


def padded_positions(indices: Indices, offsets: NDArray[np.integer], lengths: NDArray[np.int64]) -> tuple[int, int]:
    """Return a column's positions in padded batches, and how many are padding.

    Batch i: ``indices[offsets[i]:offsets[i + 1]]``.
    """
    sizes = np.diff(offsets)
    if not sizes.any():
        return 0, 0
    lengths_here = lengths[indices]
    longest = np.maximum.reduceat(lengths_here, np.asarray(offsets[:-1])[sizes > 0])
    positions = int((longest * sizes[sizes > 0]).sum())
    return positions, positions - int(lengths_here.sum())
