"""Timed repetition of a step's components in ops, and traces of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..base import CalibrationOrder
from ..timing import StepTracer
from .data import Batch

State = Sequence[tf.Tensor]
Step = Callable[[tf.Tensor, State], State]  # (number int32, state) -> next state, without empty tensors
LIMITS = tf.TensorSpec([2], tf.float64)
SMALL_ELEMENTS = 16  # per rank: each rank of a ring has something


def order_limits(order: CalibrationOrder) -> NDArray[np.float64]:
    """Return an order's count and seconds, float64 [2]."""
    return np.array([order.count, order.seconds])


def repeated(step: Step, state: State, limits: tf.Tensor, *, by_count: bool = False) -> tf.Tensor:
    """Repeat a step within `limits`, in ops; return number and seconds, float64 [2].

    `by_count`: without a clock.
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
    """Return the time when the state is complete, in ops.

    One of its numbers comes to the host, which waits for the device.
    """
    with tf.control_dependencies(state):
        number = tf.reshape(state[-1], [-1])[0]
        with tf.device("CPU:0"), tf.control_dependencies([tf.identity(number)]):
            return tf.timestamp()


def ready_after(tensors: State) -> State:
    """Return a state of one 0 that is ready when all tensors are, in ops.

    It represents a component's inputs, before its clock starts.
    """
    with tf.control_dependencies(tensors):
        return [tf.identity(tf.constant([0.0]))]


def any_element(batch: Batch) -> tf.Tensor:
    """In ops: return a number, float32 [1], that is ready when all of a batch is."""
    return tf.add_n([tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32), keepdims=True) for tensor in tf.nest.flatten(batch)])


class StepProfiler(StepTracer):
    """Trace of the first updates on the first sync rank or the chief.

    Async workers are TensorFlow's servers, which cannot be traced.
    """

    def _start(self, folder: str) -> None:
        tf.profiler.experimental.start(folder)

    def _write(self) -> None:
        tf.profiler.experimental.stop()  # below ``plugins/profile``
