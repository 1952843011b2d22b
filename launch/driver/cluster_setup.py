"""Addresses, threads, GPUs, shared cores and interfaces of the cluster's nodes."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...core.cluster import Cluster, Task, TaskSpec
from ...core.errors import UsageError
from ...core.job import Job
from ...models.base import ModelSpec
from ...monitor.gpu import VisibleGpu
from ..launchers.base import NodeChannel
from ..node.scratch import NO_GPU, node_identity
from ..preflight.findings import MIXED, REMEDY, GpuPlan, NodeGpus, counted, plan_gpus, visible_gpus_in

Hosts = Sequence[Mapping[str, Any]]


def infer_isolation(channels: Sequence[NodeChannel], hosts: Hosts) -> None:
    """Set whether nodes started elsewhere alone use their non-loopback interfaces."""
    networks = [tuple(sorted(host["identity"].items())) for host in hosts]
    nodes_in = Counter(networks)
    for channel, network in zip(channels, networks, strict=True):
        if channel.isolated is None:
            channel.isolated = nodes_in[network] == 1 and not channel.address.startswith("127.")


# Below this one thread: with torch, two spinning threads were slower at 24 million (tens of times under load), faster at 190 million.
MIN_FLOPS_TO_SHARE = 50e6


def threads_per_task(job: Job, spec: ModelSpec, channels: Sequence[NodeChannel], hosts: Hosts, placed: Sequence[TaskSpec]) -> list[int]:
    """Return each node's threads per task, independent of the backend.

    These are the job's, one for tiny steps, or the cores divided by the tasks that share them.
    """
    if job.threads is not None:
        return [job.threads] * len(channels)
    if spec.training_flops * job.per_worker_batch < MIN_FLOPS_TO_SHARE:
        return [1] * len(channels)
    tasks_on = Counter(task.node for task in placed)
    threads = []
    for channel, sharing in zip(channels, _sharing(channels, hosts), strict=True):
        cores = channel.cores or hosts[channel.node]["cores_available"] or os.cpu_count() or 1
        threads.append(max(1, int(cores // max(1, sum(tasks_on[node] for node in sharing)))))
    return threads


def machine_id(host: Mapping[str, Any]) -> str:
    """Return an identifier of a node's machine."""
    return str(host["identity"]["boot"])


def driver_node(places: Sequence[int], hosts: Hosts) -> int | None:
    """Return the first of these nodes on the driver's machine, if any."""
    machine = node_identity()["boot"]
    return next((node for node in places if machine_id(hosts[node]) == machine), None)


def nodes_sharing_cores(channels: Sequence[NodeChannel], hosts: Hosts) -> int:
    """Return the size of the largest group of nodes that share cores; 1 if none do."""
    return max(map(len, _sharing(channels, hosts)))


def _sharing(channels: Sequence[NodeChannel], hosts: Hosts) -> list[set[int]]:
    on_machine: dict[str, set[int]] = {}
    for channel in channels:
        if channel.cores is None:
            on_machine.setdefault(machine_id(hosts[channel.node]), set()).add(channel.node)
    return [{channel.node} if channel.cores is not None else on_machine[machine_id(hosts[channel.node])] for channel in channels]


def make_cluster(placed: Sequence[TaskSpec], channels: Sequence[NodeChannel], reserved: Mapping[int, Sequence[int]]) -> Cluster:
    """Return a cluster with reserved or assigned ports and a new secret; `channels` are all."""
    ports: dict[str, int] = {}
    names: dict[int, list[str]] = {channel.node: [] for channel in channels}
    for task in placed:
        names[task.node].append(task.name)
    for channel in channels:
        on_node = names[channel.node]
        ports |= dict(zip(on_node, reserved.get(channel.node, ()), strict=True))
        ports |= {name: port for name, port in channel.ports.items() if name in on_node}
    return Cluster(tuple(placed), tuple(channel.address for channel in channels), ports, secrets.token_hex(32))


def make_tasks(cluster: Cluster, threads: Sequence[int]) -> list[Task]:
    """Return the tasks, numbered among those of their role on their node."""
    tasks = []
    counts: Counter[tuple[str, int]] = Counter()
    for placed in cluster.tasks:
        tasks.append(Task(placed, cluster, threads[placed.node], counts[placed.role, placed.node]))
        counts[placed.role, placed.node] += 1
    return tasks


