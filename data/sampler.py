"""Who sees which example, when: the one source of data order for every backend, mode and number of workers.

An epoch is a permutation of the training examples that depends on (seed, epoch) alone. Sync cuts it into global batches; step t
is the same set of examples however many workers share it, and a worker takes a slice, possibly an empty one. Async cuts it into
worker batches; ticket t is the t-th of the epoch, whoever computes it. Nothing is dropped and nothing is padded: the last batch of
an epoch is simply shorter. A run that is resumed within an epoch skips the examples it has consumed and cuts the rest afresh, in
whatever batches it now has. Where the cuts are, a `BatchRule` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from .augment import Augmentation, Changes
from .batching import BatchRule, Bounds, Indices, batch_rule

__all__ = ["Batches", "Sampler", "permutation", "run_sampler", "stable_order"]


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
    for not at all. `weights`, above 0, [size], are what each example counts in the loss; None where each counts 1.

    `skip`, wherever it is a parameter, is the number of examples of the epoch that were consumed before this process began: steps
    are then those of the rest of the epoch, counted from 0. Raises ValueError for weights that do not fit.
    """

    size: int
    seed: int
    rule: BatchRule
    workers: int
    augment: Augmentation | None = None
    weights: NDArray[np.integer] | NDArray[np.floating] | None = None
    _cached: tuple[int, Indices, Changes | None] | None = field(default=None, init=False, repr=False)
    _bounds: dict[tuple[int, int], Bounds] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the weights, and precompute where each step of the first epoch begins."""
        if self.weights is not None:
            wrong = np.flatnonzero(~(self.weights > 0))
            if len(self.weights) != self.size or len(wrong):
                first = f"example {wrong[0]} has the weight {self.weights[wrong[0]]:g}" if len(wrong) else f"there are {len(self.weights)}"
                raise ValueError(f"weights: {first}; each of {self.size} examples needs one above 0")
        self._bounds_after(0, 0)

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates that the first whole epoch takes: every one, where steps are cut by count."""
        return self.steps_in_epoch()

    def steps_in_epoch(self, skip: int = 0, epoch: int = 0) -> int:
        """Return the number of updates that an epoch takes after `skip` examples."""
        return len(self._bounds_after(skip, epoch)) - 1

    def examples_before(self, step_in_epoch: int, skip: int = 0, epoch: int = 0) -> int:
        """Return how many examples of the epoch are consumed before this step, `skip` included: the data cursor's second number."""
        return int(self._bounds_after(skip, epoch)[step_in_epoch])

    def order(self, epoch: int) -> Indices:
        """Return the epoch's permutation, int32 [size] (the last one asked for is kept)."""
        return self._epoch(epoch)[0]

    def whole(self, epoch: int, first: int, count: int, skip: int = 0) -> Batches:
        """Return steps first … first + count − 1 of an epoch, each complete: global batches in sync, worker batches in async.

        Raises ValueError where the steps are not all in the epoch.
        """
        steps = self.steps_in_epoch(skip, epoch)
        if first < 0 or count < 0 or first + count > steps:
            raise ValueError(f"steps {first}…{first + count} are not within the {steps} steps of an epoch after {skip} examples")
        bounds = self._bounds_after(skip, epoch)[first : first + count + 1]
        offsets = (bounds - bounds[0]).astype(np.int32)
        order, changes = self._epoch(epoch)
        indices, examples = order[bounds[0] : bounds[-1]], np.diff(offsets)
        weights = examples.astype(np.float64)
        if self.weights is not None and count:
            weights = np.add.reduceat(self.weights[indices].astype(np.float64), offsets[:-1])
        return Batches(indices, offsets, examples, weights, None if changes is None else changes[indices])

    def for_rank(self, epoch: int, first: int, count: int, rank: int, skip: int = 0) -> Batches:
        """Return one rank's slices of the global batches first … first + count − 1 (sync).

        The slices of all ranks, in rank order, are the global batch; their sizes differ by at most one.
        """
        whole = self.whole(epoch, first, count, skip)
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

    def _bounds_after(self, skip: int, epoch: int) -> Bounds:
        """Return where each step of an epoch begins after `skip` examples, and at last where the epoch ends.

        Kept once computed: where epochs are cut alike those of each `skip`, else those of the epoch that was asked for last.
        """
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


def run_sampler(job: Job, size: int) -> Sampler:
    """Return the order of `size` examples in a run, for counting; images are not changed by it."""
    return Sampler(size, job.seed, batch_rule(job), job.workers)
