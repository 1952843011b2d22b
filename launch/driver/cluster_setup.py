"""From nodes that have answered to a cluster: who listens where, with how many threads, and whose interfaces are whose."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...core.cluster import Cluster, Task, TaskSpec
from ...core.errors import UsageError
from ...core.job import Job
from ...models.base import ModelSpec
from ..launchers.base import NodeChannel
from ..node.identity import node_identity

__all__ = [
    "cluster_document",
    "infer_isolation",
    "machine_of",
    "make_cluster",
    "make_tasks",
    "node_beside_driver",
    "nodes_sharing_cores",
    "refuse_empty_servers",
    "threads_per_task",
]

Hosts = Sequence[Mapping[str, Any]]


def infer_isolation(channels: Sequence[NodeChannel], hosts: Hosts) -> None:
    """Decide for nodes started elsewhere whether their interfaces are theirs alone: not on loopback, and no other node beside them."""
    networks = [tuple(sorted(host["identity"].items())) for host in hosts]
    found = Counter(networks)
    for channel, network in zip(channels, networks, strict=True):
        if channel.isolated is None:
            channel.isolated = found[network] == 1 and not channel.address.startswith("127.")


LEAST_FLOPS_TO_SHARE = 50e6
"""Below this a step stays on one thread. Measured on two cores with torch: at 24 million operations a step two threads were slower than
one even on an idle machine, and tens of times slower beside another process, because the threads spin for each other; at 190 million
they were faster in both cases."""


def threads_per_task(job: Job, spec: ModelSpec, channels: Sequence[NodeChannel], hosts: Hosts, placed: Sequence[TaskSpec]) -> list[int]:
    """Return each node's threads per task: cores ÷ all tasks that share them, at least 1; one for tiny steps; or what the job says.

    Nodes on one machine share its cores, unless they are limited. The same number holds for every backend.
    """
    if job.threads is not None:
        return [job.threads] * len(channels)
    if spec.training_flops * job.per_worker_batch < LEAST_FLOPS_TO_SHARE:
        return [1] * len(channels)
    tasks = Counter(task.node for task in placed)
    sharing = _sharing(channels, hosts)
    return [_threads(own, sharing[own.node], hosts, tasks) for own in channels]


def machine_of(host: Mapping[str, Any]) -> str:
    """Return what tells a node's machine from others: nodes of one machine have the same."""
    return str(host["identity"]["boot"])


def node_beside_driver(places: Sequence[int], hosts: Hosts) -> int | None:
    """Return the first of these nodes that is on the driver's machine; None where none is."""
    own = node_identity()["boot"]
    return next((node for node in places if machine_of(hosts[node]) == own), None)


def nodes_sharing_cores(channels: Sequence[NodeChannel], hosts: Hosts) -> int:
    """Return the size of the largest group of nodes that compute on the same cores, fighting for them; 1 where none share."""
    return max(map(len, _sharing(channels, hosts).values()))


def _sharing(channels: Sequence[NodeChannel], hosts: Hosts) -> dict[int, set[int]]:
    """Return for each node those, with itself, that compute on the same cores: those of one machine that are not limited."""
    on_machine: dict[str, set[int]] = {}
    for channel in channels:
        if channel.cores is None:
            on_machine.setdefault(machine_of(hosts[channel.node]), set()).add(channel.node)
    return {own.node: {own.node} if own.cores is not None else on_machine[machine_of(hosts[own.node])] for own in channels}


def _threads(own: NodeChannel, sharing: Collection[int], hosts: Hosts, tasks: Mapping[int, int]) -> int:
    """Return a node's threads per task; `tasks` says how many each node has, and `sharing` which nodes have the same cores."""
    cores = own.cores or hosts[own.node]["cores_available"] or os.cpu_count() or 1
    return max(1, int(cores // max(1, sum(tasks.get(node, 0) for node in sharing))))


def make_cluster(placed: Sequence[TaskSpec], channels: Sequence[NodeChannel], reserved: Mapping[int, Sequence[int]]) -> Cluster:
    """Give every task an address: a port that its node has reserved, or the one that a contract assigns to it; and a new secret.

    `channels` are those of all nodes, in node order, also of such that have no task.
    """
    ports: dict[str, int] = {}
    names: dict[int, list[str]] = {channel.node: [] for channel in channels}
    for task in placed:
        names[task.node].append(task.name)
    for channel in channels:
        own = names[channel.node]
        ports |= dict(zip(own, reserved.get(channel.node, ()), strict=True))
        ports |= {name: port for name, port in channel.ports.items() if name in own}
    return Cluster(tuple(placed), tuple(channel.address for channel in channels), ports, secrets.token_hex(32))


def make_tasks(cluster: Cluster, threads: Sequence[int]) -> list[Task]:
    """Return every task as it will see itself."""
    tasks = []
    seen: dict[tuple[str, int], int] = {}
    for placed in cluster.tasks:
        local = seen.get((placed.role, placed.node), 0)
        seen[placed.role, placed.node] = local + 1
        tasks.append(Task(placed, cluster, threads[placed.node], local))
    return tasks


def cluster_document(cluster: Cluster, threads: Sequence[int | None]) -> dict[str, Any]:
    """The cluster as ``job.json`` has it; the secret stays out of files. `threads` are each node's, None of one that is not used."""
    public = {key: value for key, value in cluster.to_json().items() if key != "secret"}
    return {"cluster": public, "threads_per_task": list(threads)}


def refuse_empty_servers(job: Job, spec: ModelSpec) -> None:
    """Raise UsageError where some parameter servers would hold nothing: backends share a model's numbers out evenly, and cut arrays."""
    numbers = spec.size + spec.buffers_size
    if job.mode == "async" and job.ps > numbers:
        held = f"{numbers:,} number{'' if numbers == 1 else 's'}"
        raise UsageError.of(
            "ps", job.ps, f"at most {numbers:,}, as the model {job.model!r} has {held} in all, and a server needs one to hold"
        )
