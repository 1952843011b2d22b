"""Gives each worker of an attempt a GPU of its own, and keeps the other tasks off them, once the nodes have said what they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...core.cluster import TaskSpec
from ...core.errors import UsageError
from ...monitor.visible_gpus import VisibleGpu
from ..node.task_environment import NO_GPU
from ..preflight.gpu_demand import MIXED, REMEDY, GpuPlan, NodeGpus, counted, gpus_of, plan_gpus
from .cluster_setup import Hosts, machine_of

__all__ = ["HIDDEN", "GpuAssignment", "assign_gpus", "check_devices"]

HIDDEN = VisibleGpu(NO_GPU, None, None)
"""For a task that computes on no GPU, so that it holds no memory there."""


@dataclass(frozen=True)
class GpuAssignment:
    """What each task may use, by its name; tasks that nothing is done about are not in it. `notice`: a sentence for people, if any."""

    of_task: Mapping[str, VisibleGpu]
    notice: str | None = None

    @property
    def document(self) -> dict[str, Any]:
        """What ``job.json`` says of it: nothing where no task has a GPU."""
        if all(gpu == HIDDEN for gpu in self.of_task.values()):
            return {}
        return {"gpu_of_task": {name: None if gpu == HIDDEN else asdict(gpu) for name, gpu in self.of_task.items()}}

    @property
    def workers(self) -> int:
        """How many tasks have a GPU."""
        return sum(gpu != HIDDEN for gpu in self.of_task.values())

    def on_node(self, node: int, placed: Sequence[TaskSpec]) -> dict[str, dict[str, Any]]:
        """Return the same for the tasks of a node, as its agent is told."""
        return {task.name: asdict(self.of_task[task.name]) for task in placed if task.node == node and task.name in self.of_task}


def assign_gpus(
    device: str, placed: Sequence[TaskSpec], places: Sequence[int], hosts: Hosts, name: Callable[[int], str], *, strict: bool = True
) -> GpuAssignment:
    """Give every worker the GPU that the plan has for it. `device` is what was asked for, `name` names a node.

    Raises UsageError, which lists the nodes, where the run cannot be so. Not `strict`: the framework of the one task is left to say it.
    """
    workers = {place: [task for task in placed if task.role == "worker" and task.node == place] for place in places}
    asked = [NodeGpus(machine_of(hosts[place]), len(workers[place]), gpus_of(hosts[place])) for place in places]
    plan = plan_gpus(device, asked)
    if plan.refused:
        if not strict:
            return GpuAssignment({})
        raise UsageError(_refusal(device, plan, places, name))
    of_task: dict[str, VisibleGpu] = {}
    for place, gpus in zip(places, plan.by_node, strict=True):
        if gpus is not None:
            of_task |= {task.name: HIDDEN for task in placed if task.node == place}
            of_task |= {task.name: gpu for task, gpu in zip(workers[place], gpus, strict=False)}
    return GpuAssignment(of_task, _notice(plan, asked, places, name))


def _refusal(device: str, plan: GpuPlan, places: Sequence[int], name: Callable[[int], str]) -> str:
    listed = "\n".join(f"  {name(places[number])}: {found}" for number, found in plan.short.items())
    if device == "auto":
        return f"device: got 'auto', and these nodes have no GPU for each of their workers; {MIXED}:\n{listed}\n  → {REMEDY}"
    return f"device: got 'gpu', which takes a GPU for each worker, and these nodes have fewer:\n{listed}\n  → {REMEDY}"


def _notice(plan: GpuPlan, asked: Sequence[NodeGpus], places: Sequence[int], name: Callable[[int], str]) -> str | None:
    """Say that GPUs are there and not used, where nobody has asked for that."""
    if not plan.short or not any(node.visible for node in asked):
        return None
    listed = "; ".join(f"{name(places[number])}: {found}" for number, found in plan.short.items())
    return f"computing on CPUs, as there is no GPU for each worker ({listed})"


def check_devices(devices: Mapping[str, str | None], assigned: GpuAssignment, advice: str) -> tuple[str | None, str | None]:
    """Return what kind of device the workers say they compute on, None where none of them says it, and a sentence for people, if any.

    It is for those that have GPUs which their framework does not find; `advice` is the backend's for that. Raises UsageError where some
    compute on another kind of device than others, as ``--device auto`` may end.
    """
    used = {name: device for name, device in devices.items() if device is not None}
    if len(set(used.values())) > 1:
        listed = ", ".join(f"{name} {device}" for name, device in used.items())
        raise UsageError(
            f"device: got 'auto', and workers have come to different devices ({listed}), which cannot be compared with anything. "
            f"Take --device cpu, or see on each node why the framework finds no GPU there: trainer doctor"
        )
    device = next(iter(used.values()), None)
    if not assigned.workers or device != "cpu":
        return device, None
    hint = f": {advice}" if advice else ""
    there = counted(assigned.workers, "GPU")
    return device, f"computing on CPUs although each worker has a GPU ({there}): the framework finds none{hint}"
