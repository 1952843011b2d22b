"""CPU contention: what other programs took of the CPU time that a run asked for, and which of its figures count in spite of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run

__all__ = [
    "STARVED",
    "STARVED_SHARING",
    "TIMED_FIGURES",
    "CpuStarvation",
    "contention_judged",
    "cpu_starvation",
    "log_speed_lost",
    "timed_runs",
]

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

TIMED_FIGURES = frozenset(
    (
        "examples_per_second",
        "steps_per_second",
        "init_seconds",
        "train_seconds",
        "run_seconds",
        "total_seconds",
        "step_seconds_p50",
        "step_seconds_p95",
        "time_to_target_seconds",
        "node_cpu_cores_used_mean",
        "node_cpu_fraction_mean",
        "node_network_sent_bytes_per_second",
        "node_network_received_bytes_per_second",
        "node_network_sent_bytes_per_train_second",
        "node_network_received_bytes_per_train_second",
    )
)
"""Figures of `summary_rows.row` that depend on who else has the cores; what was learnt, counted or held in memory does not."""


@dataclass(frozen=True, slots=True)
class CpuStarvation:
    """The node that lost most: `fraction` of the CPU time that its tasks asked for went to others, which used `foreign_cores` cores."""

    node: int
    fraction: float
    foreign_cores: float
    cores_available: float


def cpu_starvation(summary: Mapping[str, Any]) -> CpuStarvation | None:
    """Return what other programs did to a run whose speed and times do not count for it; None where that was not much, or not observed."""
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
    """Return whether it is known of every node what other programs took; it is not of a run under 2 s, or without samples."""
    nodes = summary.get("per_node") or ()
    return bool(nodes) and len(_observed(summary)) == len(nodes)


def log_speed_lost(summary: Mapping[str, Any]) -> float:
    """Return the logarithm of the factor, at least 1, by which the run may have been faster without other programs; 0 where not observed.

    No more time was lost than all tasks together waited, which is the cores ℓ that each node lost: the factor is at most 1 / (1 − Σ ℓ), as
    tasks that wait for each other may have been held up in turn. Of one task alone it is at most 1 / (1 − c) as well, with c the fraction
    of the CPU time that it asked for.
    """
    nodes = _observed(summary)
    if not nodes:
        return 0.0
    fraction = max(float(node["starved_fraction"]) for node in nodes)
    lost = [float(node["cpu_cores_lost"]) for node in nodes if node.get("cpu_cores_lost") is not None]
    if len(lost) == len(nodes):
        alone = (summary.get("workers") or 1) + (summary.get("parameter_servers") or 0) == 1
        fraction = min(math.fsum(lost), fraction if alone else 1.0)
    return -math.log1p(-min(fraction, _LARGEST_FRACTION))


_LARGEST_FRACTION = 0.999


def timed_runs(runs: Sequence[Run]) -> list[Run]:
    """Return those of some repeats whose speed and times count, as other programs had too little of their cores to matter."""
    return [run for run in runs if cpu_starvation(run.summary) is None]


def _observed(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node for node in summary.get("per_node") or () if node.get("starved_fraction") is not None]


def _held_up(node: Mapping[str, Any]) -> bool:
    """Return whether the cores that a node lost to others are enough to slow it: `STARVED` of one core, or of its limit where that is less.

    A node that mostly waits, for its peers or its link, asks for little, and little taken from it is a large part of that.
    """
    lost, available = node.get("cpu_cores_lost"), node.get("cores_available")
    return lost is None or available is None or lost >= STARVED * min(1.0, available)
