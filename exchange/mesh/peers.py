"""What the other ranks are called, and the error about one that is lost."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.cluster import Task

__all__ = ["PeerLostError", "names_of"]


class PeerLostError(ConnectionError):
    """Another rank has gone, or cannot be heard any more; the message names it."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"lost {name}: {why}")


def names_of(task: Task) -> Mapping[int, str]:
    """Return for each rank of a task's run its name, node and address, for people."""
    addresses = task.cluster.addresses
    return {each.index: f"{each.name} on node {each.node} ({addresses[each.node]})" for each in task.cluster.of_role("worker")}
