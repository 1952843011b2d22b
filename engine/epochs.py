"""Epochs of updates, computed from the cursor, so that schedules neither jump nor restart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.batching import Arranged
from ..data.sampler import Sampler


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Position of a run: `step` updates done, `examples` consumed of epoch `epoch` (from 0)."""

    step: int
    epoch: int
    examples: int
    arranged: Arranged = ()


START = DataCursor(0, 0, 0)


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Position of an update in its epoch after the first `skip` examples.

    `left` are the remaining updates in it.
    """

    epoch: int
    first_in_epoch: int
    skip: int
    left: int
    arranged: Arranged = ()


class EpochIndex:
    """Updates of a run from a cursor on; `steps_per_epoch` is of the first whole epoch."""

    def __init__(self, sampler: Sampler, start: DataCursor = START) -> None:
        if start.examples == sampler.size:
            start = DataCursor(start.step, start.epoch + 1, 0)
        self.start = start
        self.steps_per_epoch = sampler.steps_per_epoch
        self._sampler = sampler
        self._first = sampler.steps_in_epoch(start.examples, start.epoch, start.arranged)
        self._first_positions = self._positions_after(start.examples)
        self._starts = [start.step + self._first]  # of later epochs, computed on demand

    def first_step_in_epoch(self, epoch: int) -> int:
        """Return the number of an epoch's first update; the run's first for an epoch already begun."""
        if epoch <= self.start.epoch:
            return self.start.step
        later = epoch - self.start.epoch - 1
        if self._sampler.constant_steps:
            return self._starts[0] + later * self.steps_per_epoch
        while len(self._starts) <= later:
            self._starts.append(self._starts[-1] + self._steps_in(self.start.epoch + len(self._starts)))
        return self._starts[later]

    def place(self, step: int) -> StepPosition:
        """Return the position of an update. Raises ValueError before the start."""
        done = step - self.start.step
        if done < 0:
            raise ValueError(f"update {step} was done before this part of the run began at update {self.start.step}")
        if done < self._first:
            return StepPosition(self.start.epoch, done, self.start.examples, self._first - done, self.start.arranged)
        epoch = self._epoch_of(step)
        in_epoch = step - self.first_step_in_epoch(epoch)
        return StepPosition(epoch, in_epoch, 0, self._steps_in(epoch) - in_epoch)

    def cursor(self, step: int) -> DataCursor:
        """Return the run's position after `step` updates."""
        place = self.place(step)
        examples = self._sampler.examples_before(place.first_in_epoch, place.skip, place.epoch, place.arranged)
        arranged = self._sampler.arranged_after(place.skip, place.arranged) if examples else ()
        return DataCursor(step, place.epoch, examples, arranged)

    def steps_until(self, examples: int) -> int:
        """Return the number of updates that consume this many examples over all epochs."""
        epoch, rest = divmod(examples, self._sampler.size)
        begun = epoch == self.start.epoch
        if epoch < self.start.epoch or (begun and rest <= self.start.examples):
            return self.start.step
        first, count = self.first_step_in_epoch(epoch), self._first if begun else self._steps_in(epoch)
        skip, arranged = (self.start.examples, self.start.arranged) if begun else (0, ())
        return first + bisect_left(range(count), rest, key=lambda step: self._sampler.examples_before(step, skip, epoch, arranged))

    def epochs_at(self, first: int, count: int) -> NDArray[np.float64]:
        """Return positions in epochs × `steps_per_epoch`, float64 [count].

        With equal epochs they are exactly the update numbers.
        """
        positions = np.empty(count)
        step, stop = first, first + count
        while step < stop:
            place = self.place(step)
            size = min(place.left, stop - step)
            done = np.arange(place.first_in_epoch, place.first_in_epoch + size)
            begun = place.epoch == self.start.epoch
            within = self._first_positions[done] if begun else done * (self.steps_per_epoch / self._steps_in(place.epoch))
            positions[step - first : step - first + size] = place.epoch * float(self.steps_per_epoch) + within
            step += size
        return positions

    def epochs(self, step: int) -> float:
        """Return the epochs done after `step` updates, by examples, as updates may differ in size."""
        done = self.cursor(step)
        return done.epoch + done.examples / self._sampler.size

    def _steps_in(self, epoch: int) -> int:
        return self.steps_per_epoch if self._sampler.constant_steps else self._sampler.steps_in_epoch(0, epoch)

    def _epoch_of(self, step: int) -> int:
        if self._sampler.constant_steps:
            return self.start.epoch + 1 + (step - self._starts[0]) // self.steps_per_epoch
        while self._starts[-1] <= step:
            self.first_step_in_epoch(self.start.epoch + 1 + len(self._starts))
        return self.start.epoch + bisect_right(self._starts, step)

    def _positions_after(self, skip: int) -> NDArray[np.float64]:
        """Return positions of the first epoch's updates after `skip` examples, and of its end.

        They are out of `steps_per_epoch`.
        """
        epoch, sampler = self.start.epoch, self._sampler
        whole_steps = self._steps_in(epoch)
        scale = self.steps_per_epoch / whole_steps
        if skip == 0:
            return np.arange(whole_steps + 1, dtype=np.float64) * scale
        whole = [sampler.examples_before(step, 0, epoch) for step in range(whole_steps + 1)]
        rest = [sampler.examples_before(step, skip, epoch, self.start.arranged) for step in range(self._first + 1)]
        return np.interp(rest, whole, np.arange(whole_steps + 1, dtype=np.float64) * scale)
