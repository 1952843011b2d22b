"""Where does this process stand, when something else than `trainer` started the processes? Reads the contracts of others.

- torchrun: ``RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT``
- what others set for torch: ``RANK WORLD_SIZE MASTER_ADDR MASTER_PORT``, a process a node unless the job has several on each
- TensorFlow: ``TF_CONFIG``, a JSON object with ``cluster`` (role → list of host:port) and ``task`` (type, index)
- our own: ``--node-rank i --rendezvous HOST:PORT`` on each of ``--nodes`` nodes

The first process of a node acts as its agent and starts all of the node's tasks, the first of all is the driver as well; the others
stand by, so that whoever started them sees the run's end and its exit code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...core.errors import UsageError

__all__ = ["Membership", "detect"]

CONTROL_PORTS = 8
"""How many ports above the contract's own are tried for the control channel, where the contract names none for it."""

_ROLES = ("chief", "worker", "ps")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = (*_WORLD, *_LOCAL)


@dataclass(frozen=True, slots=True)
class Membership:
    """One process among those that were started elsewhere.

    `rendezvous` is the driver's host with the ports on which it may be found, in the order to try. `shape` are the job's fields that
    the contract decides. `standbys` counts the processes of all nodes that are no agents. `addresses` has the nodes' addresses where
    the contract names them, else it is empty. `ports` are those that the contract assigns to tasks, by task name.
    """

    contract: str
    node: int
    local_rank: int
    rendezvous: tuple[str, tuple[int, ...]]
    shape: Mapping[str, int]
    standbys: int = 0
    addresses: tuple[str, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_driver(self) -> bool:
        """Whether this process is the driver and node 0's agent."""
        return self.node == 0 and self.local_rank == 0


def detect(
    environment: Mapping[str, str], rendezvous: str | None, node_rank: int | None, nodes: int | None, procs_per_node: int = 1
) -> Membership | None:
    """Return this process's place, or None where it was started by a person alone, on one machine.

    `nodes` is None where only the driver knows how many there are; `procs_per_node` says on how many nodes WORLD_SIZE processes are. Raises
    UsageError for half a contract or one that does not make sense.
    """
    if rendezvous is not None or node_rank is not None:
        return _own(rendezvous, node_rank, nodes)
    world = {name: environment[name].strip() for name in _TORCHRUN if environment.get(name, "").strip()}
    if len(world) == len(_TORCHRUN):
        return _torchrun(world)
    if environment.get("TF_CONFIG", "").strip():
        return _tf_config(environment["TF_CONFIG"])
    return _world(world, procs_per_node) if world else None


def _own(rendezvous: str | None, node_rank: int | None, nodes: int | None) -> Membership:
    if rendezvous is None or node_rank is None:
        raise UsageError("--node-rank and --rendezvous belong together: give both on every node, the same HOST:PORT everywhere")
    if node_rank < 0 or (nodes is not None and node_rank >= nodes):
        raise UsageError.of("--node-rank", node_rank, "0 and more" if nodes is None else f"0 to {nodes - 1} (--nodes {nodes})")
    shape = {} if nodes is None else {"nodes": nodes}
    return Membership("--rendezvous", node_rank, 0, _host_and_port("--rendezvous", rendezvous), shape)


def _torchrun(world: Mapping[str, str]) -> Membership:
    rank, size = _rank_and_size(world)
    local_rank, local_size = _number(world, "LOCAL_RANK"), _number(world, "LOCAL_WORLD_SIZE")
    if local_size < 1 or size % local_size:
        raise UsageError(f"WORLD_SIZE {size} and LOCAL_WORLD_SIZE {local_size} do not fit; every node needs the same number of processes")
    if rank % local_size != local_rank:
        raise UsageError(
            f"RANK {rank}, LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {local_size} do not fit; "
            f"node by node, process {rank} of {size} is number {rank % local_size} of its node"
        )
    nodes = size // local_size
    shape = {"nodes": nodes, "procs_per_node": local_size}
    return Membership("torchrun", rank // local_size, local_rank, (world["MASTER_ADDR"], _ports_above(_port(world))), shape, size - nodes)


def _world(world: Mapping[str, str], procs_per_node: int) -> Membership | None:
    """Place a process that knows its number among all, but not which of its node it is; one that is told to be the only one is alone."""
    wanted = _TORCHRUN if any(name in world for name in _LOCAL) else _WORLD
    missing = [name for name in wanted if name not in world]
    if missing:
        raise UsageError(
            f"the environment has {' '.join(world)}, as if something had started this process among others, but not {' '.join(missing)}; "
            "set what is missing, unset what is there, or say --launcher local to train here alone"
        )
    rank, size = _rank_and_size(world)
    port = _port(world)
    if size == 1:
        return None
    if size % procs_per_node:
        raise UsageError(
            f"--procs-per-node: got {procs_per_node}, but WORLD_SIZE is {size}; every node needs the same number of processes, "
            f"so that it divides {size}"
        )
    nodes = size // procs_per_node
    shape = {"nodes": nodes, "procs_per_node": procs_per_node}
    return Membership("WORLD_SIZE", rank // procs_per_node, rank % procs_per_node, (world["MASTER_ADDR"], (port,)), shape, size - nodes)


def _rank_and_size(world: Mapping[str, str]) -> tuple[int, int]:
    rank, size = _number(world, "RANK"), _number(world, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"RANK {rank} and WORLD_SIZE {size} do not fit; ranks run from 0 to WORLD_SIZE - 1")
    return rank, size


def _port(world: Mapping[str, str]) -> int:
    port = _number(world, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UsageError.of("MASTER_PORT", port, "a port from 1 to 65535")
    return port


def _number(world: Mapping[str, str], name: str) -> int:
    try:
        return int(world[name])
    except ValueError as error:
        raise UsageError.of(name, world[name], "a whole number") from error


def _tf_config(text: str) -> Membership:
    try:
        config = json.loads(text)
        cluster: dict[str, list[str]] = {role: list(addresses) for role, addresses in config["cluster"].items()}
        own_role, own_index = str(config["task"]["type"]), int(config["task"]["index"])
        everyone = [(role, index, *_endpoint(address)) for role in _ROLES for index, address in enumerate(cluster.get(role, []))]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"TF_CONFIG: got {text[:120]!r} ({type(error).__name__}: {error}); needs cluster (role: [host:port, …]) and task (type, index)"
        ) from error
    unknown = sorted(set(cluster) - set(_ROLES))
    if unknown:
        raise UsageError.of("TF_CONFIG", ", ".join(unknown), f"the roles {', '.join(_ROLES)}", _ROLES)
    own = next((entry for entry in everyone if entry[:2] == (own_role, own_index)), None)
    if own is None:
        there = ", ".join(f"{role} {_span(len(cluster[role]))}" for role in _ROLES if cluster.get(role)) or "no task at all"
        raise UsageError(f"TF_CONFIG: this process is to be {own_role} {own_index}, but the cluster has {there}; mend task or cluster")
    hosts = list(dict.fromkeys(host for _, _, host, _ in everyone))
    ranks = [entry for entry in everyone if entry[0] == "worker" or (entry[0] == "chief" and "ps" not in cluster)]
    per_host = {host: [entry for entry in ranks if entry[2] == host] for host in hosts}
    counts = {len(entries) for entries in per_host.values()}
    if len(counts) != 1 or 0 in counts:
        found = ", ".join(f"{host}: {len(entries)}" for host, entries in per_host.items())
        raise UsageError(f"TF_CONFIG: every host needs the same number of workers (found {found})")
    ordered = [entry for host in hosts for entry in per_host[host]]
    ports = {f"worker-{number}": port for number, (_, _, _, port) in enumerate(ordered)}
    ports |= {f"{role}-{index}": port for role, index, _, port in everyone if role == "ps" or (role == "chief" and "ps" in cluster)}
    node = hosts.index(own[2])
    here = [entry for entry in everyone if entry[2] == own[2]]
    used = {port for _, _, _, port in everyone}
    control = max(port for _, _, host, port in everyone if host == hosts[0])
    shape = {"nodes": len(hosts), "procs_per_node": counts.pop()}
    if "ps" in cluster:
        shape["ps"] = len(cluster["ps"])
    return Membership(
        "TF_CONFIG", node, here.index(own), (hosts[0], _ports_above(control, used)), shape, len(everyone) - len(hosts), tuple(hosts), ports
    )


def _span(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} has no port from 1 to 65535")
    return host, int(port)


def _host_and_port(key: str, text: str) -> tuple[str, tuple[int, ...]]:
    try:
        host, port = _endpoint(text)
    except ValueError as error:
        raise UsageError.of(key, text, "HOST:PORT, such as 10.0.0.1:29400, with a port from 1 to 65535") from error
    return host, (port,)


def _ports_above(port: int, used: Collection[int] = ()) -> tuple[int, ...]:
    """Return ports for the control channel; none of those that tasks will listen on, which may be on every address of the machine."""
    return tuple(candidate for candidate in range(port + 1, port + 1 + CONTROL_PORTS + len(used)) if candidate not in used)[:CONTROL_PORTS]
