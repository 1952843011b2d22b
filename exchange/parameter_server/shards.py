"""A shard of the flat vector: the values, the rule's slots, and the version, changed together under one lock.

The vector has the parameters first, which follow the update rule, then the model's buffers, whose "gradients" are simply taken off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.job import Job
from ...core.update_rules import slot_names, weights_to_evaluate
from .applied_steps import AppliedSteps

__all__ = ["MakeRule", "Shard", "UpdateRule", "Vector", "bytes_of"]

Vector = NDArray[np.float32]


class UpdateRule(Protocol):
    """A job's update rule, bound to a vector of parameters, as a framework computes it. `slots` are vectors too, by slot name."""

    updates: int

    @property
    def slots(self) -> Mapping[str, Vector]:
        """What the rule keeps besides, in memory that stays where it is."""
        ...

    def step(self, gradient: Vector, lr: float) -> None:
        """Apply one update, and count it. The gradient may be overwritten."""
        ...


MakeRule = Callable[[Job, Vector], UpdateRule]
"""Binds a job's rule to a vector, which it updates in place, with slots as before the first update."""


class Shard:
    """Values [elements] float32 with their rule. The version is the number of updates applied (Adam's t).

    The first `trained` values are parameters, the others buffers. `busy_seconds` is the time spent applying updates. The shard remembers
    the steps that it has applied since its state was replaced, and applies none twice.
    """

    def __init__(self, values: Vector, trained: int, job: Job, make_rule: MakeRule) -> None:
        self._values = np.array(values, dtype=np.float32)
        self._trained, self._tail = self._values[:trained], self._values[trained:]
        self._rule = make_rule(job, self._trained)
        self._slots = slot_names(job)
        self._lock = threading.Lock()
        self._applied = AppliedSteps()
        self.busy_seconds = 0.0

    @property
    def elements(self) -> int:
        """Number of values in the shard."""
        return self._values.size

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._rule.updates

    def has_applied(self, step: int) -> bool:
        """Whether the update of this number is part of the values."""
        with self._lock:
            return step in self._applied

    def update(self, gradient: Vector, lr: float, read: int, out: Vector, *, step: int | None, skip: bool = False) -> tuple[int, int]:
        """Apply one update and copy the new values to `out`, all in one critical section. `skip`: it is counted, but changes nothing.

        One whose `step` has been applied before is passed over, and not counted again; None: it is no step of the training. `read` is the
        version that the gradient was computed from. Returns (staleness, new version): staleness is the number of updates applied between
        that version and this update. The gradient is overwritten.
        """
        with self._lock:
            began = time.perf_counter()
            staleness = self._rule.updates - read
            if step is not None and not self._applied.add(step):
                pass
            elif skip:
                self._rule.updates += 1
            elif len(self._tail):
                self._rule.step(gradient[: len(self._trained)], lr)
                self._tail -= gradient[len(self._trained) :]
            else:
                self._rule.step(gradient, lr)
            np.copyto(out, self._values)
            self.busy_seconds += time.perf_counter() - began
            return staleness, self._rule.updates

    def read(self, out: Vector, *, averaged: bool = False) -> int:
        """Copy the values to `out` and return their version. `averaged`: of parameters their moving averages, where the job keeps them."""
        with self._lock:
            np.copyto(out, self._values)
            if averaged:
                np.copyto(out[: len(self._trained)], weights_to_evaluate(self._trained, self._rule.slots))
            return self._rule.updates

    def _pieces(self) -> list[Vector]:
        """Return parameters, each slot, and buffers, empty ones left out."""
        pieces = [self._trained, *(self._rule.slots[slot] for slot in self._slots), self._tail]
        return [piece for piece in pieces if len(piece)]

    def export(self, send: Callable[[Sequence[Vector], int], None]) -> None:
        """Have the state's pieces and the version sent on, or copied, while nothing changes them."""
        with self._lock:
            send(self._pieces(), self._rule.updates)

    def replace(self, receive: Callable[[Sequence[Vector]], None], version: int) -> None:
        """Have the state's pieces overwritten, while nobody reads them."""
        with self._lock:
            receive(self._pieces())
            self._rule.updates = version
            self._applied.clear()


def bytes_of(vector: Vector) -> memoryview:
    """Return a contiguous array's memory as bytes, shared."""
    return vector.data.cast("B")
