"""Shard of the flat vector.

It applies each step once: a lost worker's may be computed again for the other shards.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.job import Job
from ...core.update_rules import decayed_spans, slot_names, weights_to_evaluate, without_decay


class AppliedSteps:
    """Set of steps, stored as intervals [start, stop): at most one per ticket handed out."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __contains__(self, step: int) -> bool:
        place = bisect_right(self._starts, step)
        return place > 0 and step < self._stops[place - 1]

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, step: int) -> bool:
        """Add a step; return whether it was new."""
        starts, stops = self._starts, self._stops
        place = bisect_right(starts, step)
        if place and step < stops[place - 1]:
            return False
        follows = place > 0 and stops[place - 1] == step
        precedes = place < len(starts) and starts[place] == step + 1
        if follows and precedes:
            stops[place - 1] = stops[place]
            del starts[place], stops[place]
        elif follows:
            stops[place - 1] = step + 1
        elif precedes:
            starts[place] = step
        else:
            starts.insert(place, step)
            stops.insert(place, step + 1)
        return True

    def clear(self) -> None:
        """Remove every step, as the state is replaced."""
        self._starts.clear()
        self._stops.clear()


# The vector has parameters, then buffers, whose "gradients" are subtracted; values, slots and version change under one lock.

Vector = NDArray[np.float32]


class UpdateRule(Protocol):
    """A job's update rule, bound to a vector of parameters."""

    updates: int

    @property
    def slots(self) -> Mapping[str, Vector]:
        """Vectors by slot name, in memory that stays where it is."""

    def step(self, gradient: Vector, lr: float) -> None:
        """Apply and count one update. The gradient may be overwritten."""


MakeRule = Callable[[Job, Vector], UpdateRule]  # binds a job's rule to a vector, updated in place


class PartialDecay:
    """A rule without weight decay after the decay of `spans` of its vector.

    adamw: w ← (1 − lr·λ)·w first; else g ← g + λ·w.
    """

    def __init__(self, job: Job, parameters: Vector, rule: UpdateRule, spans: Sequence[tuple[int, int]]) -> None:
        self._rule, self._parameters, self._spans = rule, parameters, [slice(*span) for span in spans]
        self._decay, self._decoupled = job.weight_decay, job.optimizer == "adamw"

    @property
    def slots(self) -> Mapping[str, Vector]:
        """The rule's vectors by slot name."""
        return self._rule.slots

    @property
    def updates(self) -> int:
        """The updates applied."""
        return self._rule.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._rule.updates = count

    def step(self, gradient: Vector, lr: float) -> None:
        """Apply and count one update. The gradient may be overwritten."""
        for span in self._spans:
            if self._decoupled:
                self._parameters[span] *= 1.0 - lr * self._decay
            else:
                gradient[span] += self._decay * self._parameters[span]
        self._rule.step(gradient, lr)


def bind_rule(job: Job, parameters: Vector, make_rule: MakeRule, sizes: Mapping[str, int], start: int = 0) -> UpdateRule:
    """Return the job's rule for a part of the flat vector of parameters.

    `start`: its first element. `sizes`: of all parameters by name.
    """
    if job.weight_decay_except is None:
        return make_rule(job, parameters)
    within = [(max(begin - start, 0), min(end - start, len(parameters))) for begin, end in decayed_spans(job, sizes)]
    spans = [(begin, end) for begin, end in within if begin < end]
    return PartialDecay(job, parameters, make_rule(without_decay(job), parameters), spans)


class Shard:
    """Values [elements] float32, parameters then buffers, and their rule.

    `busy_seconds` is the time of updates.
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
        """Number of values."""
        return self._values.size

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._rule.updates

    def has_applied(self, step: int) -> bool:
        """Return whether a step is part of the values."""
        with self._lock:
            return step in self._applied

    def update(self, gradient: Vector, lr: float, read: int, out: Vector, *, step: int | None, skip: bool = False) -> tuple[int, int]:
        """Apply one update and copy the new values to `out`, in one critical section.

        Return (staleness, new version).
        A `step` is applied once; None: outside training. `skip`: only count it. Staleness: updates since `read`. Overwrites `gradient`.
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
        """Copy the values to `out`, parameters maybe `averaged`, and return their version."""
        with self._lock:
            np.copyto(out, self._values)
            if averaged:
                np.copyto(out[: len(self._trained)], weights_to_evaluate(self._trained, self._rule.slots))
            return self._rule.updates

    def _pieces(self) -> list[Vector]:
        pieces = [self._trained, *(self._rule.slots[slot] for slot in self._slots), self._tail]
        return [piece for piece in pieces if len(piece)]

    def export(self, send: Callable[[Sequence[Vector], int], None]) -> None:
        """Have the state's pieces and version sent or copied while nothing changes them."""
        with self._lock:
            send(self._pieces(), self._rule.updates)

    def replace(self, receive: Callable[[Sequence[Vector]], None], version: int) -> None:
        """Have the state's pieces overwritten while nothing reads them."""
        with self._lock:
            receive(self._pieces())
            self._rule.updates = version
            self._applied.clear()


def bytes_of(vector: Vector) -> memoryview:
    """Return a contiguous array's memory as bytes, shared."""
    return vector.data.cast("B")
