"""Who takes part in a run: nodes, tasks and their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Cluster", "Role", "Task", "TaskSpec", "split_evenly"]

Role = Literal["chief", "worker", "ps"]


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task before it has an address: which role, the index within the role, and the node (from 0) it runs on.

    `leading` tasks receive the training loop's commands: every rank in sync mode, the chief alone in async mode.
    """

    role: Role
    index: int
    node: int
    leading: bool

    @property
    def name(self) -> str:
        """``worker-0``, ``ps-1``, ``chief-0``: unique in a run; used for log files and in messages."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Every task of a run with its address; the same value in every task.

    `addresses` has one host address a node; `ports` one reserved port a task, by task name.
    `secret` is the run's own key for handshakes between tasks (hex, 32 bytes).
    """

    tasks: tuple[TaskSpec, ...]
    addresses: tuple[str, ...]
    ports: Mapping[str, int]
    secret: str

    def of_role(self, role: Role) -> tuple[TaskSpec, ...]:
        """Return the tasks of one role in index order."""
        return tuple(sorted((task for task in self.tasks if task.role == role), key=lambda task: task.index))

    def endpoint(self, placed: TaskSpec) -> tuple[str, int]:
        """Return (host, port) on which this task may listen."""
        return self.addresses[placed.node], self.ports[placed.name]

    @property
    def workers(self) -> int:
        """Number of tasks that compute gradients (in sync mode: the world size)."""
        return len(self.of_role("worker"))

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
    """One process of the cluster, as it sees itself. `threads` is the number of compute threads it may use.

    `local_index` counts the tasks of the same role on the node (torch calls it the local rank); it picks a GPU.
    """

    placed: TaskSpec
    cluster: Cluster
    threads: int
    local_index: int = 0

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
    """Cut range(total) into `count` consecutive (start, stop) ranges whose sizes differ by at most one, larger ones first.

    Ranges may be empty where count > total.
    """
    base, extra = divmod(total, count)
    bounds: list[tuple[int, int]] = []
    start = 0
    for number in range(count):
        stop = start + base + (1 if number < extra else 0)
        bounds.append((start, stop))
        start = stop
    return bounds
