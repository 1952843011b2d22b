"""A pass over a range of a split without training, in ops, so many examples at once as memory allows."""

from __future__ import annotations

import tensorflow as tf

from ...models.layers.tf import HeldParameters
from .data import Resident
from .model import TfModel, evaluation_batch
from .passes import Context

__all__ = ["summed"]


def summed(
    model: TfModel, data: Resident, parameters: HeldParameters, context: Context, start: tf.Tensor | int, stop: tf.Tensor | int
) -> tf.Tensor:
    """Return `TfModel.sums`, float64 [3], of the examples start … stop − 1."""
    size = evaluation_batch(model.spec)

    def body(begin: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + size, stop)
        return end, sums + model.sums(parameters, *data.batch(tf.range(begin, end)), context)

    first = tf.convert_to_tensor(start, tf.int32), tf.zeros([3], tf.float64)
    _, sums = tf.while_loop(lambda begin, _: begin < stop, body, first, parallel_iterations=1)
    return sums
