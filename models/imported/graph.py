"""A model's operations as data, which one framework writes and another carries out.

A graph is a list of nodes in order of execution, for training or for evaluation. Operations have the names of torch's ATen library
(https://docs.pytorch.org/docs/stable/torch.compiler_ir.html), with every argument by name and defaults filled in.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...core.drafts import replacing
from ...core.errors import UsageError

STATE, INPUT, CONSTANT, ITEM = "state", "input", "constant", "item"  # nodes that are no operations
NODE, FORMAT, INFINITY = "node", "format", "infinity"  # keys of encoded arguments
MAX_GRAPH_BYTES = 256 << 20


class Node(msgspec.Struct, omit_defaults=True):
    """One operation, or a value that enters the graph.

    `arguments` are JSON values; ``{"node": name}`` is an earlier result, ``{"format": "float32"}`` a number format, ``{"infinity": -1}``
    an infinity, and of 0 no number. `shape` has None for a size that varies, and is None if the result is no tensor. `line`: in the user's
    source. `layer`: the path of the module that it belongs to.
    """

    name: str
    operation: str
    arguments: dict[str, Any] = {}
    shape: list[int | None] | None = None
    line: str = ""
    layer: str = ""


class Graph(msgspec.Struct):
    """The nodes in order, and the name of the result.

    `updated`: the results that are new values of buffers, by the buffer's name.
    """

    nodes: list[Node]
    result: str
    updated: dict[str, str] = {}

    @property
    def operations(self) -> dict[str, str]:
        """The operations, each with the line of its first use."""
        used: dict[str, str] = {}
        for node in self.nodes:
            if node.operation not in (STATE, INPUT, CONSTANT, ITEM):
                used.setdefault(node.operation, node.line)
        return used

    def without_gradient(self, parameters: Container[str]) -> set[str]:
        """Return the names of the nodes that hold buffers and constants."""
        held = (node for node in self.nodes if node.operation in (STATE, CONSTANT))
        return {node.name for node in held if node.operation == CONSTANT or node.arguments["name"] not in parameters}

    def write(self, path: Path) -> None:
        """Write the graph as JSON."""
        with replacing(path) as draft:
            draft.write_bytes(msgspec.json.encode(self))


class NodeOnTape(msgspec.Struct):
    """A part of a pass that is computed by itself: its prefix on a tape, layer, operation.

    `elements`: of its inputs and results together. `buffers`: the tensors among its results that are new values of buffers. `options`: of
    a layer of Keras, by their names there.
    """

    place: str
    layer: str
    operation: str
    elements: int
    buffers: list[str] = []
    options: dict[str, float | str] = {}


class Traced(NamedTuple):
    """A result with its operation, layer and line of the user; unknown ones are ""."""

    operation: str
    layer: str
    line: str
    value: Any


def traced(graph: Graph, values: Mapping[str, Any]) -> list[Traced]:
    """Return the results of a graph's nodes in order, from values by the nodes' names."""
    return [Traced(node.operation, node.layer, node.line, values[node.name]) for node in graph.nodes]


def nodes_in(value: object) -> list[str]:
    """Return the names of the earlier results in an encoded argument."""
    if isinstance(value, Mapping):
        return [str(value[NODE])] if NODE in value else []
    return [name for part in value for name in nodes_in(part)] if isinstance(value, list) else []


def read_graph(path: Path) -> Graph:
    """Read a graph that `Graph.write` wrote. Raises UsageError for anything else."""
    with path.open("rb") as file:
        content = file.read(MAX_GRAPH_BYTES + 1)
    if len(content) > MAX_GRAPH_BYTES:
        raise UsageError(f"model: its graph is larger than {MAX_GRAPH_BYTES >> 20} MiB ({path}). Choose --backend torch.")
    try:
        return msgspec.json.decode(content, type=Graph)
    except msgspec.DecodeError as error:
        raise UsageError(f"model: {str(path)!r} is damaged ({error}). Remove its folder; it is written again.") from error
