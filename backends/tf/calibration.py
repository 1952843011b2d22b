"""Repeats a component of a step in ops, and times it, when training is over; see `Session.calibrate`.

As in training one call carries out many repetitions, in ops. Each begins when the one before is complete, on its device too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..base import CalibrationOrder
from .data import Batch

__all__ = ["SMALL_ELEMENTS", "State", "Step", "a_number", "after", "first_of", "limits_of", "limits_spec", "repeated"]

State = Sequence[tf.Tensor]
Step = Callable[[tf.Tensor, State], State]
"""A repetition in ops: from its number (int32) and what the one before left to what it leaves. No tensor among that may be empty."""


SMALL_ELEMENTS = 16
"""Of a small message, for each rank: as many as a ring of ranks needs to have something for everybody."""


def limits_of(order: CalibrationOrder) -> NDArray[np.float64]:
    """Return an order's count and seconds, float64 [2]."""
    return np.array([order.count, order.seconds])


def limits_spec() -> tf.TensorSpec:
    """Return the type of what `limits_of` gives."""
    return tf.TensorSpec([2], tf.float64)


def repeated(step: Step, state: State, limits: tf.Tensor, *, by_count: bool = False) -> tf.Tensor:
    """In ops: repeat a step as `limits` say; return how often it was done, and the seconds that all of it took, float64 [2].

    `by_count`: only as often as the count says, and without a clock.
    """
    if by_count:
        return _repeated_by_count(step, state, tf.cast(limits[0], tf.int32))
    count = tf.cast(limits[0], tf.int32)
    began = _now([*state, count])
    with tf.control_dependencies([began]):
        first = [tf.identity(tensor) for tensor in state]

    def goes_on(done: tf.Tensor, *state: tf.Tensor) -> tf.Tensor:
        return (done < count) | (_now(state) - began < limits[1])

    def body(done: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return done + 1, *step(done, state)

    done, *last = tf.while_loop(goes_on, body, (tf.constant(0), *first), parallel_iterations=1)
    return tf.stack([tf.cast(done, tf.float64), _now(last) - began])


def _repeated_by_count(step: Step, state: State, count: tf.Tensor) -> tf.Tensor:
    def body(done: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return done + 1, *step(done, state)

    done, *last = tf.while_loop(lambda done, *_: done < count, body, (tf.constant(0), *state), parallel_iterations=1)
    with tf.control_dependencies(last):
        return tf.stack([tf.cast(done, tf.float64), 0.0])


def _now(state: State) -> tf.Tensor:
    """In ops: return the time at which the state is complete. A number of it is brought to the host, which waits for the device."""
    with tf.control_dependencies(state):
        number = tf.reshape(state[-1], [-1])[0]
        with tf.device("CPU:0"), tf.control_dependencies([tf.identity(number)]):
            return tf.timestamp()


def after(tensors: State) -> State:
    """In ops: return a state of one number, 0, that is there when all tensors are: what a component needs, before its clock starts."""
    with tf.control_dependencies(tensors):
        return [tf.identity(tf.constant([0.0]))]


def first_of(batch: Batch, size: tf.Tensor | int) -> Batch:
    """In ops: return the first `size` examples of a batch."""
    found: Batch = tf.nest.map_structure(lambda tensor: tensor[:size], batch)
    return found


def a_number(batch: Batch) -> tf.Tensor:
    """In ops: return a number, float32 [1], that is there when all of a batch is."""
    return tf.add_n([tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32), keepdims=True) for tensor in tf.nest.flatten(batch)])
