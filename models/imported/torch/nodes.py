"""Nodes of a graph one by one on torch, with derivatives: in float64 as a tape, or from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...base import ForwardContext
from ..description import TRAINING, Imported, read_constants
from ..graph import CONSTANT, INPUT, ITEM, STATE, Graph, Node, NodeOnTape, nodes_in, read_graph
from ..keras.float64 import in_float64
from ..tape import MOVES, UNIT, sizes_of
from .float64_pass import computed_node, constant_of, decoded, default_float64
from .forward import Draws, drawn_by
from .keras_passes import single_layers

Array = NDArray[Any]
Arrays = dict[str, Array]
Tensors = Mapping[str, torch.Tensor]
Moved = Callable[[torch.Tensor], torch.Tensor]
_UNDEFINED = ("aten.empty", "aten.new_empty")  # whose results are whatever is in memory
_UNCLEAR = "max_pool"  # of equal elements, such as a ReLU's zeros, rounding or convention takes one


class _Nodes:
    """A pass over a graph whose float results may be replaced, node by node."""

    def __init__(
        self,
        imported: Imported,
        parameters: Tensors,
        inputs: Sequence[torch.Tensor],
        context: ForwardContext[torch.Tensor],
        moved: Moved | None = None,
    ) -> None:
        self.graph: Graph = read_graph(imported.folder / TRAINING)
        constants = {name: torch.from_numpy(value) for name, value in read_constants(imported.folder).items()}
        self._state = {**constants, **context.buffers, **parameters}
        self._inputs = iter(inputs)
        self.used: dict[str, set[int]] = {}  # of several results, those that are read
        for node in self.graph.nodes:
            if node.operation == ITEM:
                self.used.setdefault(nodes_in(node.arguments["of"])[0], set()).add(node.arguments["position"])
        self._fixed = self.graph.without_gradient(parameters)
        self.values: dict[str, Any] = {}
        self._moved = moved
        self.computed: dict[str, tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]] = {}

    def enter(self, node: Node) -> bool:
        """Give a node that is no operation its value; return False for an operation."""
        if node.operation == STATE:
            self.values[node.name] = self._state[node.arguments["name"]]
        elif node.operation == INPUT:
            self.values[node.name] = next(self._inputs)
        elif node.operation == CONSTANT:
            self.values[node.name] = constant_of(node)
        elif node.operation == ITEM:
            self.values[node.name] = decoded(node.arguments["of"], self.values)[node.arguments["position"]]
        else:
            return False
        return True

    def compute(self, node: Node) -> tuple[torch.Tensor, ...]:
        """Compute an operation from leaves of its own, and return its float results."""
        leaves = {
            name: (self.values[name].detach() if self._moved is None else self._moved(self.values[name].detach())).requires_grad_()
            for name in dict.fromkeys(nodes_in(list(node.arguments.values())))
            if _is_float(self.values[name]) and name not in self._fixed
        }
        with torch.enable_grad():
            result = computed_node(node, {**self.values, **leaves})
        self.values[node.name] = result
        floats = tuple(part for part in (result if isinstance(result, tuple | list) else (result,)) if _is_float(part))
        self.computed[node.name] = leaves, floats
        return floats

    def replace(self, node: Node, exact: Sequence[torch.Tensor]) -> None:
        """Go on with other float results of a node."""
        result, waiting = self.values[node.name], iter(exact)
        if isinstance(result, tuple | list):
            self.values[node.name] = tuple(next(waiting) if _is_float(part) else part for part in result)
        elif _is_float(result):
            self.values[node.name] = next(waiting)

    def derivatives(self, node: Node, slopes: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return the slopes of a node's float inputs, by the inputs' names."""
        leaves, floats = self.computed[node.name]
        pairs = [(part, slope) for part, slope in zip(floats, slopes, strict=True) if slope is not None and part.requires_grad]
        if not pairs or not leaves:
            return {}
        gradients = torch.autograd.grad(
            [part for part, _ in pairs],
            list(leaves.values()),
            [slope.to(part.dtype) for part, slope in pairs],
            materialize_grads=True,
            allow_unused=True,
        )
        return dict(zip(leaves, gradients, strict=True))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().to(tensor.dtype)


