"""Nodes, tasks and their addresses; numbers of workers per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

Role = Literal["chief", "worker", "ps"]


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task without its address."""

    role: Role
    index: int  # within the role
    node: int  # from 0
    leading: bool  # receives the training loop's commands: each rank in sync mode, the chief in async mode

    @property
    def name(self) -> str:
        """``worker-0``, ``ps-1``, ``chief-0``: unique in a run."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """All tasks of a run with their addresses; the same value in every task."""

    tasks: tuple[TaskSpec, ...]
    addresses: tuple[str, ...]  # by node
    ports: Mapping[str, int]  # by task name
    secret: str  # 32 bytes in hex for handshakes between tasks

    def tasks_with_role(self, role: Role) -> tuple[TaskSpec, ...]:
        """Return the tasks of one role in index order."""
        return tuple(sorted((task for task in self.tasks if task.role == role), key=lambda task: task.index))

    def endpoint(self, placed: TaskSpec) -> tuple[str, int]:
        """Return (host, port) on which this task may listen."""
        return self.addresses[placed.node], self.ports[placed.name]

    @property
    def workers(self) -> int:
        """Number of tasks that compute gradients (sync mode: world size)."""
        return len(self.tasks_with_role("worker"))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready value; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cluster:
        """Read what `to_json` wrote."""
        return cls(
            tasks=tuple(TaskSpec(**task) for task in value["tasks"]),
            addresses=tuple(value["addresses"]),
            ports=dict(value["ports"]),
            secret=value["secret"],
        )


@dataclass(frozen=True, slots=True)
class Task:
    """A process of the cluster, as it sees itself."""

    placed: TaskSpec
    cluster: Cluster
    threads: int  # for computation
    local_index: int = 0  # within role and node (torch: local rank); selects a GPU

    @property
    def name(self) -> str:
        """The task's name, as in `TaskSpec.name`."""
        return self.placed.name

    @property
    def rank(self) -> int:
        """The worker's index; in sync mode its rank."""
        return self.placed.index

    @property
    def address(self) -> str:
        """The address of the task's node."""
        return self.cluster.addresses[self.placed.node]

    @property
    def port(self) -> int:
        """The port reserved for this task on its node."""
        return self.cluster.ports[self.placed.name]


def split_evenly(total: int, count: int) -> list[tuple[int, int]]:
    """Split range(total) into `count` (start, stop) ranges of near-equal size, larger first."""
    base, extra = divmod(total, count)
    return list(pairwise(number * base + min(number, extra) for number in range(count + 1)))


ProcsPerNode = int | tuple[int, ...]  # workers per node, for all or each; numbered node by node


def workers_by_node(procs_per_node: ProcsPerNode, nodes: int) -> tuple[int, ...]:
    """Return the number of workers of each node. Raises ValueError for other numbers of nodes."""
    if isinstance(procs_per_node, int):
        return (procs_per_node,) * nodes
    if len(procs_per_node) != nodes:
        numbers_text = ",".join(map(str, procs_per_node))
        numbers = "1 node" if nodes == 1 else f"each of the {nodes} nodes"
        raise ValueError(f"give one number, or one for {numbers}, not {len(procs_per_node)} ({numbers_text})")
    return tuple(procs_per_node)


def to_procs_per_node(by_node: Sequence[int]) -> ProcsPerNode:
    """Return the setting for these numbers of workers: one number if all are equal."""
    return tuple(by_node) if len(set(by_node)) > 1 else by_node[0]


def node_by_worker(by_node: Sequence[int]) -> tuple[int, ...]:
    """Return the node of each worker: ``(0, 1, 1)`` for one worker on node 0 and two on node 1."""
    return tuple(node for node, count in enumerate(by_node) for _ in range(count))


def parse_procs_per_node(value: object) -> object:
    """Split a typed setting: ``1,2`` becomes ``("1", "2")``; validation checks the rest."""
    if isinstance(value, str) and "," in value:
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, list | tuple) and len(value) == 1:
        return value[0]
    return value


def read_procs_per_node(value: int | str | Sequence[int]) -> ProcsPerNode:
    """Return the value of a valid setting in any notation: 2, [1, 2] or "1,2"."""
    if isinstance(value, int):
        return value
    numbers = tuple(int(part) for part in (value.split(",") if isinstance(value, str) else value))
    return numbers[0] if len(numbers) == 1 else numbers


MAX_RANKS = 64  # each rank has two connections to each other one, and sends small vectors to all
MAX_FURTHER_BYTES = 32 << 10  # additional bytes that save a message when a rank sends vectors whole


def sends_whole_vectors(size_bytes: float, ranks: int) -> bool:
    """Return whether ranks send whole vectors of this size instead of reduce-scatter/all-gather."""
    return (ranks - 1) * (ranks - 2) * size_bytes <= ranks * MAX_FURTHER_BYTES
