"""Who sees which example, when: the one source of data order for every backend, mode and number of workers.

An epoch is a permutation of the training examples that depends on (seed, epoch) alone. Sync cuts it into global batches; step t
is the same set of examples however many workers share it, and a worker takes a slice, possibly an empty one. Async cuts it into
worker batches; ticket t is the t-th of the epoch, whoever computes it. Nothing is dropped and nothing is padded: the last batch of
an epoch is simply shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import split_evenly

__all__ = ["Batches", "Sampler", "permutation"]

Indices = NDArray[np.int32]


def permutation(seed: int, epoch: int, size: int) -> Indices:
    """Return the order of the examples in one epoch, int32 [size].

    Sorts keys of the counter-based generator Philox, so that the order depends on neither the numpy release nor the machine.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int32)


@dataclass(frozen=True, slots=True)
class Batches:
    """Consecutive batches of one epoch as one flat array.

    Batch i is ``indices[offsets[i]:offsets[i + 1]]``, possibly empty; `global_sizes[i]` is the number of examples of all workers
    together in that update, by which the summed loss is divided.
    """

    indices: Indices
    offsets: Indices
    global_sizes: Indices

    def __len__(self) -> int:
        return len(self.global_sizes)

    def batch(self, position: int) -> Indices:
        """Return the indices of one batch."""
        return self.indices[self.offsets[position] : self.offsets[position + 1]]


@dataclass
class Sampler:
    """The data order of one run. `size` is the number of training examples; `global_batch` the examples of all workers per step.

    `mode` decides what a step is: sync a global batch, async a worker batch.
    """

    size: int
    seed: int
    global_batch: int
    workers: int
    mode: Literal["sync", "async"]
    _cached: tuple[int, Indices] | None = field(default=None, init=False, repr=False)
    _bounds: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Precompute where each step of an epoch begins; the same for every epoch."""
        starts = np.arange(0, self.size, self.global_batch, dtype=np.int64)
        if self.mode == "async":
            within = np.array([start for start, stop in split_evenly(self.global_batch, self.workers) if stop > start], dtype=np.int64)
            starts = (starts[:, None] + within[None, :]).ravel()
            starts = starts[starts < self.size]
        self._bounds = np.append(starts, self.size)

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates that one epoch takes."""
        return len(self._bounds) - 1

    def examples_before(self, step_in_epoch: int) -> int:
        """Return how many examples of the epoch are consumed before this step: the data cursor's second number."""
        return int(self._bounds[step_in_epoch])

    def order(self, epoch: int) -> Indices:
        """Return the epoch's permutation, int32 [size] (the last one asked for is kept)."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, permutation(self.seed, epoch, self.size))
        return self._cached[1]

    def whole(self, epoch: int, first: int, count: int) -> Batches:
        """Return steps first … first + count − 1 of an epoch, each complete: global batches in sync, worker batches in async.

        Raises ValueError where the steps are not all in the epoch.
        """
        if first < 0 or count < 0 or first + count > self.steps_per_epoch:
            raise ValueError(f"steps {first}…{first + count} are not within the {self.steps_per_epoch} steps of an epoch")
        bounds = self._bounds[first : first + count + 1]
        offsets = (bounds - bounds[0]).astype(np.int32)
        return Batches(self.order(epoch)[bounds[0] : bounds[-1]], offsets, np.diff(offsets))

    def for_rank(self, epoch: int, first: int, count: int, rank: int) -> Batches:
        """Return one rank's slices of the global batches first … first + count − 1 (sync).

        The slices of all ranks, in rank order, are the global batch; their sizes differ by at most one.
        """
        whole = self.whole(epoch, first, count)
        if self.workers == 1:
            return whole
        base, extra = np.divmod(whole.global_sizes, self.workers)
        sizes = base + (rank < extra)
        starts = whole.offsets[:-1] + rank * base + np.minimum(rank, extra)
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(sizes, out=offsets[1:])
        positions = np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], sizes)
        return Batches(whole.indices[positions], offsets, whole.global_sizes)
