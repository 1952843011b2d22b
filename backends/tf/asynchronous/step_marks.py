"""Which updates a shard has applied, in ops on its parameter server: TensorFlow runs a lost worker's ticket again, from its beginning.

An update has one number, its step. It is marked as begun before the shard is changed, and as applied after that. One that is applied is
passed over when it comes again. One that was begun and not applied has been cut in the middle, or is under way elsewhere: whether it is in
the values nobody can tell, and the ops fail, so that all tasks start anew from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

__all__ = ["SPAN", "StepMarks", "make_marks"]

SPAN = 1 << 16
"""A step is marked in the place of the one so many steps before. The chief hands out none so far beyond the oldest that is outstanding."""

_NONE = -1


@dataclass(frozen=True, slots=True)
class StepMarks:
    """Two vectors int64 [SPAN]: the step that was last begun, and applied, in each place."""

    begun: tf.Variable
    applied: tf.Variable

    def once(self, step: tf.Tensor, apply: Callable[[], tf.Tensor], otherwise: Callable[[], tf.Tensor]) -> tf.Tensor:
        """In ops: return what `apply` does where the step, int64, has not been applied yet, else what `otherwise` does."""
        place = tf.math.floormod(step, SPAN)
        begun, applied = (
            tf.raw_ops.ResourceGather(resource=marks.handle, indices=place, dtype=tf.int64) for marks in (self.begun, self.applied)
        )
        known = tf.equal(applied, step)
        whole = tf.raw_ops.Assert(  # without the branch that tf.debugging.Assert makes of it
            condition=tf.logical_or(known, tf.not_equal(begun, step)),
            data=["an update was cut in the middle by the loss of a worker: step", step],
        )

        def applying() -> tf.Tensor:
            with tf.control_dependencies([_mark(self.begun, place, step)]):
                result = apply()
            with tf.control_dependencies([result]):
                marked = _mark(self.applied, place, step)
            with tf.control_dependencies([marked]):
                return tf.identity(result)

        with tf.control_dependencies([whole]):
            return tf.cond(known, otherwise, applying)

    def clear(self) -> None:
        """Forget every step: another state takes the place of the one that they led to."""
        for marks in (self.begun, self.applied):
            with tf.device(marks.device):
                marks.assign(tf.fill([SPAN], tf.constant(_NONE, tf.int64)))


def _mark(marks: tf.Variable, place: tf.Tensor, step: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(resource=marks.handle, indices=place, updates=step)


def make_marks() -> StepMarks:
    """Create the vectors, on the device of the scope, with no step marked."""
    begun, applied = (tf.Variable(tf.fill([SPAN], tf.constant(_NONE, tf.int64))) for _ in range(2))
    return StepMarks(begun, applied)
