"""A mesh beside another exchange, to be tried: on ports of the system's choice, which the ranks tell each other by that exchange."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import Task
from ...core.errors import RunFailedError
from .mesh import Mesh

__all__ = ["OPEN_SECONDS", "open_beside"]

OPEN_SECONDS = 5.0
"""How long the ranks try to join: what no port is open for is not worth a longer wait after a run."""

Vector = NDArray[np.float32]


def open_beside(
    task: Task, add_up: Callable[[Vector], Vector], silence_seconds: float, open_seconds: float = OPEN_SECONDS
) -> tuple[Mesh | None, str | None]:
    """Return a mesh of all ranks, or why there is none, empty where another rank has the reason: on every rank a mesh, or on none.

    `add_up` gives the sum of a float32 vector over all ranks by another exchange. Called on all ranks alike, which all come back within
    `open_seconds` of the last; raises what `add_up` raises.
    """
    listening, problem = _listen(task)
    ports = np.zeros(task.cluster.workers, np.float32)  # a port is below 2¹⁶, and such a number is exact in a float32
    ports[task.rank] = 0 if listening is None else listening.getsockname()[1]
    ports = add_up(ports)
    mesh = None
    if listening is not None and ports.all():
        named = {placed.name: int(ports[placed.index]) for placed in task.cluster.of_role("worker")}
        there = replace(task, cluster=replace(task.cluster, ports={**task.cluster.ports, **named}))
        try:
            mesh = Mesh(there, open_seconds, silence_seconds, listening)
        except (OSError, RunFailedError) as error:
            problem = f"{task.name} could not join it: {error}"
    elif listening is not None:
        listening.close()
    joined = add_up(np.array([mesh is not None], np.float32))
    if mesh is not None and joined[0] < task.cluster.workers:
        mesh.close()
        mesh = None
    return mesh, None if mesh is not None else problem or ""


def _listen(task: Task) -> tuple[socket.socket | None, str | None]:
    """Return a socket that listens on the task's address and a free port, or why there is none."""
    try:
        return socket.create_server((task.address, 0), backlog=2 * task.cluster.workers), None
    except OSError as error:
        return None, f"{task.name} could not listen on {task.address}: {error}"
