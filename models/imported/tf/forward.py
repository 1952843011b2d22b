"""Imported models on TensorFlow: their exported graphs, carried out while TensorFlow traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from ....core.errors import UsageError
from ....data.columns import LENGTHS
from ...base import ForwardContext, ModelSpec
from ...layers.formulas import StorageLayout
from ...layers.tf import HeldParameters
from ..description import EVALUATION, MASKED_RANKS, MIN_ROWS, TRAINING, Imported, is_length, read_constants
from ..graph import CONSTANT, FORMAT, INFINITY, INPUT, ITEM, NODE, STATE, Graph, Node, read_graph
from . import image_operations, indexing_operations, loss_operations, recurrent, signal_operations
from .keras_passes import keras_pass, plain_keras
from .operations import OPERATIONS, ChannelsLast, canonical, format_named

_FILLED_BY_IMPORT = image_operations, indexing_operations, loss_operations, recurrent, signal_operations  # register their operations


def storage_layouts(spec: ModelSpec) -> dict[str, StorageLayout]:
    """Return [h, w, in, out] for the weights that convolutions alone read."""
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    layouts: dict[str, StorageLayout] = {}
    for name in spec.settings.kernels:
        shape = shapes[name]
        layouts[name] = StorageLayout(shape, (2, 3, 1, 0), (shape[2], shape[3], shape[1], shape[0]))
    return layouts


def forward(parameters: Mapping[str, tf.Tensor], x: Any, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return the model's result for a batch, float32 [batch, …].

    An empty batch is computed from blank examples, which are cut off.
    """
    imported: Imported = context.settings
    columns = x if isinstance(x, Mapping) else {imported.inputs[0]: x}
    rows = tf.shape(columns[imported.inputs[0]])[0]
    inputs = [_with_blanks(name, columns[name], imported) for name in imported.inputs]
    if imported.is_keras:
        result, values = keras_pass(imported, parameters, inputs, context, Draws(context, rows).dropout if context.training else None)
    else:
        graph, constants = _graph(imported.folder, context.training), _constants(imported.folder)
        result, values = Execution(graph, context, rows).run({**constants, **context.buffers}, parameters, inputs)
    buffers = context.buffers
    context.updated.update({name: tf.where(rows > 0, tf.stop_gradient(value), buffers[name]) for name, value in values.items()})
    return tf.cast(result, tf.float32)[:rows] if result.dtype != tf.float64 else result[:rows]


