"""Passes of Keras models on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from ...base import ForwardContext
from ..description import Imported
from ..keras.library import Drop
from ..keras.passes import bound, on_its_own
from ..keras.single_layers import Pull, SingleLayers


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


class _Derivatives:
    """Derivatives of the parts of a pass; see `keras.single_layers`."""

    def __init__(self, *, of_whole: bool) -> None:
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False) if of_whole else None

    def _unrecorded(self) -> AbstractContextManager[None]:
        return nullcontext() if self.tape is None else self.tape.stop_recording()

    def leaf(self, value: tf.Tensor) -> tf.Tensor:
        with self._unrecorded():
            leaf = tf.identity(value)
        if self.tape is not None:
            self.tape.watch(leaf)
        return leaf

    def part(self, compute: Callable[[], Sequence[tf.Tensor]], leaves: Sequence[tf.Tensor]) -> tuple[Sequence[tf.Tensor], Pull]:
        with self._unrecorded(), tf.GradientTape(persistent=True, watch_accessed_variables=False) as part:
            part.watch(leaves)
            results = compute()
        return results, lambda slopes: _derivatives(part, results, slopes, leaves)

    def whole(self, results: Sequence[tf.Tensor], slopes: Sequence[tf.Tensor], leaves: Sequence[tf.Tensor]) -> Sequence[tf.Tensor | None]:
        return _derivatives(self.tape, results, slopes, leaves)


def _derivatives(
    tape: tf.GradientTape, results: Sequence[tf.Tensor], slopes: Sequence[tf.Tensor | None], leaves: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    pairs = [(part, slope) for part, slope in zip(results, slopes, strict=True) if slope is not None]
    if not pairs or not leaves:
        return [None] * len(leaves)
    parts, given_slopes = zip(*pairs, strict=True)
    gradients = tape.gradient(list(parts), list(leaves), list(given_slopes))
    return [None if part is None else tf.convert_to_tensor(part) for part in gradients]


def single_layers(
    imported: Imported,
    parameters: Mapping[str, tf.Tensor],
    inputs: Sequence[tf.Tensor],
    context: ForwardContext[tf.Tensor],
    drop: Drop | None,
    tape: Mapping[str, NDArray[Any]] | None = None,
    moved: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tuple[SingleLayers, tf.Tensor]:
    """Carry each layer of a training pass out by itself, in float64 or from a tape.

    Returns them, and the result.
    """
    floats = "float64" if tape is None or moved is not None else "float32"
    derivatives = _Derivatives(of_whole=tape is None)
    layers = SingleLayers("tf", derivatives, bound(imported, "tf", floats).names, tape, moved)
    with layers.observing(), derivatives.tape or nullcontext():
        result, _ = keras_pass(imported, parameters, inputs, context, drop, floats)
        layers.end(result)
    return layers, result
