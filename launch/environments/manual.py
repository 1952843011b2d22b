"""Nodes that a person starts: ``--node-rank i --rendezvous HOST:PORT`` on each of ``--nodes`` nodes."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import UsageError
from .base import Membership, Options, endpoint

__all__ = ["BY_HAND", "manual"]

BY_HAND = "--rendezvous"
"""The name of this contract."""


def manual(environment: Mapping[str, str], options: Options) -> Membership | None:
    """Return the place that was typed, None where none was."""
    rendezvous, node_rank, nodes = options.rendezvous, options.node_rank, options.nodes
    if rendezvous is None and node_rank is None:
        return None
    if rendezvous is None or node_rank is None:
        raise UsageError("--node-rank and --rendezvous belong together: give both on every node, the same HOST:PORT everywhere")
    if node_rank < 0 or (nodes is not None and node_rank >= nodes):
        raise UsageError.of("--node-rank", node_rank, _ranks(nodes))
    shape = {} if nodes is None else {"nodes": nodes}
    return Membership(BY_HAND, node_rank, 0, host_and_port("--rendezvous", rendezvous), shape)


def _ranks(nodes: int | None) -> str:
    """Return in words which ranks a run of so many nodes has."""
    if nodes is None:
        return "0 and more"
    return "0, as the run has one node; give --nodes on each of them" if nodes == 1 else f"0 to {nodes - 1} (--nodes {nodes})"


def host_and_port(key: str, text: str) -> tuple[str, tuple[int, ...]]:
    try:
        host, port = endpoint(text)
    except ValueError as error:
        raise UsageError.of(key, text, "HOST:PORT, such as 10.0.0.1:29400, with a port from 1 to 65535") from error
    return host, (port,)
