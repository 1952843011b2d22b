"""A float64 pass over a graph, or of a Keras model, on TensorFlow, to check frameworks by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from ...base import ForwardContext
from ..description import EVALUATION, TRAINING, Imported, read_constants
from ..graph import Traced, read_graph, traced
from ..keras.float64 import traced_layers
from .forward import Draws, Execution
from .keras_passes import keras_pass
from .operations import canonical, gelu_by_formula, in_float64


def float64_pass(
    parameters: Mapping[str, tf.Tensor], inputs: Sequence[tf.Tensor], context: ForwardContext[tf.Tensor]
) -> tuple[tf.Tensor, list[Traced]]:
    """Return the result, and those of a graph's nodes or Keras's layers, in float64.

    Operations are carried out eagerly, without tracing.
    """
    imported: Imported = context.settings
    rows = tf.shape(inputs[0])[0]
    if imported.is_keras:
        drop = Draws(context, rows).dropout if context.training else None
        with traced_layers("tf") as results, gelu_by_formula():
            return keras_pass(imported, parameters, inputs, context, drop, "float64")[0], results
    graph = read_graph(imported.folder / (TRAINING if context.training else EVALUATION))
    execution = Execution(graph, context, rows)
    with in_float64():
        whole = [value if value.dtype.is_floating else tf.cast(value, tf.int64) for value in inputs]  # as torch has them
        result, _ = execution.run({**read_constants(imported.folder), **context.buffers}, parameters, whole)
    return result, traced(graph, {name: canonical(value) for name, value in execution.values.items()})