def cluster_document(cluster: Cluster, threads: Sequence[int | None]) -> dict[str, Any]:
    """Return the cluster for ``job.json``, without the secret; None threads: unused node."""
    public = {key: value for key, value in cluster.to_json().items() if key != "secret"}
    return {"cluster": public, "threads_per_task": list(threads)}


def refuse_empty_servers(job: Job, spec: ModelSpec) -> None:
    """Raise UsageError if a parameter server would hold nothing; servers share a model evenly."""
    numbers = spec.size + spec.buffers_size
    if job.mode == "async" and job.ps > numbers:
        held = f"{numbers:,} number{'' if numbers == 1 else 's'}"
        raise UsageError.of(
            "ps", job.ps, f"at most {numbers:,}, as the model {job.model!r} has {held} in all, and a server needs one to hold"
        )


HIDDEN = VisibleGpu(NO_GPU, None, None)  # for a task without a GPU, so that it allocates no memory there


@dataclass(frozen=True)
class GpuAssignment:
    """The GPUs of tasks by name, and a message for the user."""

    of_task: Mapping[str, VisibleGpu]
    notice: str | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The part of ``job.json``; empty if no task has a GPU."""
        if all(gpu == HIDDEN for gpu in self.of_task.values()):
            return {}
        return {"gpu_of_task": {name: None if gpu == HIDDEN else asdict(gpu) for name, gpu in self.of_task.items()}}

    @property
    def workers(self) -> int:
        """The number of tasks with a GPU."""
        return sum(gpu != HIDDEN for gpu in self.of_task.values())

    def on_node(self, node: int, placed: Sequence[TaskSpec]) -> dict[str, VisibleGpu]:
        """Return the GPUs of a node's tasks, for its agent."""
        return {task.name: self.of_task[task.name] for task in placed if task.node == node and task.name in self.of_task}


def assign_gpus(
    device: str, placed: Sequence[TaskSpec], places: Sequence[int], hosts: Hosts, name: Callable[[int], str], *, strict: bool = True
) -> GpuAssignment:
    """Assign a GPU to every worker. Raises UsageError, which lists the nodes by `name`."""
    workers = {place: [task for task in placed if task.role == "worker" and task.node == place] for place in places}
    sharing = [NodeGpus(machine_id(hosts[place]), len(workers[place]), visible_gpus_in(hosts[place])) for place in places]
    plan = plan_gpus(device, sharing)
    if plan.refused:
        if not strict:  # the framework of the one task reports it
            return GpuAssignment({})
        raise UsageError(_refusal(device, plan, places, name))
    of_task: dict[str, VisibleGpu] = {}
    for place, gpus in zip(places, plan.by_node, strict=True):
        if gpus is not None:
            of_task |= {task.name: HIDDEN for task in placed if task.node == place}
            of_task |= {task.name: gpu for task, gpu in zip(workers[place], gpus, strict=False)}
    return GpuAssignment(of_task, _notice(plan, sharing, places, name))


def _refusal(device: str, plan: GpuPlan, places: Sequence[int], name: Callable[[int], str]) -> str:
    listed = "\n".join(f"  {name(places[number])}: {shortage}" for number, shortage in plan.short.items())
    if device == "auto":
        return f"device: got 'auto', and these nodes have no GPU for each of their workers; {MIXED}:\n{listed}\n  → {REMEDY}"
    return f"device: got 'gpu', which takes a GPU for each worker, and these nodes have fewer:\n{listed}\n  → {REMEDY}"


def _notice(plan: GpuPlan, sharing: Sequence[NodeGpus], places: Sequence[int], name: Callable[[int], str]) -> str | None:
    if not plan.short or not any(node.visible for node in sharing):
        return None
    listed = "; ".join(f"{name(places[number])}: {shortage}" for number, shortage in plan.short.items())
    return f"computing on CPUs, as there is no GPU for each worker ({listed})"


def check_devices(devices: Mapping[str, str | None], assigned: GpuAssignment, advice: str) -> tuple[str | None, str | None]:
    """Return the workers' kind of device, and a message with `advice` if they find no GPU.

    Raises UsageError if the kinds differ, which ``--device auto`` may cause.
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
    gpus = counted(assigned.workers, "GPU")
    return device, f"computing on CPUs although each worker has a GPU ({gpus}): the framework finds none{hint}"
