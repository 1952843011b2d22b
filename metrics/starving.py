"""How much of the CPU time that a node's tasks asked for did other programs take? From what all of a run's nodes used and waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LEAST_SECONDS", "CpuUse", "foreign_cores", "starved_fractions"]

LEAST_SECONDS = 2.0
"""Samples of less time tell nothing: the end of the start, which the tasks' samples do not have all of, is a large part of it."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """One node while the run clock ran, in cores (CPU seconds a second); None for what was not observed.

    `used` by its tasks, `waited` by its tasks' threads for a core, `trainer` used by agent and driver, `machine` by all programs of its
    machine on the cores that the node may use, which are `available`.
    """

    used: float | None
    waited: float | None
    trainer: float | None
    machine: float | None
    available: float | None


def foreign_cores(nodes: Sequence[CpuUse], machines: Sequence[str]) -> list[float | None]:
    """Return for each node how many of its cores programs had that are not the run's; `machines` says which nodes share one."""
    found: list[float | None] = []
    for node, machine in zip(nodes, machines, strict=True):
        own = [figure for other, where in zip(nodes, machines, strict=True) if where == machine for figure in (other.used, other.trainer)]
        unknown = node.machine is None or None in own
        found.append(None if unknown else max(0.0, (node.machine or 0.0) - sum(figure or 0.0 for figure in own)))
    return found


def starved_fractions(nodes: Sequence[CpuUse], machines: Sequence[str]) -> list[float | None]:
    """Return for each node which part of the CPU time that its tasks asked for other programs took (0 to 1); None where not observed.

    Tasks lost to others no more than they waited, no more than the others used, and no more than they might have used beyond what they
    did. So waiting for each other is no loss, as where several nodes share a machine, and neither is a limit that the node has reached.
    What others used is lost once, however many nodes waited for it.
    """
    lost: list[float | None] = []
    foreign = foreign_cores(nodes, machines)
    for node, others in zip(nodes, foreign, strict=True):
        if node.used is None or node.waited is None or node.available is None or others is None:
            lost.append(None)
        else:
            lost.append(max(0.0, min(node.waited, others, node.available - node.used)))
    found: list[float | None] = []
    for node, others, own, machine in zip(nodes, foreign, lost, machines, strict=True):
        together = sum(other or 0.0 for other, where in zip(lost, machines, strict=True) if where == machine)
        if own is None or others is None:
            found.append(None)
        else:
            part = own * min(1.0, others / together) if together else 0.0
            wanted = (node.used or 0.0) + part
            found.append(part / wanted if wanted else 0.0)
    return found
