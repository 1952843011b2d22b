"""CPU contention: the CPU time that other programs took from a run, and its effect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run

# Share of the requested CPU time taken by other programs, measured on two cores with logistic regression, one process: alone 0.01 to 0.12
# (at most 3% slower), two busy loops 0.23 to 0.40 (18% to 38% slower), four 0.63 to 0.66 (63% to 65% slower).
STARVED = 0.15

# The same with shared cores, measured with three virtual nodes: two busy loops up to 0.57 (no slower), four to eight on torch 0.69 to 0.77
# (12% to 19% slower), on TensorFlow 0.08 to 0.14 (no slower), twenty 0.85 to 0.92 (67% to 80% slower).
STARVED_SHARING = 0.6


@dataclass(frozen=True, slots=True)
class CpuStarvation:
    """The most contended node; other programs took `fraction` of its requested CPU time."""

    node: int
    fraction: float
    foreign_cores: float
    cores_available: float


def cpu_starvation(summary: Mapping[str, Any]) -> CpuStarvation | None:
    """Return the CPU contention that invalidates a run's speed; None if small or unobserved."""
    nodes = _observed(summary)
    tasks = (summary.get("workers") or 0) + (summary.get("parameter_servers") or 0)
    sharing = (summary.get("nodes_sharing_cores") or 1) > 1 or tasks > (summary.get("nodes") or 0)
    if not sharing:
        nodes = [node for node in nodes if _held_up(node)]
    worst = max(nodes, key=lambda node: float(node["starved_fraction"]), default=None)
    if worst is None or worst["starved_fraction"] < (STARVED_SHARING if sharing else STARVED):
        return None
    return CpuStarvation(worst["node"], worst["starved_fraction"], worst["foreign_cpu_cores_used"], worst["cores_available"])


def contention_judged(summary: Mapping[str, Any]) -> bool:
    """Return whether contention was observed on every node; never in runs under 2 s."""
    nodes = summary.get("per_node") or ()
    return bool(nodes) and len(_observed(summary)) == len(nodes)


def log_speed_lost(summary: Mapping[str, Any]) -> float:
    """Return the logarithm of the largest slowdown by other programs; 0 if not observed."""
    # With ℓ the cores each node lost: at most 1 / (1 − Σ ℓ); of a single task also 1 / (1 − c), c the lost fraction of its requested time.
    nodes = _observed(summary)
    if not nodes:
        return 0.0
    fraction = max(float(node["starved_fraction"]) for node in nodes)
    lost = [float(node["cpu_cores_lost"]) for node in nodes if node.get("cpu_cores_lost") is not None]
    if len(lost) == len(nodes):
        alone = (summary.get("workers") or 1) + (summary.get("parameter_servers") or 0) == 1
        fraction = min(math.fsum(lost), fraction if alone else 1.0)
    return -math.log1p(-min(fraction, _MAX_FRACTION))


_MAX_FRACTION = 0.999


def timed_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without CPU contention."""
    return [run for run in runs if cpu_starvation(run.summary) is None]


def _observed(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node for node in summary.get("per_node") or () if node.get("starved_fraction") is not None]


def _held_up(node: Mapping[str, Any]) -> bool:
    """Return whether a node lost `STARVED` of a core or limit, as waiting nodes request little."""
    lost, available = node.get("cpu_cores_lost"), node.get("cores_available")
    return lost is None or available is None or lost >= STARVED * min(1.0, available)
