"""Who sees which example, when: the one source of data order for every backend, mode and number of workers.

An epoch is a permutation of the training examples that depends on (seed, epoch) alone. Sync cuts it into global batches; step t
is the same set of examples however many workers share it, and a worker takes a slice, possibly an empty one. Async cuts it into
worker batches; ticket t is the t-th of the epoch, whoever computes it. Nothing is dropped and nothing is padded: the last batch of
an epoch is simply shorter. A run that is resumed within an epoch skips the examples it has consumed and cuts the rest afresh, in
whatever batches it now has. Where the cuts are, a `BatchRule` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from .augment import Augmentation, Changes
from .batching import Arranged, BatchRule, Bounds, Indices, batch_rule
from .bucketing import Buckets, padded_positions

__all__ = ["Batches", "Sampler", "padding_share", "permutation", "run_sampler", "stable_order"]


PADDING_STEPS = 2000
"""Updates over which padding is counted, at most: its share of those is that of all, to three digits."""


def permutation(seed: int, epoch: int, size: int) -> Indices:
    """Return the order of the examples in one epoch, int32 [size].

    Sorts keys of the counter-based generator Philox, so that the order depends on neither the numpy release nor the machine.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return stable_order(keys).astype(np.int32)


def stable_order(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return `np.argsort(keys, kind="stable")`, several times faster where no two keys are equal: there is only one order then."""
    order = np.argsort(keys)
    ascending = keys[order]
    if np.any(ascending[1:] == ascending[:-1]):
        order = np.argsort(keys, kind="stable")
    return order


@dataclass(frozen=True, slots=True)
class Batches:
    """Consecutive batches of one epoch as one flat array.

    Batch i is ``indices[offsets[i]:offsets[i + 1]]``, possibly empty. Of the whole update, all workers together: `examples[i]`, their
    number, int32, and `weights[i]`, the sum of their weights, float64, by which the sum of the losses is divided. Both are known on
    every worker without asking the others. `changes` int32 [len(indices), 3] says how each image is to be changed before it is used
    (`augment.apply_changes`); None where none is.
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
        """Return the batches first … first + count − 1; the indices are shared, not copied."""
        stop = first + count
        return Batches(self.indices, self.offsets[first : stop + 1], self.examples[first:stop], self.weights[first:stop], self.changes)

    def in_micro_batches(self, most: int) -> tuple[Batches, NDArray[np.int64]]:
        """Return every batch cut into at most `most` micro-batches of nearly equal size, and into how many each was, int64 [batches].

        Batch i of n examples becomes k = min(most, n), at least 1, which begin at ⌊n·j / k⌋, so that none but that of an empty batch is
        empty. `examples` and `weights` of each stay those of its whole update.
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
        """Return the first `count` examples of a split as one batch, each of weight 1, for a warm-up."""
        size = np.array([count], dtype=np.int32)
        return cls(np.arange(count, dtype=np.int32), np.array([0, count], dtype=np.int32), size, size.astype(np.float64))


@dataclass
class Sampler:
    """The data order of one run. `size` is the number of training examples, `workers` that of those who share a step, or take one.

    `rule` cuts an epoch into steps: in sync mode global batches, in async mode worker batches. `augment` is how images are changed, None
    for not at all. `weights`, above 0, [size], are what each example counts in the loss; None where each counts 1. `lengths`, [size] a
    column of tokens, are what batches by tokens are filled by; None for data that is no text.

    `skip`, wherever it is a parameter, is the number of examples of the epoch that were consumed before this process began: steps
    are then those of the rest of the epoch, counted from 0; and `arranged` is how the epoch's order came about until then. Raises
    ValueError for weights that do not fit, and where lengths are needed and missing.
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
    _buckets: Buckets | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the weights, and precompute where each step of the first epoch begins."""
        if self.weights is not None:
            wrong = np.flatnonzero(~(self.weights > 0))
            if len(self.weights) != self.size or len(wrong):
                first = f"example {wrong[0]} has the weight {self.weights[wrong[0]]:g}" if len(wrong) else f"there are {len(self.weights)}"
                raise ValueError(f"weights: {first}; each of {self.size} examples needs one above 0")
        if self.rule.buckets is None:
            self._bounds_after(0, 0)
        else:
            self._by_length()

    @property
    def constant_steps(self) -> bool:
        """Whether every whole epoch takes as many updates as any other."""
        return self.rule.by_count or self.rule.buckets is not None

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates that the first whole epoch takes: every one, where steps are cut by count."""
        return self.steps_in_epoch()

    def steps_in_epoch(self, skip: int = 0, epoch: int = 0, arranged: Arranged = ()) -> int:
        """Return the number of updates that an epoch takes after `skip` examples."""
        if self.rule.buckets is not None and not skip and not arranged:
            return self._by_length().steps(self.rule.buckets.tokens, self.rule.buckets.batches)
        return len(self._bounds_after(skip, epoch, arranged)) - 1

    def examples_before(self, step_in_epoch: int, skip: int = 0, epoch: int = 0, arranged: Arranged = ()) -> int:
        """Return how many examples of the epoch are consumed before this step, `skip` included: the data cursor's second number."""
        if step_in_epoch == 0 and 0 <= skip <= self.size:
            return skip
        return int(self._bounds_after(skip, epoch, arranged)[step_in_epoch])

    def examples_at_once(self, most: int) -> int:
        """Return how many of any training examples, at most `most` and at least one, a worker may compute at once, to warm up.

        Where batches are filled by tokens, as many of the longest as fit; a batch of shorter ones has more.
        """
        if self.rule.buckets is not None:
            most = min(most, self.rule.buckets.tokens // int(self._by_length().edges[-1]))
        return max(1, min(most, self.size))

    def arranged_after(self, skip: int, arranged: Arranged) -> Arranged:
        """Return how the order of an epoch comes about whose first `skip` examples were consumed as `arranged` says, and the rest here.

        A rule that is in force already changes nothing. Raises ValueError for what no epoch can have gone through.
        """
        begins = [0, *(begin for begin, _, _ in arranged), skip]
        if any(after < before for before, after in pairwise(begins)) or skip > self.size:
            raise ValueError(f"the order {arranged} is none of the first {skip} examples of {self.size}")
        own = self.rule.buckets
        budget = (0, 0) if own is None else (own.tokens, own.batches)
        return arranged if budget == (arranged[-1][1:] if arranged else (0, 0)) else (*arranged, (skip, *budget))

    def order(self, epoch: int) -> Indices:
        """Return the epoch's permutation, int32 [size] (the last one asked for is kept)."""
        return self._epoch(epoch)[0]

    def whole(self, epoch: int, first: int, count: int, skip: int = 0, arranged: Arranged = ()) -> Batches:
        """Return steps first … first + count − 1 of an epoch, each complete: global batches in sync, worker batches in async.

        Raises ValueError where the steps are not all in the epoch.
        """
        steps = self.steps_in_epoch(skip, epoch, arranged)
        if first < 0 or count < 0 or first + count > steps:
            raise ValueError(f"steps {first}…{first + count} are not within the {steps} steps of an epoch after {skip} examples")
        bounds = self._bounds_after(skip, epoch, arranged)[first : first + count + 1]
        offsets = (bounds - bounds[0]).astype(np.int32)
        order, changes = self._epoch(epoch)
        if self._is_arranged(arranged):
            order, _ = self._arrange(epoch, skip, arranged)
        indices, examples = order[bounds[0] : bounds[-1]], np.diff(offsets)
        weights = examples.astype(np.float64)
        if self.weights is not None and count:
            weights = np.add.reduceat(self.weights[indices].astype(np.float64), offsets[:-1])
        return Batches(indices, offsets, examples, weights, None if changes is None else changes[indices])

    def for_rank(self, epoch: int, first: int, count: int, rank: int, skip: int = 0, arranged: Arranged = ()) -> Batches:
        """Return one rank's slices of the global batches first … first + count − 1 (sync).

        The slices of all ranks, in rank order, are the global batch; their sizes differ by at most one.
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

    def _epoch(self, epoch: int) -> tuple[Indices, Changes | None]:
        """Return order and changes of an epoch: those of the last one asked for are kept."""
        if self._cached is None or self._cached[0] != epoch:
            changes = self.augment.draws(self.seed, epoch, self.size) if self.augment else None
            self._cached = (epoch, permutation(self.seed, epoch, self.size), changes)
        return self._cached[1:]

    def _is_arranged(self, arranged: Arranged) -> bool:
        return self.rule.buckets is not None or bool(arranged)

    def _by_length(self) -> Buckets:
        """Return the buckets of the training examples; found once. Raises ValueError where there are no lengths."""
        if self._buckets is None:
            if self.lengths is None:
                raise ValueError("batches by tokens need the lengths of the examples")
            self._buckets = Buckets.of(np.maximum.reduce(list(self.lengths.values())))
        return self._buckets

    def _arrange(self, epoch: int, skip: int, arranged: Arranged) -> tuple[Indices, Bounds]:
        """Return the order of an epoch, and where its steps begin after `skip` examples; kept for the epoch that was asked for last."""
        key = (epoch, skip, arranged)
        if self._laid is None or self._laid[0] != key:
            order, bounds = self.order(epoch).copy(), np.array([skip], dtype=np.int64)
            for begin, tokens, batches in self.arranged_after(skip, arranged):
                if tokens:
                    order[begin:], sizes = self._by_length().arranged(order[begin:], tokens, batches, [self.seed, epoch, 1, begin])
                    bounds = np.concatenate([[begin], begin + np.cumsum(sizes)])
            if self.rule.buckets is None:
                bounds = self.rule.cut(order, skip)
            self._laid = (key, order, np.concatenate([[skip], bounds[bounds > skip]]))
        return self._laid[1:]

    def _bounds_after(self, skip: int, epoch: int, arranged: Arranged = ()) -> Bounds:
        """Return where each step of an epoch begins after `skip` examples, and at last where the epoch ends.

        Kept once computed: where epochs are cut alike those of each `skip`, else those of the epoch that was asked for last.
        """
        if self._is_arranged(arranged):
            return self._arrange(epoch, skip, arranged)[1]
        by_count = self.rule.by_count
        key = (0 if by_count else epoch, skip)
        if key not in self._bounds:
            if not 0 <= skip <= self.size:
                raise ValueError(f"{skip} examples cannot be skipped of an epoch that has {self.size}")
            order = np.broadcast_to(np.int32(0), self.size) if by_count else self.order(epoch)
            if not by_count:
                self._bounds = {kept: bounds for kept, bounds in self._bounds.items() if kept[0] in (0, epoch)}
            self._bounds[key] = self.rule.cut(order, skip)
        return self._bounds[key]


def padding_share(sampler: Sampler, micro_batches: int) -> float | None:
    """Return which share of the positions that are computed is padding, of all columns of tokens together; None for data that is no text.

    Each worker pads what it computes at once, its batch or one of at most so many `micro_batches`, to the longest example in it, column by
    column. Counted from the lengths over an epoch's first updates.
    """
    if sampler.lengths is None:
        return None
    count = min(PADDING_STEPS, sampler.steps_per_epoch)
    one = [sampler.whole(0, 0, count)]
    parts = one if sampler.rule.mode == "async" else [sampler.for_rank(0, 0, count, rank) for rank in range(sampler.workers)]
    cut = [part.in_micro_batches(micro_batches)[0] for part in parts]
    counted = [padded_positions(part.indices, part.offsets, lengths) for part in cut for lengths in sampler.lengths.values()]
    return sum(padding for _, padding in counted) / sum(positions for positions, _ in counted)


def run_sampler(job: Job, size: int, lengths: Mapping[str, NDArray[np.int64]] | None = None) -> Sampler:
    """Return the order of `size` examples in a run, for counting; images are not changed by it.

    `lengths` are those of `bucketing.example_lengths`.
    """
    return Sampler(size, job.seed, batch_rule(job), job.workers, lengths=lengths)