def tape(
    imported: Imported, parameters: Tensors, inputs: Sequence[torch.Tensor], context: ForwardContext[torch.Tensor], slope_of: Any
) -> tuple[Arrays, list[NodeOnTape]]:
    """Return results and slopes of a float64 pass, and its nodes.

    Exact are ``NODE/output N`` and ``NODE/slope of INPUT``. Frameworks are given ``NODE/result N`` and ``NODE/slope N``, float32.
    `slope_of` gives the slope of the result.
    """
    nodes, arrays, slopes = _Nodes(imported, parameters, inputs, context), Arrays(), dict[tuple[str, int], torch.Tensor]()
    with drawn_by(context, imported, len(inputs[0])):
        for node in nodes.graph.nodes:
            if nodes.enter(node):
                continue
            floats = nodes.compute(node)
            exact = [_rounded(part) for part in floats]
            for place, (part, kept) in enumerate(zip(floats, exact, strict=True)):
                if place in nodes.used.get(node.name, {0}) and not node.operation.startswith(_UNDEFINED):
                    arrays[f"{node.name}/output {place}"] = part.detach().numpy()
                arrays[f"{node.name}/result {place}"] = kept.float().numpy()
            nodes.replace(node, exact)
    result = nodes.values[nodes.graph.result]
    arrays["result"] = result.numpy()
    _add(slopes, (nodes.graph.result, 0), slope_of(result))
    for node in reversed(nodes.graph.nodes):
        if node.operation == ITEM:
            if (slope := slopes.get((node.name, 0))) is not None:
                source = nodes_in(node.arguments["of"])[0]
                _add(slopes, (source, _place_among_floats(nodes.values[source], node.arguments["position"])), slope)
        elif node.name in nodes.computed:
            arrays |= _backward(nodes, node, slopes)
    return arrays, _on_tape(nodes.graph, arrays, nodes.computed)


def _on_tape(graph: Graph, arrays: Arrays, computed: Mapping[str, tuple[Tensors, Sequence[torch.Tensor]]]) -> list[NodeOnTape]:
    items = {node.name: (nodes_in(node.arguments["of"])[0], node.arguments["position"]) for node in graph.nodes if node.operation == ITEM}
    buffers: dict[str, list[str]] = {}
    for name in graph.updated.values():
        if name in items:
            buffers.setdefault(items[name][0], []).append(f"output {items[name][1]}")
    known = {name.partition("/")[0] for name in arrays}
    elements = {name: sum(part.numel() for part in (*leaves.values(), *results)) for name, (leaves, results) in computed.items()}
    return [
        NodeOnTape(node.name, node.layer or node.name, node.operation, elements[node.name], buffers.get(node.name, []))
        for node in graph.nodes
        if node.name in known
    ]


def _keras_tape(
    imported: Imported, parameters: Tensors, inputs: Sequence[torch.Tensor], context: ForwardContext[torch.Tensor], slope_of: Any
) -> tuple[Arrays, list[NodeOnTape]]:
    drop = Draws(context, imported, len(inputs[0])).dropped
    layers, result = single_layers(imported, parameters, inputs, context, drop)
    layers.backward(result, slope_of(result.detach()))
    return {**layers.arrays, "result": result.detach().numpy()}, layers.nodes


def _backward(nodes: _Nodes, node: Node, slopes: dict[tuple[str, int], torch.Tensor]) -> Arrays:
    """Return the slopes of a node's results, as others are given them, and of its inputs."""
    floats = nodes.computed[node.name][1]
    arriving = [slopes.get((node.name, place)) for place in range(len(floats))]
    if _UNCLEAR in node.operation:
        arriving = [None if slope is None else slope * (part != 0) for slope, part in zip(arriving, floats, strict=True)]
    rounded = [None if slope is None else _rounded(slope) for slope in arriving]
    arrays = {f"{node.name}/slope {place}": slope.float().numpy() for place, slope in enumerate(rounded) if slope is not None}
    for name, gradient in nodes.derivatives(node, rounded).items():
        arrays[f"{node.name}/slope of {name}"] = gradient.numpy()
        _add(slopes, (name, 0), _rounded(gradient))
    return arrays


