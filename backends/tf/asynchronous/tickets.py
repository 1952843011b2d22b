"""Async tickets and outcomes, and marks of applied steps.

Each is one vector, as every tensor of a remote call is a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....data.sampler import Batches
from ...base import Plan, StepResult

_HEAD = 4  # integers before the offsets
_OUTCOME_HEAD = 3  # numbers before an outcome's losses


@dataclass(frozen=True, slots=True)
class Ticket:
    """Chief's record of a ticket: steps from `first_step`, number of examples, and loss scale."""

    first_step: int
    count: int
    examples: int
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """Ticket in ops.

    The examples of update i are indices[offsets[i]:offsets[i + 1]]; `changes` int32 [examples, 3] or None.
    """

    count: tf.Tensor
    first_step: tf.Tensor
    loss_scale: tf.Tensor
    offsets: tf.Tensor
    learning_rates: tf.Tensor
    weights: tf.Tensor
    indices: tf.Tensor
    changes: tf.Tensor | None


def cut(plan: Plan, most: int, tickets: int) -> list[tuple[int, int]]:
    """Cut a plan into (begin, count) of at most `most` updates.

    There are at least `tickets` parts if the plan has as many updates.
    """
    size = max(1, min(most, plan.count // tickets))
    return [(begin, min(size, plan.count - begin)) for begin in range(0, plan.count, size)]


def pack(batches: Batches, learning_rates: NDArray[np.float64], first_step: int, loss_scale: float = 1.0) -> NDArray[np.int32]:
    """Return the ticket's vector, int32, with int64 and float32 values as bits.

    Count, first step, loss scale, offsets [count + 1], learning rates and weights [count], indices [n], and changes [3 · n] if any.
    """
    counted = np.array([len(batches)], np.int32), np.array([first_step], np.int64).view(np.int32)
    head = *counted, np.array([loss_scale], np.float32).view(np.int32)
    figures = (array.astype(np.float32).view(np.int32) for array in (learning_rates, batches.weights))
    changes = [] if batches.changes is None else [batches.changes.ravel()]
    return np.concatenate([*head, batches.offsets, *figures, batches.indices, *changes])


def unpack(vector: tf.Tensor, *, changing: bool) -> Work:
    """In ops: read the vector of `pack`, which has changes if `changing`."""
    count = vector[0]
    offsets_end = _HEAD + count + 1
    rates_end = offsets_end + count
    weights_end = rates_end + count
    indices_end = weights_end + vector[offsets_end - 1]
    changes = tf.reshape(vector[indices_end:], [-1, 3]) if changing else None
    return Work(
        count,
        tf.bitcast(vector[1:3], tf.int64),
        tf.bitcast(vector[3], tf.float32),
        vector[_HEAD:offsets_end],
        tf.bitcast(vector[offsets_end:rates_end], tf.float32),
        tf.bitcast(vector[rates_end:weights_end], tf.float32),
        vector[weights_end:indices_end],
        changes,
    )


def pack_outcome(worker: tf.Tensor, seconds: tf.Tensor, loss_scale: tf.Tensor, losses: tf.Tensor, staleness: tf.Tensor) -> tf.Tensor:
    """Return everything as one float64 vector, in ops.

    float32 and integers below 2⁵³ are exact in it.
    """
    head = tf.stack([tf.cast(worker, tf.float64), seconds, tf.cast(loss_scale, tf.float64)])
    return tf.concat([head, tf.cast(losses, tf.float64), tf.cast(staleness, tf.float64)], axis=0)


def read_outcome(ticket: Ticket, outcome: NDArray[np.float64]) -> tuple[StepResult, float]:
    """Return a ticket's result and final loss scale from the vector of `pack_outcome`.

    Raises RuntimeError for a wrong length.
    """
    head, figures = outcome[:_OUTCOME_HEAD], outcome[_OUTCOME_HEAD:]
    if len(figures) != 2 * ticket.count:
        raise RuntimeError(f"a ticket of {ticket.count} updates returned figures of {len(figures) / 2:g}")
    losses, staleness = figures[: ticket.count], figures[ticket.count :]
    result = StepResult(
        first_step=ticket.first_step,
        losses=losses.astype(np.float32),
        examples=ticket.examples,
        seconds=float(head[1]),
        worker=int(head[0]),
        staleness=staleness.astype(np.int64),
    )
    return result, float(head[2])


# Reruns skip steps marked as applied; one marked only as begun may be in the values or not, so the ops fail and all tasks restart.

SPAN = 1 << 16  # steps with the same remainder share a place
_NONE = -1


@dataclass(frozen=True, slots=True)
class StepMarks:
    """Two vectors int64 [SPAN]: the step last begun and applied in each place."""

    begun: tf.Variable
    applied: tf.Variable

    def once(self, step: tf.Tensor, apply: Callable[[], tf.Tensor], otherwise: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return, in ops, the result of `apply` if a step is not yet applied, else of `otherwise`.

        The step is int64.
        """
        place = tf.math.floormod(step, SPAN)
        begun, applied = (
            tf.raw_ops.ResourceGather(resource=marks.handle, indices=place, dtype=tf.int64) for marks in (self.begun, self.applied)
        )
        known = tf.equal(applied, step)
        whole = tf.raw_ops.Assert(  # without the branch of tf.debugging.Assert
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
        """Remove all marks, as the state is replaced."""
        for marks in (self.begun, self.applied):
            with tf.device(marks.device):
                marks.assign(tf.fill([SPAN], tf.constant(_NONE, tf.int64)))


def _mark(marks: tf.Variable, place: tf.Tensor, step: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(resource=marks.handle, indices=place, updates=step)


def make_marks() -> StepMarks:
    """Create the vectors on the current device, without marks."""
    begun, applied = (tf.Variable(tf.fill([SPAN], tf.constant(_NONE, tf.int64))) for _ in range(2))
    return StepMarks(begun, applied)
