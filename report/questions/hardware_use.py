"""Are the GPUs or the CPUs fully used, and what does the rest wait for?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.worker_layout import workers_by_node
from ..diagnosis.verdict import NEARLY_ALL, Explanation, NodeView
from ..diagnosis.words import NAMES
from .answer import Answer, digits3, percent

__all__ = ["hardware_use"]

MOST_NAMED = 3
"""Nodes that are named one by one; of more the least and the most busy."""

LEAST_WAIT = 0.05
"""A part of the run's time that is worth naming."""


def hardware_use(explanation: Explanation) -> Answer | None:
    """Return how much of its processors the run used, means over the whole run; None where nothing was sampled."""
    nodes = explanation.nodes
    if all(view.cpu_fraction is None and view.gpu_utilization is None for view in nodes):
        return None
    gpus = [view for view in nodes if view.gpu_utilization is not None]
    shared = (explanation.evidence.summary["nodes_sharing_cores"] or 1) > 1
    fractions, unknown = _fractions(nodes, shared), [view.node for view in nodes if not _is_known(view, shared)]
    least, most = min(fractions, default=None), max(fractions, default=None)
    fully = _fully_used(least, shared, unknown)
    fractions_of_run = explanation.run_fractions
    waits = {name: share for name in NAMES if name != "compute" and (share := fractions_of_run.get(name, 0.0)) >= LEAST_WAIT}
    figures = {
        "nodes": [_node(view) for view in nodes],
        "nodes_share_cores": shared,
        "cpu_fraction_least": least,
        "cpu_fraction_most": most,
        "cpu_unknown_nodes": unknown,
        "cpus_fully_used": fully,
        "gpus_fully_used": min(view.gpu_utilization or 0.0 for view in gpus) >= NEARLY_ALL if gpus else None,
        "threads_per_task": list(explanation.evidence.job.get("threads_per_task") or ()),
        "waits": waits,
    }
    parts = [_gpu_text(gpus)] if gpus else []
    parts.append(_cpu_text(nodes, shared, fractions, fully, unknown))
    if not fully or figures["gpus_fully_used"] is False:
        parts += [text for text in (_threads_text(explanation), _waits_text(explanation, waits)) if text]
    return Answer("hardware_use", "GPUs and CPUs" if gpus else "CPUs", "; ".join(parts), figures)


def _is_known(view: NodeView, shared: bool) -> bool:
    return (view.cpu_cores_used if shared else view.cpu_fraction) is not None


def _fractions(nodes: Sequence[NodeView], shared: bool) -> list[float]:
    """Return what nodes used of the cores that each may use, where that is known; of nodes on the same cores what they used together."""
    if not shared:
        return [view.cpu_fraction for view in nodes if view.cpu_fraction is not None]
    used = [view.cpu_cores_used for view in nodes if view.cpu_cores_used is not None]
    cores = max((view.cores_available or 0.0 for view in nodes), default=0.0)
    return [sum(used) / cores] if cores and used else []


def _fully_used(least: float | None, shared: bool, unknown: Sequence[int]) -> bool | None:
    """Return whether all cores were fully used; None where that hangs on nodes of which nothing is known."""
    if least is None:
        return None
    fully = least >= NEARLY_ALL
    decided = fully if shared else not fully  # whatever the unknown ones used
    return fully if decided or not unknown else None


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


def _cpu_text(nodes: Sequence[NodeView], shared: bool, fractions: Sequence[float], fully: bool | None, unknown: Sequence[int]) -> str:
    if fully is None:
        verdict = "whether all cores were fully used is unknown"
    else:
        verdict = "not all cores fully used" if unknown and not fully else _verdict(min(fractions), max(fractions), "cores")
    return verdict + (f": {_used_text(nodes, shared)}{_unknown_text(unknown)}" if fractions else "")


def _used_text(nodes: Sequence[NodeView], shared: bool) -> str:
    if shared:
        cores = max(view.cores_available or 0.0 for view in nodes)
        used = sum(view.cpu_cores_used or 0.0 for view in nodes)
        counted = sum(_is_known(view, shared) for view in nodes)
        by = f"all {len(nodes)} nodes" if counted == len(nodes) else f"{counted} of {len(nodes)} nodes"
        own = digits3(nodes[0].cpu_cores_used)
        return f"{digits3(used)} of {digits3(cores)} shared cores ({percent(used / cores)}) by {by}, {own} by node 0"
    known = sorted((view for view in nodes if view.cpu_fraction is not None), key=lambda view: view.cpu_fraction or 0.0)
    if len(known) <= MOST_NAMED:
        known.sort(key=lambda view: view.node)
    named = known if len(known) <= MOST_NAMED else [known[0], known[-1]]
    each = ", ".join(
        f"node {view.node} {digits3(view.cpu_cores_used)} of {digits3(view.cores_available)} cores ({percent(view.cpu_fraction)})"
        for view in named
    )
    of = f"least and most busy of {len(known)} nodes: " if len(known) > MOST_NAMED else ""
    return f"{of}{each}"


def _unknown_text(unknown: Sequence[int]) -> str:
    """Name the nodes whose use of the CPU is not known, a few of many; empty where there are none."""
    if not unknown:
        return ""
    if len(unknown) == 1:
        return f"; unknown for node {unknown[0]}"
    named = ", ".join(map(str, unknown[:MOST_NAMED])) + (f" and {len(unknown) - MOST_NAMED:,} more" if len(unknown) > MOST_NAMED else "")
    return f"; unknown for {len(unknown):,} nodes ({named})"


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
    return f"each task computes with {spare[0]} thread{'s' if spare[0] != 1 else ''} (--threads)"


def _waits_text(explanation: Explanation, waits: Mapping[str, float]) -> str | None:
    if not explanation.calibrated:
        return "the rest of the time is unknown without a calibration"
    if not waits:
        return None
    named = ", ".join(f"{NAMES[name]} {percent(share)}" for name, share in sorted(waits.items(), key=lambda item: -item[1]))
    return f"of the run time: {named}"