def _add(slopes: dict[tuple[str, int], torch.Tensor], key: tuple[str, int], slope: torch.Tensor) -> None:
    slopes[key] = slope if key not in slopes else slopes[key] + slope


def _place_among_floats(result: Any, position: int) -> int:
    return sum(_is_float(part) for part in result[:position])


def replayed_nodes(
    imported: Imported,
    parameters: Tensors,
    inputs: Sequence[torch.Tensor],
    context: ForwardContext[torch.Tensor],
    tape_arrays: Arrays,
    moved: Moved | None = None,
) -> Arrays:
    """Return results and slopes of each node, or layer of Keras, from a tape's.

    `moved` changes what each is computed from, in float64.
    """
    if imported.is_keras:
        drop = Draws(context, imported, len(inputs[0])).dropped
        return single_layers(imported, parameters, inputs, context, drop, tape_arrays, moved)[0].arrays
    nodes, arrays = _Nodes(imported, parameters, inputs, context, moved), Arrays()
    dtype = torch.get_default_dtype()
    with drawn_by(context, imported, len(inputs[0])):
        for node in nodes.graph.nodes:
            if nodes.enter(node):
                continue
            floats = nodes.compute(node)
            for place, part in enumerate(floats):
                arrays[f"{node.name}/output {place}"] = part.detach().numpy()
            slopes = [tape_arrays.get(f"{node.name}/slope {place}") for place in range(len(floats))]
            if any(slope is not None for slope in slopes):
                tensors = [None if slope is None else torch.from_numpy(slope).to(dtype) for slope in slopes]
                tensors = [slope if slope is None or moved is None else moved(slope) for slope in tensors]
                for name, gradient in nodes.derivatives(node, tensors).items():
                    arrays[f"{node.name}/slope of {name}"] = gradient.numpy()
            del nodes.computed[node.name]
            nodes.replace(node, [torch.from_numpy(tape_arrays[f"{node.name}/result {place}"]).to(dtype) for place in range(len(floats))])
    return arrays


def tape_of_arrays(
    imported: Imported,
    state: Mapping[str, Array],
    columns: Sequence[Array],
    kept_share: Callable[[Sequence[int], float, int], Array],
    slope_of: Callable[[Array], Array],
) -> tuple[Arrays, list[NodeOnTape]]:
    """Return the `tape` of a training pass from arrays, and its nodes.

    `state` has ``parameters/NAME`` and ``buffers/NAME``; `columns` are the inputs. `kept_share` returns dropout's factors for a shape, a
    rate and a layer; `slope_of` the slope of the result.
    """

    def tensor(array: Array) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64 if array.dtype.kind in "iu" else np.float64))

    def named(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): tensor(value) for name, value in state.items() if name.startswith(prefix)}

    def dropout(x: torch.Tensor, rate: float, layer: int) -> torch.Tensor:
        return x * torch.from_numpy(kept_share(tuple(x.shape), rate, layer)).to(x.dtype)

    context: ForwardContext[torch.Tensor] = ForwardContext(True, named("buffers/"), settings=imported, dropout=dropout)
    with default_float64(), in_float64("torch") if imported.is_keras else nullcontext():
        inputs = [tensor(column) for column in columns]
        parameters, pass_of = named("parameters/"), _keras_tape if imported.is_keras else tape
        arrays, nodes = pass_of(imported, parameters, inputs, context, lambda result: torch.from_numpy(slope_of(result.numpy())))
        moves = (_changed_bits(seed) for seed in range(MOVES))
        results = (replayed_nodes(imported, parameters, inputs, context, arrays, moved) for moved in moves)
        return arrays | sizes_of(arrays, results, nodes), nodes


def _changed_bits(seed: int) -> Moved:
    draw = np.random.default_rng(seed)
    return lambda value: value * (1 + UNIT * torch.from_numpy(draw.choice([-1.0, 1.0], tuple(value.shape))))
