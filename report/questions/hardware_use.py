"""Are the GPUs or the CPUs fully used, and what does the rest wait for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.worker_layout import workers_by_node
from ..diagnosis.verdict import NEARLY_ALL, Explanation, NodeView
from .answer import Answer, digits3, percent

__all__ = ["hardware_use"]

MOST_NAMED = 3
"""Nodes that are named one by one; of more the least and the most busy."""

LEAST_WAIT = 0.05
"""A part of the run's time that is worth naming."""

_WAITS = {
    "network": "the exchange between tasks",
    "peers": "slow peers",
    "data": "data",
    "evaluating": "evaluating",
    "saving": "saving",
    "other": "what lies between commands",
}


def hardware_use(explanation: Explanation) -> Answer | None:
    """Return how much of its processors the run used, means over the whole run; None where nothing was sampled."""
    nodes = explanation.nodes
    if all(view.cpu_fraction is None and view.gpu_utilization is None for view in nodes):
        return None
    gpus = [view for view in nodes if view.gpu_utilization is not None]
    shared = (explanation.evidence.summary["nodes_sharing_cores"] or 1) > 1
    used = _shared_fraction(nodes) if shared else max((view.cpu_fraction or 0.0 for view in nodes), default=0.0)
    least = _shared_fraction(nodes) if shared else min((view.cpu_fraction or 0.0 for view in nodes), default=0.0)
    waits = {name: explanation.run_fractions[name] for name in _WAITS if explanation.run_fractions.get(name, 0.0) >= LEAST_WAIT}
    figures = {
        "nodes": [_node(view) for view in nodes],
        "nodes_share_cores": shared,
        "cpu_fraction_least": least,
        "cpu_fraction_most": used,
        "cpus_fully_used": least >= NEARLY_ALL,
        "gpus_fully_used": min(view.gpu_utilization or 0.0 for view in gpus) >= NEARLY_ALL if gpus else None,
        "threads_per_task": list(explanation.evidence.job.get("threads_per_task") or ()),
        "waits": waits,
    }
    parts = [_gpu_text(gpus)] if gpus else []
    parts.append(_cpu_text(explanation, shared, least, used))
    if not figures["cpus_fully_used"] or figures["gpus_fully_used"] is False:
        parts += [text for text in (_threads_text(explanation), _waits_text(explanation, waits)) if text]
    return Answer("hardware_use", "GPUs and CPUs" if gpus else "CPUs", "; ".join(parts), figures)


def _shared_fraction(nodes: tuple[NodeView, ...]) -> float:
    """Nodes on the same cores: what all used together, over what one of them may use."""
    cores = max((view.cores_available or 0.0 for view in nodes), default=0.0)
    return sum(view.cpu_cores_used or 0.0 for view in nodes) / cores if cores else 0.0


def _node(view: NodeView) -> Mapping[str, Any]:
    return {
        "node": view.node,
        "cpu_cores_used": view.cpu_cores_used,
        "cores_available": view.cores_available,
        "cpu_fraction": view.cpu_fraction,
        "gpu_utilization": view.gpu_utilization,
    }


def _verdict(least: float, most: float, what: str) -> str:
    if least >= NEARLY_ALL:
        return f"{what} fully used"
    return f"not all {what} fully used" if most >= NEARLY_ALL else f"{what} not fully used"


def _cpu_text(explanation: Explanation, shared: bool, least: float, most: float) -> str:
    nodes = explanation.nodes
    if shared:
        cores = max(view.cores_available or 0.0 for view in nodes)
        used = sum(view.cpu_cores_used or 0.0 for view in nodes)
        own = f" (node 0 {digits3(nodes[0].cpu_cores_used)})"
        return (
            f"{_verdict(least, most, 'cores')}: all {len(nodes)} nodes together {digits3(used)} of the {digits3(cores)} cores they share, "
            f"{percent(most)}{own}"
        )
    known = sorted((view for view in nodes if view.cpu_fraction is not None), key=lambda view: view.cpu_fraction or 0.0)
    if len(known) <= MOST_NAMED:
        known.sort(key=lambda view: view.node)
    named = known if len(known) <= MOST_NAMED else [known[0], known[-1]]
    each = ", ".join(
        f"node {view.node} {digits3(view.cpu_cores_used)} of {digits3(view.cores_available)} cores ({percent(view.cpu_fraction)})"
        for view in named
    )
    of = f"of {len(known)} nodes the least and the most busy, " if len(known) > MOST_NAMED else ""
    return f"{_verdict(least, most, 'cores')}: {of}{each}"


def _gpu_text(gpus: list[NodeView]) -> str:
    ordered = sorted(gpus, key=lambda view: view.gpu_utilization or 0.0)
    least, most = ordered[0], ordered[-1]
    named = [least] if least is most else [least, most] if len(gpus) > MOST_NAMED else sorted(gpus, key=lambda view: view.node)
    each = ", ".join(f"node {view.node} {percent(view.gpu_utilization)} of the time" for view in named)
    return f"{_verdict(least.gpu_utilization or 0.0, most.gpu_utilization or 0.0, 'GPUs')}: {each}"


def _threads_text(explanation: Explanation) -> str | None:
    """Where tasks compute with fewer threads than their node has cores, that is what keeps the rest idle."""
    threads = explanation.evidence.job.get("threads_per_task") or ()
    tasks = workers_by_node(explanation.evidence.job["procs_per_node"], explanation.evidence.job["nodes"])
    cores = [view.cores_available for view in explanation.nodes]
    spare = [
        count
        for count, own, workers in zip(threads, cores, tasks, strict=False)
        if count is not None and own is not None and count * workers <= own - 1
    ]
    if not spare:
        return None
    return f"a task computes with {spare[0]} thread{'s' if spare[0] != 1 else ''} (--threads)"


def _waits_text(explanation: Explanation, waits: Mapping[str, float]) -> str | None:
    if not explanation.calibrated:
        return "what the rest waits for is not known without a calibration"
    if not waits:
        return None
    named = ", ".join(f"{_WAITS[name]} {percent(share)}" for name, share in sorted(waits.items(), key=lambda item: -item[1]))
    return f"of the run's time {named}"
