"""Passes of Keras models on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from ...base import ForwardContext
from ..description import Imported
from ..keras.library import Drop
from ..keras.passes import bound, on_its_own


def keras_pass(
    imported: Imported,
    parameters: Mapping[str, tf.Tensor],
    inputs: Sequence[tf.Tensor],
    context: ForwardContext[tf.Tensor],
    drop: Drop | None,
    floats: str = "float32",
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return the result for a batch, and new values of buffers; see `Bound`.

    `floats`: the format of the tensors.
    """
    with tf.init_scope():  # the model is built once, outside of the function that is traced
        model = bound(imported, "tf", floats)
    return model(parameters, context.buffers, inputs, drop, training=context.training)


def plain_keras(imported: Imported) -> tuple[Callable[..., tf.Tensor], list[tf.Variable]]:
    """Return the user's model as Keras trains it, and the variables that its training changes."""
    call = on_its_own(imported, "tf")
    return lambda *inputs: call(*inputs, training=True), [weight.value for weight in call.model.trainable_weights]


def without_gradient(compute: Callable[[], tf.Tensor], values: Sequence[tf.Variable]) -> list[bool]:
    """Return of each value whether the sum of a result does not depend on it."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        total = tf.reduce_sum(compute())
    return [gradient is None for gradient in tape.gradient(total, values)]


def multiply_adds(compute: Callable[[], tf.Tensor]) -> int:
    """Return the multiply-adds of a computation, as TensorFlow counts them."""
    profiler = tf.compat.v1.profiler
    builder = profiler.ProfileOptionBuilder(profiler.ProfileOptionBuilder.float_operation())
    options = builder.with_accounted_types([".*MatMul.*", ".*Conv.*", "Einsum"]).with_empty_output().build()
    graph = tf.function(compute, autograph=False).get_concrete_function().graph
    return int(profiler.profile(graph, cmd="op", options=options).total_float_ops // 2)
