"""The order of examples, for every backend, mode and number of workers.

An epoch is a permutation of the training examples that depends only on (seed, epoch). In sync mode a `BatchRule` divides it into global
batches: step t is the same set of examples for any number of workers, each of which takes a slice, possibly empty. In async mode it is
divided into worker batches: ticket t is the t-th of the epoch, whichever worker computes it. Nothing is dropped or padded; the last batch
is shorter. A run that resumes within an epoch skips the consumed examples and divides the rest into batches of its current size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from .batching import Arranged, BatchRule, Bounds, BucketedTokens, Buckets, Indices, batch_rule, padded_positions
from .preprocessing import Augmentation, Changes

PADDING_STEPS = 2000  # updates over which padding is counted; gives the share of all to three digits


def permutation(seed: int, epoch: int, size: int) -> Indices:
    """Return an epoch's order, int32 [size].

    Sorting Philox keys gives the same for every numpy version and machine.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return stable_order(keys).astype(np.int32)


def stable_order(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return `np.argsort(keys, kind="stable")`, several times faster if all keys differ."""
    order = np.argsort(keys)
    ascending = keys[order]
    if np.any(ascending[1:] == ascending[:-1]):
        order = np.argsort(keys, kind="stable")
    return order


@dataclass(frozen=True, slots=True)
class Batches:
    """Consecutive batches of one epoch as one flat array.

    Batch i is ``indices[offsets[i]:offsets[i + 1]]``, possibly empty. `examples[i]`, int32, and `weights[i]`, the divisor of the sum of
    losses, float64, are those of the whole update, all workers together. `changes`, int32 [len(indices), 3], augment the images
    (`preprocessing.apply_changes`).
    """

    indices: Indices
    offsets: Indices
    examples: Indices
    weights: NDArray[np.float64]
    changes: Changes | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, position: int) -> Indices:
        """Return the indices of one batch."""
        return self.indices[self.offsets[position] : self.offsets[position + 1]]

    def slice(self, first: int, count: int) -> Batches:
        """Return the batches first … first + count − 1, which share the indices."""
        stop = first + count
        return Batches(self.indices, self.offsets[first : stop + 1], self.examples[first:stop], self.weights[first:stop], self.changes)

    def in_micro_batches(self, most: int) -> tuple[Batches, NDArray[np.int64]]:
        """Divide each batch into at most `most` micro-batches.

        Return them and their numbers, int64 [batches]. A batch of n examples becomes k = min(most, n), at least 1, which begin at ⌊n·j /
        k⌋. `examples` and `weights` stay those of the whole update.
        """
        sizes = np.diff(self.offsets).astype(np.int64)
        counts = np.minimum(most, np.maximum(sizes, 1))
        batch = np.repeat(np.arange(len(self)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = self.offsets[batch] + sizes[batch] * within // counts[batch]
        offsets = np.append(begins, self.offsets[-1:]).astype(np.int32)
        return Batches(self.indices, offsets, self.examples[batch], self.weights[batch], self.changes), counts

    @classmethod
    def single(cls, count: int) -> Batches:
        """Return the first `count` examples as one batch, each of weight 1, for a warm-up."""
        size = np.array([count], dtype=np.int32)
        return cls(np.arange(count, dtype=np.int32), np.array([0, count], dtype=np.int32), size, size.astype(np.float64))


@dataclass
class Sampler:
    """The data order of one run over `size` training examples.

    `workers` share a step, or each takes one. `weights`, above 0, [size], weight the examples in the loss (default 1). `lengths`, [size]
    per column of tokens, fill batches by tokens; None for data other than text. The parameter `skip` is the number of examples of the epoch
    consumed before this process began: steps count from 0 after them. `arranged` is the history of the epoch's order until then. Raises
    ValueError for invalid weights and missing lengths.
    """

    size: int
    seed: int
    rule: BatchRule
    workers: int
    augment: Augmentation | None = None
    weights: NDArray[np.integer] | NDArray[np.floating] | None = None
    lengths: Mapping[str, NDArray[np.int64]] | None = None
    _cached: tuple[int, Indices, Changes | None] | None = field(default=None, init=False, repr=False)
    _bounds: dict[tuple[int, int], Bounds] = field(default_factory=dict, init=False, repr=False)
    _laid: tuple[tuple[int, int, Arranged], Indices, Bounds] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.weights is not None:
            wrong = np.flatnonzero(~(self.weights > 0))
            if len(self.weights) != self.size or len(wrong):
                first = f"example {wrong[0]} has the weight {self.weights[wrong[0]]:g}" if len(wrong) else f"there are {len(self.weights)}"
                raise ValueError(f"weights: {first}; each of {self.size} examples needs one above 0")
        if self.rule.buckets is None:
            self._bounds_after(0, 0)
        else:
            _ = self._by_length  # raises now rather than at the first batch

    @property
    def constant_steps(self) -> bool:
        """Whether all whole epochs have the same number of updates."""
        return self.rule.by_count or self.rule.buckets is not None

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates of the first whole epoch."""
        return self.steps_in_epoch()

    def steps_in_epoch(self, skip: int = 0, epoch: int = 0, arranged: Arranged = ()) -> int:
        """Return the number of updates of an epoch after `skip` examples."""
        if self.rule.buckets is not None and not skip and not arranged:
            return self._by_length.steps(self.rule.buckets.tokens, self.rule.buckets.batches)
        return len(self._bounds_after(skip, epoch, arranged)) - 1

    def examples_before(self, step_in_epoch: int, skip: int = 0, epoch: int = 0, arranged: Arranged = ()) -> int:
        """Return the number of examples of the epoch consumed before this step, including `skip`."""
        if step_in_epoch == 0 and 0 <= skip <= self.size:
            return skip
        return int(self._bounds_after(skip, epoch, arranged)[step_in_epoch])

    def examples_per_pass(self, most: int) -> int:
        """Return how many of any training examples, 1 to `most`, fit into a worker's warm-up batch."""
        if self.rule.buckets is not None:
            most = min(most, self.rule.buckets.tokens // int(self._by_length.edges[-1]))
        return max(1, min(most, self.size))

    def arranged_after(self, skip: int, arranged: Arranged) -> Arranged:
        """Return the history of an epoch's order with this rule in force after `skip` examples.

        Raises ValueError.
        """
        begins = [0, *(begin for begin, _, _ in arranged), skip]
        if any(after < before for before, after in pairwise(begins)) or skip > self.size:
            raise ValueError(f"the order {arranged} is none of the first {skip} examples of {self.size}")
        buckets = self.rule.buckets
        budget = (0, 0) if buckets is None else (buckets.tokens, buckets.batches)
        return arranged if budget == (arranged[-1][1:] if arranged else (0, 0)) else (*arranged, (skip, *budget))

    def order(self, epoch: int) -> Indices:
        """Return the epoch's permutation, int32 [size]; the last one is cached."""
        return self._draw_epoch(epoch)[0]

    def whole(self, epoch: int, first: int, count: int, skip: int = 0, arranged: Arranged = ()) -> Batches:
        """Return steps first … first + count − 1 (sync: global batches, async: worker batches).

        Raises ValueError beyond the epoch.
        """
        steps = self.steps_in_epoch(skip, epoch, arranged)
        if first < 0 or count < 0 or first + count > steps:
            raise ValueError(f"steps {first}…{first + count} are not within the {steps} steps of an epoch after {skip} examples")
        bounds = self._bounds_after(skip, epoch, arranged)[first : first + count + 1]
        offsets = (bounds - bounds[0]).astype(np.int32)
        order, changes = self._draw_epoch(epoch)
        if isinstance(self.rule, BucketedTokens) or arranged:
            order, _ = self._arrange(epoch, skip, arranged)
        indices, examples = order[bounds[0] : bounds[-1]], np.diff(offsets)
        weights = examples.astype(np.float64)
        if self.weights is not None and count:
            weights = np.add.reduceat(self.weights[indices].astype(np.float64), offsets[:-1])
        return Batches(indices, offsets, examples, weights, None if changes is None else changes[indices])

    def for_rank(self, epoch: int, first: int, count: int, rank: int, skip: int = 0, arranged: Arranged = ()) -> Batches:
        """Return one rank's slices of global batches first … first + count − 1 (sync).

        Slice sizes differ by at most one.
        """
        whole = self.whole(epoch, first, count, skip, arranged)
        if self.workers == 1:
            return whole
        base, extra = np.divmod(whole.examples, self.workers)
        sizes = base + (rank < extra)
        starts = whole.offsets[:-1] + rank * base + np.minimum(rank, extra)
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(sizes, out=offsets[1:])
        positions = np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], sizes)
        changes = None if whole.changes is None else whole.changes[positions]
        return Batches(whole.indices[positions], offsets, whole.examples, whole.weights, changes)

    def _draw_epoch(self, epoch: int) -> tuple[Indices, Changes | None]:
        if self._cached is None or self._cached[0] != epoch:
            changes = self.augment.draws(self.seed, epoch, self.size) if self.augment else None
            self._cached = (epoch, permutation(self.seed, epoch, self.size), changes)
        return self._cached[1:]

    @cached_property
    def _by_length(self) -> Buckets:
        if self.lengths is None:
            raise ValueError("batches by tokens need the lengths of the examples")
        return Buckets.from_lengths(np.maximum.reduce(list(self.lengths.values())))

    def _arrange(self, epoch: int, skip: int, arranged: Arranged) -> tuple[Indices, Bounds]:
        """Return the order of an epoch and the bounds of its steps; the last result is cached."""
        key = (epoch, skip, arranged)
        if self._laid is None or self._laid[0] != key:
            order, bounds = self.order(epoch).copy(), np.array([skip], dtype=np.int64)
            for begin, tokens, batches in self.arranged_after(skip, arranged):
                if tokens:
                    order[begin:], sizes = self._by_length.arranged(order[begin:], tokens, batches, [self.seed, epoch, 1, begin])
                    bounds = np.concatenate([[begin], begin + np.cumsum(sizes)])
            if not isinstance(self.rule, BucketedTokens):
                bounds = self.rule.cut(order, skip)
            self._laid = (key, order, np.concatenate([[skip], bounds[bounds > skip]]))
        return self._laid[1:]

    def _bounds_after(self, skip: int, epoch: int, arranged: Arranged = ()) -> Bounds:
        """Cached by `skip` if all epochs have equal steps, else for the last epoch."""
        if isinstance(self.rule, BucketedTokens) or arranged:
            return self._arrange(epoch, skip, arranged)[1]
        by_count = self.rule.by_count
        key = (0 if by_count else epoch, skip)
        if key not in self._bounds:
            if not 0 <= skip <= self.size:
                raise ValueError(f"{skip} examples cannot be skipped of an epoch that has {self.size}")
            order = np.broadcast_to(np.int32(0), self.size) if by_count else self.order(epoch)
            if not by_count:
                self._bounds = {cached_key: bounds for cached_key, bounds in self._bounds.items() if cached_key[0] in (0, epoch)}
            self._bounds[key] = self.rule.cut(order, skip)
        return self._bounds[key]


def padding_share(sampler: Sampler, micro_batches: int) -> float | None:
    """Return the share of padding in an epoch's first updates, None without text.

    Each worker pads its micro-batches.
    """
    if sampler.lengths is None:
        return None
    count = min(PADDING_STEPS, sampler.steps_per_epoch)
    whole = [sampler.whole(0, 0, count)]
    parts = whole if sampler.rule.mode == "async" else [sampler.for_rank(0, 0, count, rank) for rank in range(sampler.workers)]
    cut = [part.in_micro_batches(micro_batches)[0] for part in parts]
    counted = [padded_positions(part.indices, part.offsets, lengths) for part in cut for lengths in sampler.lengths.values()]
    return sum(padding for _, padding in counted) / sum(positions for positions, _ in counted)


def run_sampler(job: Job, size: int, lengths: Mapping[str, NDArray[np.int64]] | None = None) -> Sampler:
    """Return the order of `size` examples in a run, for counting, without augmentation."""
    return Sampler(size, job.seed, batch_rule(job), job.workers, lengths=lengths)
