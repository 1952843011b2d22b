"""Who sees which example, when: the one source of data order for every backend, mode and number of workers.

An epoch is a permutation of the training examples that depends on (seed, epoch) alone. Sync cuts it into global batches; step t
is the same set of examples however many workers share it, and a worker takes a slice, possibly an empty one. Async cuts it into
worker batches; ticket t is the t-th of the epoch, whoever computes it. Nothing is dropped and nothing is padded: the last batch of
an epoch is simply shorter. A run that is resumed within an epoch skips the examples it has consumed and cuts the rest afresh, in
whatever batches it now has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import split_evenly
from ..core.job import Job
from .augment import Augmentation, Changes

__all__ = ["Batches", "Sampler", "permutation", "run_sampler", "stable_order"]

Indices = NDArray[np.int32]
Bounds = NDArray[np.int64]


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

    Batch i is ``indices[offsets[i]:offsets[i + 1]]``, possibly empty; `global_sizes[i]` is the number of examples of all workers
    together in that update, by which the summed loss is divided. `changes` int32 [len(indices), 3] says how each image is to be
    changed before it is used (`augment.apply_changes`); None where none is.
    """

    indices: Indices
    offsets: Indices
    global_sizes: Indices
    changes: Changes | None = None

    def __len__(self) -> int:
        return len(self.global_sizes)

    def batch(self, position: int) -> Indices:
        """Return the indices of one batch."""
        return self.indices[self.offsets[position] : self.offsets[position + 1]]


@dataclass
class Sampler:
    """The data order of one run. `size` is the number of training examples; `global_batch` the examples of all workers per step.

    `mode` decides what a step is: sync a global batch, async a worker batch. `augment` is how images are changed, None for not at all.

    `skip`, wherever it is a parameter, is the number of examples of the epoch that were consumed before this process began: steps
    are then those of the rest of the epoch, counted from 0.
    """

    size: int
    seed: int
    global_batch: int
    workers: int
    mode: Literal["sync", "async"]
    augment: Augmentation | None = None
    _cached: tuple[int, Indices, Changes | None] | None = field(default=None, init=False, repr=False)
    _bounds: dict[int, Bounds] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Precompute where each step of a whole epoch begins; the same for every epoch."""
        self._bounds[0] = self._cut(0)

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates that one whole epoch takes."""
        return self.steps_in_epoch()

    def steps_in_epoch(self, skip: int = 0) -> int:
        """Return the number of updates that an epoch takes after `skip` examples."""
        return len(self._bounds_after(skip)) - 1

    def examples_before(self, step_in_epoch: int, skip: int = 0) -> int:
        """Return how many examples of the epoch are consumed before this step, `skip` included: the data cursor's second number."""
        return int(self._bounds_after(skip)[step_in_epoch])

    def order(self, epoch: int) -> Indices:
        """Return the epoch's permutation, int32 [size] (the last one asked for is kept)."""
        return self._epoch(epoch)[0]

    def whole(self, epoch: int, first: int, count: int, skip: int = 0) -> Batches:
        """Return steps first … first + count − 1 of an epoch, each complete: global batches in sync, worker batches in async.

        Raises ValueError where the steps are not all in the epoch.
        """
        steps = self.steps_in_epoch(skip)
        if first < 0 or count < 0 or first + count > steps:
            raise ValueError(f"steps {first}…{first + count} are not within the {steps} steps of an epoch after {skip} examples")
        bounds = self._bounds[skip][first : first + count + 1]
        offsets = (bounds - bounds[0]).astype(np.int32)
        order, changes = self._epoch(epoch)
        indices = order[bounds[0] : bounds[-1]]
        return Batches(indices, offsets, np.diff(offsets), None if changes is None else changes[indices])

    def for_rank(self, epoch: int, first: int, count: int, rank: int, skip: int = 0) -> Batches:
        """Return one rank's slices of the global batches first … first + count − 1 (sync).

        The slices of all ranks, in rank order, are the global batch; their sizes differ by at most one.
        """
        whole = self.whole(epoch, first, count, skip)
        if self.workers == 1:
            return whole
        base, extra = np.divmod(whole.global_sizes, self.workers)
        sizes = base + (rank < extra)
        starts = whole.offsets[:-1] + rank * base + np.minimum(rank, extra)
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(sizes, out=offsets[1:])
        positions = np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], sizes)
        changes = None if whole.changes is None else whole.changes[positions]
        return Batches(whole.indices[positions], offsets, whole.global_sizes, changes)

    def _epoch(self, epoch: int) -> tuple[Indices, Changes | None]:
        """Return order and changes of an epoch: those of the last one asked for are kept."""
        if self._cached is None or self._cached[0] != epoch:
            changes = self.augment.draws(self.seed, epoch, self.size) if self.augment else None
            self._cached = (epoch, permutation(self.seed, epoch, self.size), changes)
        return self._cached[1:]

    def _bounds_after(self, skip: int) -> Bounds:
        """Return where each step of an epoch begins after `skip` examples, and at last where the epoch ends; kept once computed."""
        if skip not in self._bounds:
            if not 0 <= skip <= self.size:
                raise ValueError(f"{skip} examples cannot be skipped of an epoch that has {self.size}")
            self._bounds[skip] = self._cut(skip)
        return self._bounds[skip]

    def _cut(self, skip: int) -> Bounds:
        starts = np.arange(skip, self.size, self.global_batch, dtype=np.int64)
        if self.mode == "async":
            within = np.array([start for start, stop in split_evenly(self.global_batch, self.workers) if stop > start], dtype=np.int64)
            starts = (starts[:, None] + within[None, :]).ravel()
            starts = starts[starts < self.size]
        return np.append(starts, self.size)


def run_sampler(job: Job, size: int) -> Sampler:
    """Return the order of `size` examples in a run, for counting; images are not changed by it."""
    return Sampler(size, job.seed, job.global_batch, job.workers, job.mode)
