"""Sentences of like length together: which bucket each training example is in, and an epoch's order as batches of one bucket each.

Nine edges are fixed for a corpus. An example is in the first bucket whose edge is at least its length, that of its longest column (of
source and
target the longer one); a batch of a bucket has as many examples as fit with all of them as long as the edge. So there are about nine
shapes of batches, their tokens vary little, and every epoch has as many steps as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import Dataset, Split, TextFeatures

__all__ = ["MOST_BUCKETS", "Buckets", "bucket_edges", "example_lengths", "longer_than", "padded_positions"]

MOST_BUCKETS = 9

Indices = NDArray[np.int32]


def example_lengths(data: Dataset, split: Split = "train") -> dict[str, NDArray[np.int64]] | None:
    """Return the lengths of a split's examples in each column of tokens, int64 [n]; None for data that is no text."""
    if not isinstance(data.info.features, TextFeatures):
        return None
    return {column.name: data.weights(split, f"{column.name}_tokens") for column in data.info.columns if column.varies} or None


def longer_than(lengths: Mapping[str, NDArray[np.int64]], tokens: int) -> tuple[int, int]:
    """Return how many examples have more tokens in their longest column, and how many tokens the longest of all has.

    A worker computes each of these by itself, where batches are filled with so many tokens.
    """
    longest = np.maximum.reduce(list(lengths.values()))
    return int(np.count_nonzero(longest > tokens)), int(longest.max(initial=0))


def bucket_edges(lengths: NDArray[np.int64], most: int = MOST_BUCKETS) -> NDArray[np.int64]:
    """Return at most `most` edges, rising, the last one the greatest length, with which Σ (edge of an example − its length) is least.

    Found exactly, by dynamic programming over the lengths that there are.
    """
    values, counts = np.unique(lengths, return_counts=True)
    size = len(values)
    number, total = (np.concatenate([[0], np.cumsum(part)]) for part in (counts, counts * values))

    def waste(first: int) -> NDArray[np.int64]:
        """Return, for each last value, the padding of a bucket of the values first … last."""
        found: NDArray[np.int64] = values[first:] * (number[first + 1 :] - number[first]) - (total[first + 1 :] - total[first])
        return found

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
    def of(cls, lengths: NDArray[np.int64]) -> Buckets:
        """Return the buckets of examples of these lengths. Raises ValueError for an example of no length."""
        if len(lengths) and lengths.min() < 1:
            raise ValueError(f"example {int(np.argmin(lengths))} has no tokens, so that batches cannot be filled by them")
        edges = bucket_edges(lengths)
        return cls(edges, np.searchsorted(edges, lengths).astype(np.uint8))

    def examples_per_step(self, tokens: int, batches: int) -> NDArray[np.int64]:
        """Return how many examples a step of each bucket has: `batches` batches of at most `tokens` tokens, or of one example."""
        return batches * np.maximum(1, tokens // self.edges)

    def steps(self, tokens: int, batches: int) -> int:
        """Return how many steps a whole epoch takes, whatever its order."""
        counts = np.bincount(self.bucket_of, minlength=len(self.edges))
        return int(-(-counts // self.examples_per_step(tokens, batches)).sum())

    def arranged(self, order: Indices, tokens: int, batches: int, seeds: list[int]) -> tuple[Indices, NDArray[np.int64]]:
        """Return these examples step by step, and how many each step has.

        Within a bucket they stay in their order, are cut into steps, the last of which may be smaller, and the steps of all buckets are
        shuffled by `seeds`.
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
    """Return how many positions of a column the batches have when each is padded to its longest example, and how many of them are padding.

    Batch i is ``indices[offsets[i]:offsets[i + 1]]``; some may be empty.
    """
    sizes = np.diff(offsets)
    if not sizes.any():
        return 0, 0
    own = lengths[indices]
    longest = np.maximum.reduceat(own, np.asarray(offsets[:-1])[sizes > 0])
    positions = int((longest * sizes[sizes > 0]).sum())
    return positions, positions - int(own.sum())
