"""The parameters of an async run on the parameter servers: one flat vector, cut into equal shards, each with its optimiser's slots.

After the parameters the vector has the model's buffers (running statistics). What is pushed for those is by how much they are to become
smaller, whatever the update rule: a worker's old values less its new ones.

A shard is read, and updated, by one message each way, whatever the number of parameters in it. Shard 0 counts the updates; the
staleness of an update is counted there: how many updates were applied to the shard between the read and the application.

The vectors in messages are float32. An integer travels among them as its bits (`_as_bits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from ....core.update_rules import EMA, weights_to_evaluate
from ....models.base import Array
from ..optimizers import Optimizer
from .step_marks import StepMarks, make_marks

__all__ = ["PULL_EXTRA", "SKIP", "Shard", "make_shard", "staleness_of"]

PULL_EXTRA = 4
"""A pulled message ends in two integers of two floats each: the version of the parameters, and the staleness of the push before."""

SKIP = -1.0
"""The learning rate of an update that is counted, but changes nothing: its gradient overflowed."""

_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter server's shard of the flat vector: elements `start` to `stop`, of which `tail` are buffers, None where none are.

    `version` counts completed updates.

    `begun` counts updates whose application has begun: each takes its own number t for Adam, also where two are applied at once.

    `marks`: those of the steps that it has applied, where a step may be pushed again, as that of a lost worker is. Looking costs time too.

    `skipping`: some pushes are to be skipped (`SKIP`). Looking costs time, so that only a loss scale makes a shard look.
    """

    device: str
    start: int
    stop: int
    values: tf.Variable
    tail: tf.Variable | None
    slots: Mapping[str, tf.Variable]
    version: tf.Variable
    begun: tf.Variable
    optimizer: Optimizer
    skipping: bool
    marks: StepMarks | None = None

    def pull(self, staleness: tf.Tensor | None = None, *, to_evaluate: bool = False) -> tf.Tensor:
        """In ops: return the message float32 [stop − start + PULL_EXTRA]. `to_evaluate`: with moving averages, where the job keeps them.

        The version is read before the values, so that an update that slips in between makes staleness larger, never smaller.
        """
        with tf.device(self.device):
            version = tf.raw_ops.ReadVariableOp(resource=self.version.handle, dtype=tf.int64)
            with tf.control_dependencies([version]):
                variables = [weights_to_evaluate(self.values, self.slots), *self._variables[1:]] if to_evaluate else self._variables
                values = [tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32) for variable in variables]
            before = tf.constant(0, tf.int64) if staleness is None else staleness
            return tf.concat([*values, _as_bits(version), _as_bits(before)], axis=0)

    def push(self, gradient: tf.Tensor, learning_rate: tf.Tensor, pulled: tf.Tensor, step: tf.Tensor | None = None) -> tf.Tensor:
        """In ops: apply one update to the shard and return the next `pull`.

        `gradient` float32 [stop − start], computed from the values of the message `pulled`. The version is raised after the update is
        complete, by an op that counts and returns in one; staleness is the count before it less the version in `pulled`. `step` int64 is
        the update's number, without which it is applied in any case; with it, and marks, once.
        """
        size = self.stop - self.start
        marked = self.marks if step is not None else None
        number = [] if marked is None else [_as_bits(step)]
        message = tf.concat([gradient, tf.reshape(learning_rate, [1]), pulled[size : size + 2], *number], axis=0)
        with tf.device(self.device):
            sizes = [*(variable.shape[0] for variable in self._variables), 1, 2, *(2 for _ in number)]
            gradient, *parts = tf.split(message, sizes)
            *decrement, rate, read = parts[: len(parts) - len(number)]

            def apply() -> tf.Tensor:
                update = _fetch_and_add(self.begun) + 1 if self.optimizer.needs_count else None
                if self.skipping:
                    applied = [
                        tf.cond(rate[0] == SKIP, lambda: tf.no_op(), lambda: tf.group(self._apply(gradient, decrement, rate, update)))
                    ]
                else:
                    applied = self._apply(gradient, decrement, rate, update)
                with tf.control_dependencies(applied):
                    return _fetch_and_add(self.version)

            def pass_over() -> tf.Tensor:
                return tf.raw_ops.ReadVariableOp(resource=self.version.handle, dtype=tf.int64)

            with tf.control_dependencies([gradient]):  # nothing is read or counted before the message is here
                before = apply() if marked is None else marked.once(tf.bitcast(parts[-1], tf.int64), apply, pass_over)
            with tf.control_dependencies([before]):
                return self.pull(before - tf.bitcast(read, tf.int64))

    def _apply(self, gradient: tf.Tensor, decrement: Sequence[tf.Tensor], rate: tf.Tensor, update: tf.Tensor | None) -> list[tf.Operation]:
        """In ops: update the values and the tail; return the ops after which that is complete."""
        scalars = self.optimizer.scalars(tf.reshape(rate, []), update)
        applied = [self.optimizer.apply(self.values, self.slots, gradient, scalars)]
        if self.tail is not None:
            applied.append(tf.raw_ops.AssignSubVariableOp(resource=self.tail.handle, value=decrement[0]))
        return applied

    def load(self, values: Array, slots: Mapping[str, Array], updates: int) -> None:
        """Replace everything. `values` is the whole flat vector; each of `slots` that of the parameters.

        A slot that is absent becomes what it is before the first update.
        """
        middle = self.start + int(self.values.shape[0])
        self.values.assign(values[self.start : middle])
        if self.tail is not None:
            self.tail.assign(values[middle : self.stop])
        for slot, variable in self.slots.items():
            if slot in slots:
                variable.assign(slots[slot][self.start : middle])
            elif slot == EMA:
                variable.assign(values[self.start : middle])
            else:
                with tf.device(self.device):
                    variable.assign(tf.zeros(variable.shape))
        if self.marks is not None:
            self.marks.clear()
        self.version.assign(updates)
        self.begun.assign(updates)

    def copy_to(self, values: Array, slots: Mapping[str, Array], buffers: Array) -> None:
        """Copy everything into whole flat vectors: of parameters, each slot's, and of buffers."""
        middle = self.start + int(self.values.shape[0])
        values[self.start : middle] = self.values.numpy()
        for slot, variable in self.slots.items():
            slots[slot][self.start : middle] = variable.numpy()
        if self.tail is not None:
            buffers[middle - len(values) : self.stop - len(values)] = self.tail.numpy()

    @property
    def _variables(self) -> list[tf.Variable]:
        return [self.values] if self.tail is None else [self.values, self.tail]


