"""What each environment (torchrun, TF_CONFIG, Kubernetes, a person) says of a process that it started: node, local rank and rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ...core.errors import ResumableRunError, RunFailedError
from ...core.worker_layout import ProcsPerNode

__all__ = ["CONTROL_PORTS", "Environment", "Membership", "Options", "endpoint", "ports_above"]

CONTROL_PORTS = 8
"""How many ports above the contract's own are tried for the control channel, where the contract names none for it."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One process among those that were started elsewhere.

    `rendezvous` is the driver's host with the ports on which it may be found, in the order to try. `shape` are the job's fields that
    the contract decides. `standbys` counts the processes of all nodes that are no agents. `addresses` has the nodes' addresses where
    the contract names them, else it is empty. `ports` are those that the contract assigns to tasks, by task name.

    `starts_again`: whatever has started these processes starts each anew that fails, in its place, so that a run goes on when all of them
    have ended. One that joins anew is then the only one of its place, and one that is asked to end (SIGTERM) will be killed.
    """

    contract: str
    node: int
    local_rank: int
    rendezvous: tuple[str, tuple[int, ...]]
    shape: Mapping[str, int | tuple[int, ...]]
    standbys: int = 0
    addresses: tuple[str, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    starts_again: bool = False

    @property
    def loss_exit_code(self) -> int:
        """What the others end with when one of a run's processes is lost: where all are started again, that of a run to go on with."""
        return ResumableRunError.exit_code if self.starts_again else RunFailedError.exit_code

    @property
    def is_driver(self) -> bool:
        """Whether this process is the driver and node 0's agent."""
        return self.node == 0 and self.local_rank == 0


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked of a process about its place; None for what was not. `nodes` is also None where only the driver knows it."""

    rendezvous: str | None = None
    node_rank: int | None = None
    nodes: int | None = None
    procs_per_node: ProcsPerNode = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """Something that starts processes and tells each its place.

    `membership` returns a process's place among all of a run, or None where this is not what started it, or started it alone; it raises
    UsageError for half a contract or one that does not make sense. `who` says in words whose contract it is.
    """

    name: str
    who: str
    membership: Callable[[Mapping[str, str], Options], Membership | None]


def endpoint(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``. Raises ValueError where it is none, or has no port from 1 to 65535."""
    host, _, port = address.rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} has no port from 1 to 65535")
    return host, int(port)


def ports_above(port: int, used: Collection[int] = ()) -> tuple[int, ...]:
    """Return ports for the control channel; none of those that tasks will listen on, which may be on every address of the machine."""
    return tuple(candidate for candidate in range(port + 1, port + 1 + CONTROL_PORTS + len(used)) if candidate not in used)[:CONTROL_PORTS]
