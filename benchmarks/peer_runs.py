"""One run of a peer: its processes on one or three nodes, as its framework documents."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from .contestants import PEERS, Peer
from .figures import Measured
from .nodes import Nodes, nodes
from .processes import Group, MeasurementError, environment
from .workload import Work


@dataclass(frozen=True)
class Place:
    """A process to start: name, node, command before the script, and variables.

    The first one of a run reports.
    """

    name: str
    node: int
    before: tuple[str, ...]
    variables: dict[str, str]


def run_peer(peer: Peer, work: Work, steps: int, threads: int, network: str, folder: Path, timeout_seconds: float) -> Measured:
    """Run a peer and return what it reports. Raises MeasurementError where it fails."""
    arguments = {
        "--steps": steps,
        "--warmup": work.warmup,
        **work.arguments(),
        "--threads": threads,
        "--variant": peer.variant,
        "--parent": os.getpid(),
    }
    script = [str(peer.path), *(str(word) for pair in arguments.items() for word in pair)]
    with nodes(peer.workers, network) as made, Group(folder) as group:
        processes = places(peer, made)
        for place in processes:
            shared = {"BENCHMARK_FOLDER": str(folder), "TMPDIR": str(folder), "PYTHONPATH": _with_shared_modules()}
            variables = environment({**place.variables, **shared}, gpu=peer.gpu)
            group.start(place.name, [*place.before, *script], variables, made.start(place.node))
        output = group.wait_for(processes[0].name, timeout_seconds)
        group.wait_for_rest([place.name for place in processes[1:]] if not _stays(peer) else [])
        measured = _read(output, peer, work)
        return replace(
            measured, peak_memory_bytes=group.peak_bytes(processes[0].name), tree_memory_bytes=group.tree_bytes(processes[0].name)
        )


def _with_shared_modules() -> str:
    """Return PYTHONPATH with the folder of what all peers import."""
    return os.pathsep.join(filter(None, (str(PEERS), os.environ.get("PYTHONPATH"))))


def _stays(peer: Peer) -> bool:
    """Whether the other processes are servers that do not end by themselves."""
    return peer.start == "tf_config" and bool(peer.servers)


def _read(output: str, peer: Peer, work: Work) -> Measured:
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if len(lines) != 1:
        raise MeasurementError(f"{peer.script} printed {len(lines)} results")
    report = json.loads(lines[0].removeprefix("RESULT "))
    rate = report["steps"] / report["seconds"]
    return Measured(
        steps_per_second=rate,
        examples_per_second=None if work.batch_size is None else rate * work.batch_size * (1 if peer.servers else peer.workers),
        first_step_seconds=report["first_step_seconds"],
        monitor_cores=None,
        threads=report["threads"],
        warmup=report["warmup"],
        steps=report["steps"],
        losses=tuple(report["losses"]),
        mean_loss=report["mean_loss"],
        mean_over=report["mean_over"],
        target_tokens_per_second=report["target_tokens"] / report["seconds"] if "target_tokens" in report else None,
    )


def places(peer: Peer, nodes: Nodes) -> list[Place]:
    """Return the processes of a run; worker i is on node i, and servers are on node 0."""
    if peer.start == "alone":
        return [Place("peer", 0, (sys.executable,), {})]
    if peer.start == "tf_config":
        return _tf_config(peer, nodes)
    variables = {"GLOO_SOCKET_IFNAME": nodes.interface}
    if peer.start == "torchrun":
        return [_torchrun(node, nodes, variables) for node in range(peer.workers)]
    owners = [0] * len(peer.servers) + list(range(peer.workers))
    world = {"WORLD_SIZE": str(len(owners)), "MASTER_ADDR": nodes.addresses[0], "MASTER_PORT": str(nodes.ports[0])}
    return [
        Place(f"rank-{rank}", node, (sys.executable,), {**variables, **world, "RANK": str(rank), "LOCAL_RANK": "0"})
        for rank, node in enumerate(owners)
    ]


def _torchrun(node: int, nodes: Nodes, variables: dict[str, str]) -> Place:
    options: dict[str, object] = {"--nnodes": len(nodes.addresses), "--node-rank": node, "--nproc-per-node": 1}
    options |= {"--master-addr": nodes.addresses[0], "--master-port": nodes.ports[0]}
    command = [str(Path(sys.executable).with_name("torchrun")), *(str(word) for pair in options.items() for word in pair)]
    return Place(f"node-{node}", node, tuple(command), variables)


def _tf_config(peer: Peer, nodes: Nodes) -> list[Place]:
    tasks = [(role, 0, 0) for role in peer.servers] + [("worker", index, index) for index in range(peer.workers)]
    cluster: dict[str, list[str]] = {}
    for position, (role, _, node) in enumerate(tasks):
        cluster.setdefault(role, []).append(f"{nodes.addresses[node]}:{nodes.ports[position]}")
    return [
        Place(
            f"{role}-{index}",
            node,
            (sys.executable,),
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})},
        )
        for role, index, node in tasks
    ]
