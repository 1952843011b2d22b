"""How many workers has each node, and on which node is each worker?

The setting ``procs_per_node`` says it: one number for all nodes, or one for each. Workers are numbered node by node.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ProcsPerNode", "nodes_of_workers", "parse_procs_per_node", "procs_per_node_of", "read_procs_per_node", "workers_by_node"]

ProcsPerNode = int | tuple[int, ...]
"""Workers on each node alike, or one number for each node."""


def workers_by_node(procs_per_node: ProcsPerNode, nodes: int) -> tuple[int, ...]:
    """Return the number of workers of each node, in node order. Raises ValueError where the setting is for another number of nodes."""
    if isinstance(procs_per_node, int):
        return (procs_per_node,) * nodes
    if len(procs_per_node) != nodes:
        given = ",".join(map(str, procs_per_node))
        numbers = "1 node" if nodes == 1 else f"each of the {nodes} nodes"
        raise ValueError(f"give one number, or one for {numbers}, not {len(procs_per_node)} ({given})")
    return tuple(procs_per_node)


def procs_per_node_of(by_node: Sequence[int]) -> ProcsPerNode:
    """Return the setting that gives nodes these numbers of workers: one number where all have the same."""
    return tuple(by_node) if len(set(by_node)) > 1 else by_node[0]


def nodes_of_workers(by_node: Sequence[int]) -> tuple[int, ...]:
    """Return the node of each worker, by the worker's number: ``(0, 1, 1)`` for one worker on node 0 and two on node 1."""
    return tuple(node for node, count in enumerate(by_node) for _ in range(count))


def parse_procs_per_node(value: object) -> object:
    """Bring what was typed to the setting's form: ``1,2`` becomes ``("1", "2")``; the rest is left to the validation."""
    if isinstance(value, str) and "," in value:
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, list | tuple) and len(value) == 1:
        return value[0]
    return value


def read_procs_per_node(value: int | str | Sequence[int]) -> ProcsPerNode:
    """Return a setting that has been checked, as JSON or a person wrote it: 2, [1, 2] or "1,2"."""
    if isinstance(value, int):
        return value
    numbers = tuple(int(part) for part in (value.split(",") if isinstance(value, str) else value))
    return numbers[0] if len(numbers) == 1 else numbers
