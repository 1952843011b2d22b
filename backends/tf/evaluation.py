"""A pass over a range of a split without training, in ops, so many examples at once as memory allows."""

from __future__ import annotations

import tensorflow as tf

from ...models.layers.tf.image import HeldParameters
from .data import Resident
from .forward_context import Context
from .model import TfModel, evaluation_batch, examples_at_once

__all__ = ["summed"]


def summed(
    model: TfModel,
    data: Resident,
    parameters: HeldParameters,
    context: Context,
    start: tf.Tensor | int,
    stop: tf.Tensor | int,
    micro_batches: int = 1,
) -> tf.Tensor:
    """Return `TfModel.sums`, float64 [sums], of the examples start … stop − 1, computed in so many micro-batches at the same time."""
    size = evaluation_batch(model.spec)

    def body(begin: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + size, stop)
        if model.spec.logits_per_position:
            end = begin + examples_at_once(model.spec, data.longest(begin, end), end - begin)
        batch = data.micro_batches(*data.laid_batch(tf.range(begin, end)), micro_batches)
        return end, sums + model.sums(parameters, batch, context)

    first = tf.convert_to_tensor(start, tf.int32), tf.zeros([len(model.spec.objective.sums)], tf.float64)
    _, sums = tf.while_loop(lambda begin, _: begin < stop, body, first, parallel_iterations=1)
    return sums
