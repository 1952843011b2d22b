"""A float64 pass over a graph, or of a Keras model, on torch, to check frameworks by.

Training on torch carries out the user's module itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from ...base import ForwardContext
from ..description import EVALUATION, TRAINING, Imported, read_constants
from ..graph import CONSTANT, FORMAT, INFINITY, INPUT, ITEM, NODE, STATE, Node, Traced, read_graph, traced
from ..keras.float64 import traced_layers
from .forward import Draws, drawn_by
from .keras_passes import keras_pass

Function = Callable[..., Any]
_CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range_for_size.default")


def float64_pass(
    parameters: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], context: ForwardContext[torch.Tensor]
) -> tuple[torch.Tensor, list[Traced]]:
    """Return the result, and those of a graph's nodes or Keras's layers, in float64."""
    imported: Imported = context.settings
    with default_float64():
        if imported.is_keras:
            drop = Draws(context, imported, len(inputs[0])).dropped if context.training else None
            with traced_layers("torch") as results:
                return keras_pass(imported, parameters, inputs, context, drop, "float64")[0], results
        return _graph_pass(imported, parameters, inputs, context)


def _graph_pass(
    imported: Imported, parameters: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], context: ForwardContext[torch.Tensor]
) -> tuple[torch.Tensor, list[Traced]]:
    graph = read_graph(imported.folder / (TRAINING if context.training else EVALUATION))
    constants = {name: torch.from_numpy(value) for name, value in read_constants(imported.folder).items()}
    state = {**constants, **context.buffers, **parameters}
    values: dict[str, Any] = {}
    waiting = iter(inputs)
    with drawn_by(context, imported, len(inputs[0])):
        for node in graph.nodes:
            if node.operation == STATE:
                values[node.name] = state[node.arguments["name"]]
            elif node.operation == INPUT:
                values[node.name] = next(waiting)
            elif node.operation == CONSTANT:
                values[node.name] = constant_of(node)
            elif node.operation == ITEM:
                values[node.name] = decoded(node.arguments["of"], values)[node.arguments["position"]]
            else:
                values[node.name] = _noted(node, values)
    return values[graph.result], traced(graph, values)


@contextmanager
def default_float64() -> Iterator[None]:
    """Within the block, new tensors of floats are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def constant_of(node: Node) -> torch.Tensor:
    """Return the value of a constant in the graph."""
    return torch.tensor(node.arguments["value"], dtype=_format(node.arguments["format"]))


def _format(name: str) -> torch.dtype:
    named: torch.dtype = getattr(torch, name)
    return torch.get_default_dtype() if named == torch.float32 else named


def decoded(argument: Any, values: Mapping[str, Any]) -> Any:
    """Return an encoded argument, with earlier results."""
    if isinstance(argument, dict):
        if NODE in argument:
            return values[argument[NODE]]
        return _format(argument[FORMAT]) if FORMAT in argument else math.inf * argument[INFINITY]
    return [decoded(part, values) for part in argument] if isinstance(argument, list) else argument


def _noted(node: Node, values: Mapping[str, Any]) -> Any:
    try:
        return computed_node(node, values)
    except Exception as error:
        error.add_note(f"{node.operation}{f', {node.line}' if node.line else ''}")
        raise


def computed_node(node: Node, values: Mapping[str, Any]) -> Any:
    """Carry a node's operation out."""
    namespace, name, *overload = node.operation.split(".")
    arguments = {key: decoded(argument, values) for key, argument in node.arguments.items()}
    if node.operation in _CHECKS:
        return None
    if node.operation in _BY_FUNCTION:
        return _BY_FUNCTION[node.operation](**arguments)
    if namespace == "python":
        function: Function = getattr(operator, name, None) or getattr(torch, name)
        return function(*arguments.values())
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload[0])
    defaults = {part.name for part in function._schema.arguments if part.has_default_value()}  # type: ignore[attr-defined]
    return function(**{key: value for key, value in arguments.items() if value is not None or key not in defaults})


def _gru(x: torch.Tensor, h0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool) -> Any:
    return torch.gru(x, h0, weights, True, layers, 0.0, False, bidirectional, False)


def _rnn(x: torch.Tensor, h0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool, nonlinearity: str) -> Any:
    function = torch.rnn_tanh if nonlinearity == "tanh" else torch.rnn_relu
    return function(x, h0, weights, True, layers, 0.0, False, bidirectional, False)


def _lstm(x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, weights: list[torch.Tensor], layers: int, bidirectional: bool) -> Any:
    return torch.lstm(x, [h0, c0], weights, True, layers, 0.0, False, bidirectional, False)


def _native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, None]:
    return functional.dropout(input, p, bool(train)), None


# What draws has to draw by the run's masks; a view may be of a tensor that lies otherwise in memory than in the export; and torch's
# gradients of hardsigmoid and hardswish have a constant of float32 (1.0f / 6.0f) also in float64.
_BY_FUNCTION: Mapping[str, Function] = {
    "crosstrain.gru.default": _gru,
    "crosstrain.rnn.default": _rnn,
    "crosstrain.lstm.default": _lstm,
    "aten.native_dropout.default": _native_dropout,
    "aten.dropout.default": lambda input, p, train: functional.dropout(input, p, train),
    "aten.bernoulli.p": lambda self, p, generator=None: torch.empty_like(self).bernoulli_(p),
    "aten.scaled_dot_product_attention.default": lambda **arguments: functional.scaled_dot_product_attention(**arguments),
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), lambda self, size: self.reshape(size)),
    "aten.hardsigmoid.default": lambda self: (self + 3).clamp(0, 6) / 6,
    "aten.hardswish.default": lambda self: self * (self + 3).clamp(0, 6) / 6,
}
