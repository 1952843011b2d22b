"""Processes started by torchrun, or by something else that sets the variables that torch reads (RANK, WORLD_SIZE, MASTER_ADDR, …)."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import UsageError
from ...core.worker_layout import ProcsPerNode, nodes_of_workers, workers_by_node
from .base import Membership, Options, ports_above

__all__ = ["torchrun", "world_size"]

_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = (*_WORLD, *_LOCAL)


def torchrun(environment: Mapping[str, str], options: Options) -> Membership | None:
    """Return the place that torchrun gave; None where not all of its variables are there."""
    world = _given(environment)
    if len(world) < len(_TORCHRUN):
        return None
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
    return Membership("torchrun", rank // local_size, local_rank, (world["MASTER_ADDR"], ports_above(_port(world))), shape, size - nodes)


def world_size(environment: Mapping[str, str], options: Options) -> Membership | None:
    """Place a process that knows its number among all, but not which of its node it is; one that is told to be the only one is alone."""
    world, procs_per_node = _given(environment), options.procs_per_node
    if not world:
        return None
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
    nodes, places = _layout(procs_per_node, size)
    shape: dict[str, int | tuple[int, ...]] = {"nodes": nodes, "procs_per_node": procs_per_node}
    node = places[rank]
    return Membership("WORLD_SIZE", node, rank - places.index(node), (world["MASTER_ADDR"], (port,)), shape, size - nodes)


def _layout(procs_per_node: ProcsPerNode, size: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of nodes, and the node of each of the `size` processes."""
    if isinstance(procs_per_node, tuple):
        if sum(procs_per_node) != size:
            given = ",".join(map(str, procs_per_node))
            raise UsageError(f"--procs-per-node: got {given}, {sum(procs_per_node)} in all, but WORLD_SIZE is {size}; make them agree")
        return len(procs_per_node), nodes_of_workers(procs_per_node)
    if size % procs_per_node:
        raise UsageError(
            f"--procs-per-node: got {procs_per_node}, but WORLD_SIZE is {size}; every node needs the same number of processes, "
            f"so that it divides {size}, or one number is given for each node, such as 1,{size - 1}"
        )
    return size // procs_per_node, nodes_of_workers(workers_by_node(procs_per_node, size // procs_per_node))


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


def _given(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name].strip() for name in _TORCHRUN if environment.get(name, "").strip()}