def own_losses(outputs: tf.Tensor, target: Any, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return the losses [batch] of a module with a loss of its own."""
    return outputs[:, 0]


def example_sums(outputs: tf.Tensor, target: Any, context: ForwardContext[tf.Tensor]) -> dict[str, tf.Tensor]:
    """Return ``correct`` of a module whose evaluation has its own losses, then logits."""
    if not context.settings.measured:
        return {}
    return {"correct": tf.argmax(outputs[:, 1:], axis=1, output_type=target.dtype) == target}


def unadapted(imported: Imported) -> tuple[Callable[..., tf.Tensor], list[tf.Variable]] | None:
    """Return the user's model by itself, and the variables that its training changes.

    None for a translation, which has no other form.
    """
    return plain_keras(imported) if imported.is_keras else None


def _with_blanks(name: str, value: tf.Tensor, imported: Imported) -> tf.Tensor:
    """Return an input with blank examples if there are none, and a place in empty sequences.

    Whole numbers become int64, as in torch.
    """
    value = value if value.dtype.is_floating else tf.cast(value, tf.int64)
    fill = tf.cast(int(is_length(name, imported.inputs)), value.dtype)
    shape = tf.shape(value)
    paddings = [[0, tf.where(shape[0] > 0, 0, MIN_ROWS)], *[[0, 0]] * (value.shape.rank - 1)]
    if name + LENGTHS in imported.inputs:
        paddings[1] = [0, tf.where(shape[1] > 0, 0, 1)]
    return tf.ensure_shape(tf.pad(value, paddings, constant_values=fill), [None, *value.shape[1:]])


@lru_cache(maxsize=8)
def _graph(folder: Path, training: bool) -> Graph:
    graph = read_graph(folder / (TRAINING if training else EVALUATION))
    for name, line in graph.operations.items():
        if name not in OPERATIONS:
            raise UsageError(
                f"model: the operation {name} has no form on TensorFlow yet{f' ({line})' if line else ''}. Choose --backend torch."
            )
    return graph


@lru_cache(maxsize=8)
def _constants(folder: Path) -> Mapping[str, Any]:
    return read_constants(folder)


class _Kernel:
    """A convolution's weight that is stored as [h, w, in, out]."""

    __slots__ = ("value",)

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value


def held_value(value: Any) -> Any:
    """Return the tensor in which a value is held, in its own layout."""
    return value.value if isinstance(value, _Kernel | ChannelsLast) else value


class Draws:
    """Random numbers of one training pass, by the number of the drawing operation."""

    def __init__(self, context: ForwardContext[tf.Tensor], rows: tf.Tensor) -> None:
        self._context, self._rows = context, rows
        self._layer = 0

    def dropout(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        """Drop by the next dropout layer's number; an empty batch's blank examples keep all."""
        layer, self._layer = self._layer, self._layer + 1
        if rate >= 1.0:
            return tf.zeros_like(x)
        axis = self._context.settings.dropouts[layer]

        def drop() -> tf.Tensor:
            if axis == 1:
                return _swapped(self._dropped(_swapped(x), rate, layer, whole=True))
            return self._dropped(x, rate, layer, whole=axis == 0)

        y = tf.cond(self._rows > 0, drop, lambda: tf.identity(x))
        y.set_shape(x.shape)
        return y

    def _dropped(self, x: tf.Tensor, rate: float, layer: int, *, whole: bool) -> tf.Tensor:
        """Drop in a tensor [batch, …], or with several rows for each example unless `whole`."""
        if whole and x.shape.rank in MASKED_RANKS:
            return self._context.dropout(x, rate, layer)
        flat = tf.reshape(x, tf.stack([tf.maximum(self._rows, 1), -1]))
        return tf.reshape(self._context.dropout(flat, rate, layer), tf.shape(x))


class Execution(Draws):
    """One pass over a graph, in ops."""

    def __init__(self, graph: Graph, context: ForwardContext[tf.Tensor], rows: tf.Tensor) -> None:
        super().__init__(context, rows)
        self._graph = graph
        self.operation = ""
        self.values: dict[str, Any] = {}  # results by node

    @property
    def training(self) -> bool:
        """Whether the model trains."""
        return self._context.training

    def low(self, x: tf.Tensor) -> tf.Tensor:
        """Cast an operand to the job's precision."""
        return x if self._context.compute is None else tf.cast(x, self._context.compute)

    def kernel(self, weight: Any) -> tf.Tensor:
        """Return a convolution's weight as [h, w, in, out]."""
        return self.low(weight.value if isinstance(weight, _Kernel) else tf.transpose(weight, [2, 3, 1, 0]))

    def run(
        self, state: Mapping[str, Any], parameters: Mapping[str, tf.Tensor], inputs: list[tf.Tensor]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return the result, and new values of buffers by name."""
        values = self.values
        remaining = iter(inputs)
        for node in self._graph.nodes:
            if node.operation == STATE:
                values[node.name] = self._state(node.arguments["name"], state, parameters)
            elif node.operation == INPUT:
                values[node.name] = next(remaining)
            elif node.operation == CONSTANT:
                values[node.name] = tf.constant(node.arguments["value"], format_named(node.arguments["format"]))
            elif node.operation == ITEM:
                values[node.name] = _decoded(node.arguments["of"], values)[node.arguments["position"]]
            else:
                values[node.name] = self._carried_out(node, values)
        updated = {name: canonical(values[result]) for name, result in self._graph.updated.items() if name in self._context.buffers}
        return canonical(values[self._graph.result]), updated

    def _state(self, name: str, state: Mapping[str, Any], parameters: Mapping[str, tf.Tensor]) -> Any:
        if name in parameters:
            if isinstance(parameters, HeldParameters) and name in parameters.layouts:
                return _Kernel(parameters.held[name])
            return parameters[name]
        return tf.convert_to_tensor(state[name])  # constants are arrays

    def _carried_out(self, node: Node, values: Mapping[str, Any]) -> Any:
        self.operation = node.operation
        arguments = {name: _decoded(argument, values) for name, argument in node.arguments.items()}
        try:
            result = OPERATIONS[node.operation](self, **arguments)
        except NotImplementedError as error:
            place = f" ({node.line})" if node.line else ""
            raise UsageError(f"model: {error} has no form on TensorFlow yet{place}. Choose --backend torch.") from error
        except Exception as error:
            error.add_note(f"{node.operation}{f', {node.line}' if node.line else ''}")
            raise
        if node.shape is not None and tf.is_tensor(result):
            result.set_shape(node.shape)
        return result


def _swapped(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


def _decoded(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, dict):
        if NODE in argument:
            return values[argument[NODE]]
        if FORMAT in argument:
            return format_named(argument[FORMAT])
        return math.inf * argument[INFINITY]
    return [_decoded(part, values) for part in argument] if isinstance(argument, list) else argument
