"""Was a run starved of CPU: did other programs take so much of it that the run's speed is not its own?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["STARVED", "STARVED_SHARING", "CpuStarvation", "cpu_starvation"]

STARVED = 0.15
"""From this part on of the CPU time that a node's tasks asked for, taken by others, a run counts as starved.

Measured on two cores with logistic regression, one process of either framework: alone 0.01 to 0.12, where others did small things beside
it (at most 3% slower); beside two busy loops 0.23 to 0.40 (18% to 38% slower), beside four 0.63 to 0.66 (63% to 65% slower).
"""

STARVED_SHARING = 0.6
"""The same where tasks share cores: they wait for each other anyway, and for cores that others had while they had nothing to do.

Measured likewise, three virtual nodes: beside two busy loops up to 0.57 and no slower, beside four to eight of them on torch 0.69 to 0.77
(12% to 19% slower), on TensorFlow, which left them few cores, 0.08 to 0.14 (no slower); beside twenty 0.85 to 0.92 (67% to 80% slower).
"""


@dataclass(frozen=True, slots=True)
class CpuStarvation:
    """The node that lost most: `fraction` of the CPU time that its tasks asked for went to others, which used `foreign_cores` cores."""

    node: int
    fraction: float
    foreign_cores: float
    cores_available: float


def cpu_starvation(summary: Mapping[str, Any]) -> CpuStarvation | None:
    """Return what other programs did to a run; None where that was not much, or not observed."""
    nodes = [node for node in summary["per_node"] if node.get("starved_fraction") is not None]
    tasks = (summary.get("workers") or 0) + (summary.get("parameter_servers") or 0)
    sharing = (summary.get("nodes_sharing_cores") or 1) > 1 or tasks > (summary.get("nodes") or 0)
    if not sharing:
        nodes = [node for node in nodes if _held_up(node)]
    worst = max(nodes, key=lambda node: float(node["starved_fraction"]), default=None)
    if worst is None or worst["starved_fraction"] < (STARVED_SHARING if sharing else STARVED):
        return None
    return CpuStarvation(worst["node"], worst["starved_fraction"], worst["foreign_cpu_cores_used"], worst["cores_available"])


def _held_up(node: Mapping[str, Any]) -> bool:
    """Return whether the cores that a node lost to others are enough to slow it: `STARVED` of one core, or of its limit where that is less.

    A node that mostly waits, for its peers or its link, asks for little, and little taken from it is a large part of that.
    """
    lost, available = node.get("cpu_cores_lost"), node.get("cores_available")
    return lost is None or available is None or lost >= STARVED * min(1.0, available)
