"""A pass over an exported graph on TensorFlow, in float64, to check translations by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from ...base import ForwardContext
from ..description import EVALUATION, TRAINING, Imported, read_constants
from ..graph import read_graph
from .forward import Execution
from .operations import canonical, in_float64


def graph_pass(
    parameters: Mapping[str, tf.Tensor], inputs: Sequence[tf.Tensor], context: ForwardContext[tf.Tensor]
) -> tuple[tf.Tensor, dict[str, Any]]:
    """Return the graph's result and those of its nodes by name; all floats are float64.

    Operations are carried out eagerly, without tracing.
    """
    imported: Imported = context.settings
    graph = read_graph(imported.folder / (TRAINING if context.training else EVALUATION))
    execution = Execution(graph, context, tf.shape(inputs[0])[0])
    with in_float64():
        whole = [value if value.dtype.is_floating else tf.cast(value, tf.int64) for value in inputs]  # as torch has them
        result, _ = execution.run({**read_constants(imported.folder), **context.buffers}, parameters, whole)
    return result, {name: canonical(value) for name, value in execution.values.items()}
