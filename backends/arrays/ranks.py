"""The ranks of a synchronous run, to a session that knows of them only how their vectors are added up."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import Task
from ...core.job import Job
from ...exchange.mesh.mesh import Mesh

__all__ = ["MeshRanks", "Ranks", "SingleRank", "barrier", "join_ranks", "spread"]


class Ranks(Protocol):
    """The other ranks. All call the same methods in the same order."""

    def add_up(self, vector: NDArray[Any]) -> None:
        """Replace a flat vector, float32 or float64, by its sum over all ranks. Raises ConnectionError where one has gone."""
        ...

    def close(self, *, healthy: bool) -> None:
        """Leave, together with the others, at once where this rank has failed."""
        ...


class SingleRank:
    """There are no others."""

    def add_up(self, vector: NDArray[Any]) -> None:
        """It is its own sum."""

    def close(self, *, healthy: bool) -> None:
        """There is nothing to leave."""


class MeshRanks:
    """Ranks that are connected directly: sums in the order of the ranks, the same bits each time."""

    def __init__(self, task: Task, job: Job) -> None:
        """Join the mesh; see `Mesh`."""
        self._mesh = Mesh(task, job.start_timeout, job.node_timeout)

    def add_up(self, vector: NDArray[Any]) -> None:
        """Add up in the order of the ranks."""
        self._mesh.add_up(vector)

    def close(self, *, healthy: bool) -> None:
        """Close the connections when all are about to."""
        try:
            if healthy:
                self._mesh.barrier()
        finally:
            self._mesh.close()


def join_ranks(task: Task, job: Job) -> Ranks:
    """Return the other ranks of a job, joined by a mesh where there are any."""
    return MeshRanks(task, job) if job.wrapped else SingleRank()


def barrier(ranks: Ranks) -> None:
    """Wait until all ranks are here."""
    ranks.add_up(np.zeros(1))


def spread(ranks: Ranks, rank: int, vector: NDArray[Any]) -> None:
    """Replace a flat vector by the first rank's. Adding −0 changes no number, not even a −0."""
    if rank:
        vector.fill(-0.0)
    ranks.add_up(vector)