def staleness_of(message: tf.Tensor) -> tf.Tensor:
    """In ops: return the staleness, int64, that a message from `push` ends in."""
    return tf.bitcast(message[-2:], tf.int64)


def make_shard(
    index: int, start: int, stop: int, parameters: int, optimizer: Optimizer, *, skipping: bool = False, marking: bool = False
) -> Shard:
    """Create a shard's variables on parameter server `index`, all zeros. The first `parameters` elements of the vector have slots."""
    device = f"/job:ps/task:{index}/device:CPU:0"
    own = max(0, min(stop, parameters) - start)
    with tf.device(device):
        slots = {slot: tf.Variable(tf.zeros([own])) for slot in optimizer.slots}
        counters = [tf.Variable(0, dtype=tf.int64) for _ in range(2)]
        tail = tf.Variable(tf.zeros([stop - start - own])) if own < stop - start else None
        marks, values = make_marks() if marking else None, tf.Variable(tf.zeros([own]))
        return Shard(device, start, stop, values, tail, slots, counters[0], counters[1], optimizer, skipping, marks)


def _fetch_and_add(counter: tf.Variable) -> tf.Tensor:
    """In ops: add 1 under the variable's lock and return the value before, so that no two callers get the same one."""
    return tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=_NO_LIMIT, T=tf.int64)


def _as_bits(number: tf.Tensor) -> tf.Tensor:
    """Return an int64 scalar as float32 [2] of the same bits."""
    return tf.bitcast(number, tf.float32)
