"""Nodes of a graph one by one on TensorFlow, from a tape (`models.imported.torch.nodes`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...base import ForwardContext
from ..description import TRAINING, Imported, read_constants
from ..graph import Graph, Node, NodeOnTape, nodes_in, read_graph
from ..keras.float64 import in_float64
from ..tape import MOVES, UNIT, sizes_of
from .forward import Draws, Execution, held_value
from .keras_passes import single_layers
from .operations import ChannelsLast, canonical, gelu_by_formula

Array = NDArray[Any]
Arrays = dict[str, Array]


class _Replay(Execution):
    """Carries each node out from a tape's results, with derivatives of its own."""

    def __init__(
        self, graph: Graph, context: ForwardContext[tf.Tensor], rows: tf.Tensor, tape_arrays: Mapping[str, Array], fixed: set[str]
    ) -> None:
        super().__init__(graph, context, rows)
        self._tape, self._fixed = tape_arrays, fixed
        self.arrays: Arrays = {}

    def _carried_out(self, node: Node, values: Mapping[str, Any]) -> Any:
        names = [
            name for name in dict.fromkeys(nodes_in(list(node.arguments.values()))) if _is_float(values[name]) and name not in self._fixed
        ]
        leaves = {name: held_value(values[name]) for name in names}
        with tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            result = super()._carried_out(node, values)
            parts = [part for part in (result if isinstance(result, tuple | list) else (result,)) if _is_float(part)]
            floats = [canonical(part) for part in parts]
        for place, part in enumerate(floats):
            self.arrays[f"{node.name}/output {place}"] = part.numpy()
        slopes = {place: self._tape.get(f"{node.name}/slope {place}") for place in range(len(floats))}
        wanted = {place: tf.constant(slope) for place, slope in slopes.items() if slope is not None}
        if wanted and leaves:
            gradients = tape.gradient(
                [floats[place] for place in wanted],
                list(leaves.values()),
                list(wanted.values()),
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            for (name, _), gradient in zip(leaves.items(), gradients, strict=True):
                self.arrays[f"{node.name}/slope of {name}"] = _canonical_like(values[name], tf.convert_to_tensor(gradient)).numpy()
        waiting = iter(range(len(floats)))
        exact = [self._exact(node, next(waiting), part) if _is_float(part) else part for part in _parts(result)]
        return tuple(exact) if isinstance(result, tuple | list) else exact[0]

    def _exact(self, node: Node, place: int, part: Any) -> Any:
        value = tf.constant(self._tape[f"{node.name}/result {place}"])
        return ChannelsLast(tf.transpose(value, [0, 2, 3, 1])) if isinstance(part, ChannelsLast) else value


def _parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _is_float(value: Any) -> bool:
    held = held_value(value)
    return bool(tf.is_tensor(held) and held.dtype.is_floating)


def _canonical_like(value: Any, gradient: tf.Tensor) -> tf.Tensor:
    """Return the gradient of a held value in canonical order."""
    if isinstance(value, ChannelsLast):
        return tf.transpose(gradient, [0, 3, 1, 2])
    if held_value(value) is not value:  # a convolution's weight, [h, w, in, out]
        return tf.transpose(gradient, [3, 2, 0, 1])
    return gradient


def replayed_nodes(
    imported: Imported,
    parameters: Mapping[str, tf.Tensor],
    inputs: list[tf.Tensor],
    context: ForwardContext[tf.Tensor],
    tape_arrays: Arrays,
) -> Arrays:
    """Return results and slopes of each node, or layer of Keras, float32, from a tape's."""
    if imported.is_keras:
        drop = Draws(context, tf.shape(inputs[0])[0]).dropout
        return single_layers(imported, parameters, inputs, context, drop, tape_arrays)[0].arrays
    graph = read_graph(imported.folder / TRAINING)
    replay = _Replay(graph, context, tf.shape(inputs[0])[0], tape_arrays, graph.without_gradient(parameters))
    whole = [value if value.dtype.is_floating else tf.cast(value, tf.int64) for value in inputs]
    replay.run({**read_constants(imported.folder), **context.buffers}, parameters, whole)
    return replay.arrays


def tape_of_arrays(
    imported: Imported,
    state: Mapping[str, Array],
    columns: Sequence[Array],
    kept_share: Callable[[Sequence[int], float, int], Array],
    slope_of: Callable[[Array], Array],
) -> tuple[Arrays, list[NodeOnTape]]:
    """Return the tape of a Keras model's training pass.

    See `models.imported.torch.nodes.tape_of_arrays`.
    """

    def tensor(array: Array) -> tf.Tensor:
        return tf.constant(array if array.dtype.kind in "iu" else array.astype(np.float64))

    def named(prefix: str) -> dict[str, tf.Tensor]:
        return {name.removeprefix(prefix): tensor(value) for name, value in state.items() if name.startswith(prefix)}

    def dropout(x: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
        return x * tf.cast(kept_share(tuple(x.shape), rate, layer), x.dtype)

    context: ForwardContext[tf.Tensor] = ForwardContext(True, named("buffers/"), settings=imported, dropout=dropout)
    inputs = [tensor(column) for column in columns]
    with in_float64("tf"), gelu_by_formula():
        drop = Draws(context, tf.shape(inputs[0])[0]).dropout
        parameters = named("parameters/")
        layers, result = single_layers(imported, parameters, inputs, context, drop)
        layers.backward(result, tf.constant(slope_of(result.numpy())))

        def moved(seed: int) -> Arrays:
            drop = Draws(context, tf.shape(inputs[0])[0]).dropout
            return single_layers(imported, parameters, inputs, context, drop, layers.arrays, _changed_bits(seed))[0].arrays

        sizes = sizes_of(layers.arrays, (moved(seed) for seed in range(MOVES)), layers.nodes)
    return {**layers.arrays, **sizes, "result": result.numpy()}, layers.nodes


def _changed_bits(seed: int) -> Callable[[tf.Tensor], tf.Tensor]:
    draw = np.random.default_rng(seed)
    return lambda value: value * (1 + UNIT * draw.choice([-1.0, 1.0], tuple(value.shape)))
