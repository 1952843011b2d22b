"""Async: a ticket is a few consecutive updates for whichever worker is free; it travels as one vector, and so does its outcome.

One tensor each way, because every argument and every result of a remote call costs a message of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....data.sampler import Batches
from ...base import Plan, StepResult

__all__ = ["Ticket", "Work", "cut", "pack", "pack_outcome", "read_outcome", "unpack"]


_HEAD = 4
"""Integers before the offsets."""

_OUTCOME_HEAD = 3
"""Numbers before an outcome's losses."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the chief remembers of a ticket: the steps, from `first_step`, the number of examples in them, and the loss scale."""

    first_step: int
    count: int
    examples: int
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """A ticket in ops: `count` updates; batch i is indices[offsets[i]:offsets[i + 1]].

    An update has a learning rate, and what its examples weigh together, float32. `first_step` int64 counts updates from the start of
    the run. `changes` int32 [examples, 3] is aligned with `indices`; None where images are used as they are. `loss_scale` float32 is what
    the loss is multiplied by, in fp16.
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
    """Cut a plan into (begin, count) of at most `most` updates, into at least so many `tickets` where it has so many updates."""
    size = max(1, min(most, plan.count // tickets))
    return [(begin, min(size, plan.count - begin)) for begin in range(0, plan.count, size)]


def pack(batches: Batches, learning_rates: NDArray[np.float64], first_step: int, loss_scale: float = 1.0) -> NDArray[np.int32]:
    """Return the ticket's vector, int32.

    It has the count, the first step as the bits of an int64, the loss scale as those of a float32, offsets [count + 1], learning rates
    and weights as the bits of float32 [count] each, indices [n], and changes [3 · n] where there are any.
    """
    counted = np.array([len(batches)], np.int32), np.array([first_step], np.int64).view(np.int32)
    head = *counted, np.array([loss_scale], np.float32).view(np.int32)
    figures = (array.astype(np.float32).view(np.int32) for array in (learning_rates, batches.weights))
    changes = [] if batches.changes is None else [batches.changes.ravel()]
    return np.concatenate([*head, batches.offsets, *figures, batches.indices, *changes])


def unpack(vector: tf.Tensor, *, changing: bool) -> Work:
    """In ops: read the vector that `pack` made. `changing`: it holds changes."""
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
    """In ops: return one float64 vector of everything (float32 and integers below 2⁵³ are exact in it)."""
    head = tf.stack([tf.cast(worker, tf.float64), seconds, tf.cast(loss_scale, tf.float64)])
    return tf.concat([head, tf.cast(losses, tf.float64), tf.cast(staleness, tf.float64)], axis=0)


def read_outcome(ticket: Ticket, outcome: NDArray[np.float64]) -> tuple[StepResult, float]:
    """Return the result of a ticket, and the loss scale that it ended with, from the vector that `pack_outcome` made.

    Raises RuntimeError where its length is off.
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
