"""Which worker computes on which GPU, or why none can: what a run asks for against what its nodes have. One worker a GPU, on all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...backends.loading import declared_capabilities
from ...core.job import Job
from ...core.plugins import find
from ...monitor.visible_gpus import VisibleGpu

__all__ = ["MIXED", "REMEDY", "GpuPlan", "NodeGpus", "asked_device", "counted", "gpus_of", "plan_gpus"]

MIXED = "others have one for each; runs with workers on CPUs and on GPUs are not comparable"
REMEDY = "--device cpu, fewer workers there (--procs-per-node 1,2), or more GPUs for its processes (CUDA_VISIBLE_DEVICES)"


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node: which machine it is on, how many workers it has, and the GPUs that they may use, None where that is not known."""

    machine: str
    workers: int
    visible: Sequence[VisibleGpu] | None


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The GPUs of each node's workers, in their order: none at all where its tasks are to see none, None where nothing is done about it.

    `short` says of nodes that have fewer than workers what was found there; `refused`: so the run cannot be.
    """

    by_node: Sequence[Sequence[VisibleGpu] | None]
    short: Mapping[int, str] = field(default_factory=dict)
    refused: bool = False


def asked_device(job: Job) -> str:
    """Return where a job asks to compute: on the CPU where its backend knows nothing else."""
    knows = declared_capabilities(find("backend", job.backend)).devices
    return job.device if "gpu" in knows else "cpu"


def gpus_of(host: Mapping[str, Any]) -> Sequence[VisibleGpu] | None:
    """Read from a node's description which GPUs its processes may use; None where that is not known."""
    listed = host.get("visible_gpus")
    return None if listed is None else [VisibleGpu(**one) for one in listed]


def plan_gpus(device: str, nodes: Sequence[NodeGpus]) -> GpuPlan:
    """Hand out GPUs to the workers of `nodes`, node by node; no two workers of a machine get the same one.

    `device` is what was asked for. ``gpu`` is refused where a node has fewer GPUs than workers. ``auto`` takes GPUs where every worker gets
    one, the CPU where that is so nowhere, and is refused where it is so on some nodes alone; nodes that see the same GPUs count as one.
    """
    if device == "cpu":
        return _on_cpus(nodes)
    handed = list(_handed_out(nodes))
    short = {
        number: _found(node, free)
        for number, (node, (mine, free)) in enumerate(zip(nodes, handed, strict=True))
        if node.visible is not None and len(mine) < node.workers
    }
    everywhere = {_identities(node) for node in nodes if node.visible is not None}
    if short and (device == "gpu" or {_identities(nodes[number]) for number in short} != everywhere):
        return GpuPlan((), short, refused=True)
    if short:
        return _on_cpus(nodes, short)
    return GpuPlan(tuple(None if node.visible is None else mine for node, (mine, _) in zip(nodes, handed, strict=True)))


def _on_cpus(nodes: Sequence[NodeGpus], short: Mapping[int, str] | None = None) -> GpuPlan:
    return GpuPlan(tuple(() if node.visible else None for node in nodes), short or {})


def _handed_out(nodes: Sequence[NodeGpus]) -> Iterator[tuple[Sequence[VisibleGpu], int]]:
    """Yield of each node the GPUs of its workers, and how many of those that it may use no earlier node has taken."""
    taken: set[tuple[str, str]] = set()
    for node in nodes:
        free = [gpu for gpu in node.visible or () if _identity(node, gpu) not in taken]
        mine = free[: node.workers]
        taken |= {_identity(node, gpu) for gpu in mine}
        yield mine, len(free)


def _identity(node: NodeGpus, gpu: VisibleGpu) -> tuple[str, str]:
    """Return what tells a GPU from all others of the run."""
    return node.machine, gpu.uuid or gpu.visible_as


def _identities(node: NodeGpus) -> tuple[str, frozenset[tuple[str, str]]]:
    return node.machine, frozenset(_identity(node, gpu) for gpu in node.visible or ())


def _found(node: NodeGpus, free: int) -> str:
    there = len(node.visible or ())
    text = f"{counted(node.workers, 'worker')}, {counted(free, 'GPU')}"
    return text if free == there else f"{text} ({there} on this machine, which other nodes of the run have too)"


def counted(count: int, what: str) -> str:
    """Return ``no GPU``, ``1 GPU``, ``2 GPUs`` and the like."""
    return f"{count or 'no'} {what}{'s' if count > 1 else ''}"
