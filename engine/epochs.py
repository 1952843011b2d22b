"""Which update falls into which epoch: for a run from its start, and for one that goes on from a checkpoint.

A run that is resumed within an epoch finishes that epoch's remaining examples in batches of its own size, and goes on with whole epochs
after it. Where an update stands in the training (`EpochIndex.epochs_at`) depends on the cursor alone, so that a schedule of the learning
rate neither jumps nor starts anew with another batch size, mode or number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.sampler import Sampler

__all__ = ["START", "DataCursor", "EpochIndex", "StepPosition"]


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Where a run stands: `step` updates done, and `examples` consumed of epoch `epoch` (from 0)."""

    step: int
    epoch: int
    examples: int


START = DataCursor(0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Where one update lies: its epoch, its number within what is left of it, `skip` examples of it done before, and updates left."""

    epoch: int
    first_in_epoch: int
    skip: int
    left: int


class EpochIndex:
    """The updates of a run that began, or goes on, at a cursor."""

    def __init__(self, sampler: Sampler, start: DataCursor = START) -> None:
        if start.examples == sampler.size:
            start = DataCursor(start.step, start.epoch + 1, 0)
        self.start = start
        self.steps_per_epoch = sampler.steps_per_epoch
        self._sampler = sampler
        self._first = sampler.steps_in_epoch(start.examples)
        self._first_positions = self._positions_after(start.examples)

    def first_step_of(self, epoch: int) -> int:
        """Return the number of the first update of an epoch; the starting one for an epoch that had begun by then."""
        if epoch <= self.start.epoch:
            return self.start.step
        return self.start.step + self._first + (epoch - self.start.epoch - 1) * self.steps_per_epoch

    def place(self, step: int) -> StepPosition:
        """Return where an update lies. Raises ValueError for one before the start."""
        done = step - self.start.step
        if done < 0:
            raise ValueError(f"update {step} was done before this part of the run began at update {self.start.step}")
        if done < self._first:
            return StepPosition(self.start.epoch, done, self.start.examples, self._first - done)
        epochs, in_epoch = divmod(done - self._first, self.steps_per_epoch)
        return StepPosition(self.start.epoch + 1 + epochs, in_epoch, 0, self.steps_per_epoch - in_epoch)

    def cursor(self, step: int) -> DataCursor:
        """Return where the run stands when `step` updates are done and the next one is not."""
        place = self.place(step)
        return DataCursor(step, place.epoch, self._sampler.examples_before(place.first_in_epoch, place.skip))

    def epochs_at(self, first: int, count: int) -> NDArray[np.float64]:
        """Return where updates stand in the training, in updates of this batch size, float64 [count].

        That is epoch · updates of a whole epoch + the updates that the consumed examples make, with fractions where another batch size
        consumed them. In a run that never changed it is the number of the update itself, exactly.
        """
        done = np.arange(first, first + count, dtype=np.int64) - self.start.step
        epochs, in_epoch = np.divmod(done - self._first, self.steps_per_epoch)
        later = (self.start.epoch + 1.0 + epochs) * self.steps_per_epoch + in_epoch
        within = self.start.epoch * float(self.steps_per_epoch) + self._first_positions[np.clip(done, 0, self._first)]
        return np.where(done < self._first, within, later)

    def epochs(self, step: int) -> float:
        """Return how many epochs are done after `step` updates, with fractions."""
        return float(self.epochs_at(step, 1)[0]) / self.steps_per_epoch

    def _positions_after(self, skip: int) -> NDArray[np.float64]:
        """Return the positions within the epoch of the updates that follow `skip` examples, and of the epoch's end."""
        if skip == 0:
            return np.arange(self.steps_per_epoch + 1, dtype=np.float64)
        sampler = self._sampler
        whole = [sampler.examples_before(step) for step in range(self.steps_per_epoch + 1)]
        rest = [sampler.examples_before(step, skip) for step in range(self._first + 1)]
        return np.interp(rest, whole, np.arange(self.steps_per_epoch + 1, dtype=np.float64))
