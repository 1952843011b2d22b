"""Async parameters and buffers, in equal shards of a flat vector.

Messages are float32, integers as their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from ....core.update_rules import EMA, weights_to_evaluate
from ....models.base import Array
from ..data import Tensors
from ..optimizers import Optimizer
from .tickets import StepMarks, make_marks

PULL_EXTRA = 4  # two integers of two floats each: parameter version, last push's staleness
SKIP = -1.0  # learning rate of an overflowed update: counted, but changes nothing
_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements `start` to `stop` of the flat vector, the last of them buffers (`tail`).

    `begun` updates give concurrent ones different t for Adam.
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
        """Return the message float32 [stop − start + PULL_EXTRA], in ops.

        `to_evaluate` takes moving averages if there are any.
        """
        with tf.device(self.device):
            version = self._read_version()
            with tf.control_dependencies([version]):  # read first, so that a concurrent update increases staleness
                variables = [weights_to_evaluate(self.values, self.slots), *self._variables[1:]] if to_evaluate else self._variables
                values = [tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32) for variable in variables]
            before = tf.constant(0, tf.int64) if staleness is None else staleness
            return tf.concat([*values, _as_bits(version), _as_bits(before)], axis=0)

    def push(self, gradient: tf.Tensor, learning_rate: tf.Tensor, pulled: tf.Tensor, step: tf.Tensor | None = None) -> tf.Tensor:
        """In ops: apply one update, with marks each `step` (int64) once, and return the next `pull`.

        `gradient` float32 [stop − start]; staleness is the version before the update less that in `pulled`, from which the gradient
        is.
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

            with tf.control_dependencies([gradient]):  # nothing is read or counted before the message arrives
                before = apply() if marked is None else marked.once(tf.bitcast(parts[-1], tf.int64), apply, self._read_version)
            with tf.control_dependencies([before]):
                return self.pull(before - tf.bitcast(read, tf.int64))

    def _apply(self, gradient: tf.Tensor, decrement: Tensors, rate: tf.Tensor, update: tf.Tensor | None) -> list[tf.Operation]:
        scalars = self.optimizer.scalars(tf.reshape(rate, []), update)
        applied = [self.optimizer.apply(self.values, self.slots, gradient, scalars)]
        if self.tail is not None:
            applied.append(tf.raw_ops.AssignSubVariableOp(resource=self.tail.handle, value=decrement[0]))
        return applied

    def load(self, values: Array, slots: Mapping[str, Array], updates: int) -> None:
        """Replace everything.

        `values` is the whole flat vector, each slot that of the parameters; absent ones are reset.
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
        """Copy everything into whole flat vectors of parameters, slots and buffers."""
        middle = self.start + int(self.values.shape[0])
        values[self.start : middle] = self.values.numpy()
        for slot, variable in self.slots.items():
            slots[slot][self.start : middle] = variable.numpy()
        if self.tail is not None:
            buffers[middle - len(values) : self.stop - len(values)] = self.tail.numpy()

    def _read_version(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.version.handle, dtype=tf.int64)

    @property
    def _variables(self) -> list[tf.Variable]:
        return [self.values] if self.tail is None else [self.values, self.tail]


def read_staleness(message: tf.Tensor) -> tf.Tensor:
    """In ops: return the staleness, int64, at the end of a message from `push`."""
    return tf.bitcast(message[-2:], tf.int64)


def make_mask(index: int, start: int, stop: int, spans: Sequence[tuple[int, int]]) -> tf.Variable:
    """Create the mask of a shard on parameter server `index`: 1 in `spans` of the flat vector."""
    mask = np.zeros(stop - start, np.float32)
    for begin, end in spans:
        mask[max(begin - start, 0) : max(end - start, 0)] = 1.0
    with tf.device(f"/job:ps/task:{index}/device:CPU:0"):
        return tf.Variable(mask, trainable=False)


def make_shard(
    index: int, start: int, stop: int, parameters: int, optimizer: Optimizer, *, skipping: bool = False, marking: bool = False
) -> Shard:
    """Create a shard's zero variables on parameter server `index`.

    The vector's first `parameters` elements have slots.
    """
    device = f"/job:ps/task:{index}/device:CPU:0"
    trained = max(0, min(stop, parameters) - start)
    with tf.device(device):
        slots = {slot: tf.Variable(tf.zeros([trained])) for slot in optimizer.slots}
        counters = [tf.Variable(0, dtype=tf.int64) for _ in range(2)]
        tail = tf.Variable(tf.zeros([stop - start - trained])) if trained < stop - start else None
        marks, values = make_marks() if marking else None, tf.Variable(tf.zeros([trained]))
        return Shard(device, start, stop, values, tail, slots, counters[0], counters[1], optimizer, skipping, marks)


def _fetch_and_add(counter: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=_NO_LIMIT, T=tf.int64)


def _as_bits(number: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(number, tf.float32)
