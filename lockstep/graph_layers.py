"""Nodes of a graph, and layers of Keras, as layers whose formulas are known, for causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.imported.description import TRAINING, ImportedSpec
from ..models.imported.graph import INPUT, ITEM, STATE, Node, NodeOnTape, nodes_in, read_graph
from ..models.layers.reference import Call, Value

Array = NDArray[Any]
Arrays = Mapping[str, Array]
_PARTS = ("weight", "bias")


@dataclass(frozen=True)
class KnownLayer:
    """A node as a layer.

    `tensors`: what its results are called there, by their names on the tape. `images_last`: on the tape images have channels last.
    """

    call: Call
    tensors: Mapping[str, str]
    parameters: Arrays
    buffers: Arrays
    images_last: bool = False

    def laid(self, array: Array) -> Array:
        """Return an array of the tape as the formulas have it."""
        return array.transpose(0, 3, 1, 2) if self.images_last and array.ndim == 4 else array


class _Operation(NamedTuple):
    """A layer's operation, the node's argument that is its input, and further arguments."""

    name: str
    input: str = "input"
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, float] = {}


def known_layer(spec: ImportedSpec, place: str, state: Arrays, columns: Arrays, tape: Arrays) -> KnownLayer | None:
    """Return a node of a training graph as a layer; None if no known layer does the same.

    `state` has parameters and buffers by name, `columns` the inputs, and `tape` what `models.imported.torch.nodes.tape` returns.
    """
    if not spec.settings.has_graph:
        return None
    graph = read_graph(spec.settings.folder / TRAINING)
    nodes = {node.name: node for node in graph.nodes}
    node = nodes.get(place)
    operation = _LAYERS[node.operation](node.arguments) if node is not None and node.operation in _LAYERS else None
    if node is None or operation is None:
        return None
    inputs = dict(zip((name for name in nodes if nodes[name].operation == INPUT), spec.settings.inputs, strict=True))

    def value(argument: str) -> Array | None:
        source = nodes.get(_reference(node, argument))
        if source is None:
            return None
        if source.operation in (STATE, INPUT):
            return state.get(source.arguments["name"]) if source.operation == STATE else columns[inputs[source.name]]
        if source.operation == ITEM:
            return tape.get(f"{nodes_in(source.arguments['of'])[0]}/result {source.arguments['position']}")
        return tape.get(f"{source.name}/result 0")

    x, parts = value(operation.input), {part: value(part) for part in _PARTS if _reference(node, part)}
    if x is None or any(part is None for part in parts.values()) or (operation.name == "dense" and x.ndim == 4):
        return None  # a dense layer of ours flattens images
    layer = node.layer or node.name
    tensors = {"output 0": "output", f"slope of {_reference(node, operation.input)}": "slope of input 0"}
    tensors |= {f"slope of {_reference(node, part)}": f"gradient of {layer}.{part}" for part in parts}
    items = {name: nodes[result].arguments for name, result in graph.updated.items() if nodes[result].operation == ITEM}
    buffers = {name: item["position"] for name, item in items.items() if nodes_in(item["of"]) == [place]}
    tensors |= {f"output {position}": f"buffer {name}" for name, position in buffers.items()}
    slopes = tuple(tape[name].astype(np.float64) for name in (f"{place}/slope 0",) if name in tape)
    arguments = operation.arguments if operation.name == "dropout" else (layer, *operation.arguments)
    call = Call(layer, operation.name, arguments, operation.options, (Value(x.astype(np.float64)),), (), {}, None, slopes=slopes)
    parameters = {f"{layer}.{part}": array for part, array in parts.items() if array is not None}
    return KnownLayer(call, tensors, parameters, {name: state[name] for name in buffers})


def known_keras_layer(node: NodeOnTape, state: Arrays, tape: Arrays) -> KnownLayer | None:
    """Return a layer of Keras as one of ours; None if none does the same.

    `state` and `tape` are as in `known_layer`.
    """
    x, name = tape.get(f"{node.place}/input 0"), _KERAS.get(node.operation)
    if name is None or x is None:
        return None
    options = {key: value for key, value in node.options.items() if key in ("epsilon", "momentum")}
    if "momentum" in options:
        options["momentum"] = 1.0 - float(options["momentum"])  # the new value's share
    last = x.ndim - 1
    if name in _NORMS and (node.options.get("axis") not in (-1, last) or x.ndim not in _NORMS[name]):
        return None
    parts = {f"{node.layer}.{part}": state.get(f"{node.layer}/{keras}") for part, keras in _KERAS_PARTS.get(name, {}).items()}
    if any(array is None for array in parts.values()):
        return None
    parameters = {key: array.T if array.ndim == 2 else array for key, array in parts.items() if array is not None}
    images_last = x.ndim == 4 and node.options.get("data_format", "channels_last") == "channels_last"
    known = KnownLayer(Call(node.layer, name, (), options, (), (), {}, None), {"output 0": "output"}, parameters, state, images_last)
    known.call.arguments = (node.options.get("rate", 0.0),) if name == "dropout" else (node.layer,)
    known.call.inputs = (Value(known.laid(x.astype(np.float64))),)
    known.call.slopes = tuple(known.laid(tape[key].astype(np.float64)) for key in (f"{node.place}/slope 0",) if key in tape)
    return known


def _reference(node: Node, argument: str) -> str:
    """Return the name of the node that an argument is; "" if it is none."""
    return (nodes_in(node.arguments.get(argument)) or [""])[0]


def _convolution(arguments: Mapping[str, Any]) -> _Operation | None:
    sides = [set(arguments[name]) for name in ("stride", "padding", "dilation")]
    if arguments["groups"] != 1 or any(len(side) != 1 for side in sides) or sides[2] != {1}:
        return None
    return _Operation("conv", arguments=(arguments["stride"][0], arguments["padding"][0]))


def _batch_norm(arguments: Mapping[str, Any]) -> _Operation | None:
    options = {"epsilon": arguments["eps"], "momentum": arguments["momentum"]}
    return _Operation("batch_norm", options=options) if _is_affine(arguments) else None


def _layer_norm(arguments: Mapping[str, Any]) -> _Operation | None:
    known = len(arguments["normalized_shape"]) == 1 and _is_affine(arguments)
    return _Operation("layer_norm", options={"epsilon": arguments["eps"]}) if known else None


def _is_affine(arguments: Mapping[str, Any]) -> bool:
    return all(nodes_in(arguments.get(part)) for part in _PARTS)


def _dropout(arguments: Mapping[str, Any]) -> _Operation:
    return _Operation("dropout", arguments=(arguments["p"],))


_LAYERS: Mapping[str, Callable[[Mapping[str, Any]], _Operation | None]] = {
    "aten.conv2d.default": _convolution,
    "aten.linear.default": lambda arguments: _Operation("dense"),
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.relu.default": lambda arguments: _Operation("relu", "self"),
    "aten.native_dropout.default": _dropout,
    "aten.dropout.default": _dropout,
}
_KERAS = {
    "BatchNormalization": "batch_norm",
    "LayerNormalization": "layer_norm",
    "Dense": "dense",
    "ReLU": "relu",
    "relu": "relu",
    "Dropout": "dropout",
}
_NORMS = {"batch_norm": (4,), "layer_norm": (2, 3)}  # and the numbers of dimensions of their inputs
_OF_NORM = {"weight": "gamma", "bias": "beta"}
_KERAS_PARTS = {"batch_norm": _OF_NORM, "layer_norm": _OF_NORM, "dense": {"weight": "kernel", "bias": "bias"}}
