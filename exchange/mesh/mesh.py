"""The ranks of a synchronous run, connected directly: sums, the first rank's values for all, and the end in good order."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import Task
from ..limits import refuse_too_many
from .buckets import BucketSums
from .joining import Channel, join
from .life import LifeSigns
from .links import Links
from .sums import RankSum

__all__ = ["Mesh"]


MOST_SUMS = 64
"""Vectors of so many lengths keep their memory: a step has fewer buckets, and losses of a plan may be of any number."""

SPREAD_ELEMENTS = 1 << 18
"""Values for all ranks go in pieces of so many, which need no memory of the size of a model."""


class Mesh:
    """One rank's part of the mesh. Every rank calls the same methods in the same order, from one thread at a time.

    All but `close` raise PeerLostError, which names the rank, where one is lost: at once where its process has ended, after the time given
    where it gives no sign of life. Ranks that do not add up the same things in the same order raise RunFailedError.
    """

    def __init__(self, task: Task, start_seconds: float, silence_seconds: float, listening: socket.socket | None = None) -> None:
        """Join the other ranks. Raises RunFailedError where one does not come in time, OSError with EADDRINUSE where our port was taken.

        `listening` is a socket that listens on our port already; it is closed in any case.
        """
        self.rank, self.ranks = task.rank, task.cluster.workers
        refuse_too_many(self.ranks)
        connections = join(task, start_seconds, listening)
        self._sums: dict[tuple[int, np.dtype[Any]], RankSum] = {}
        self._background: BucketSums | None = None
        try:
            self._life = LifeSigns(connections[Channel.LIFE], silence_seconds)
            self._links = Links(task, connections[Channel.VECTORS], self._life)
        except BaseException:
            for connection in (each for of_channel in connections.values() for each in of_channel.values()):
                connection.close()
            raise

    def sum_of(self, elements: int, kind: Any = np.float32) -> RankSum:
        """Return what adds up vectors of so many elements, with memory that is kept for it until many others have been used since."""
        key = elements, np.dtype(kind)
        found = self._sums.pop(key, None) or RankSum(self._links, *key)
        self._sums[key] = found  # which makes it the one used last
        if len(self._sums) > MOST_SUMS:
            del self._sums[next(iter(self._sums))]
        return found

    def add_up(self, vector: NDArray[Any]) -> None:
        """Replace a contiguous vector by its sum over all ranks, the same to the bit on each."""
        if vector.size:
            self.sum_of(vector.size, vector.dtype).add_up(vector)

    def submit(self, vector: NDArray[Any]) -> None:
        """Begin to add up a vector in the background; neither it nor the mesh may be used until `wait` has returned."""
        if self._background is None:
            self._background = BucketSums(self.add_up)
        self._background.submit(vector)

    def wait(self) -> None:
        """Wait until all vectors that were submitted have been added up."""
        if self._background is not None:
            self._background.wait()

    def spread(self, array: NDArray[Any] | None, shape: tuple[int, ...], kind: Any = np.float32) -> NDArray[Any]:
        """Return the first rank's array on every rank; the others give None. Adding −0 changes no number, not even a −0."""
        vector = np.full(shape, -0.0, kind) if array is None else np.array(array, kind).reshape(shape)
        flat = vector.reshape(-1)
        for first in range(0, flat.size, SPREAD_ELEMENTS):
            self.add_up(flat[first : first + SPREAD_ELEMENTS])
        return vector

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.add_up(np.zeros(1))

    def close(self) -> None:
        """Close the connections; whoever waits for this rank learns it. A second call does nothing."""
        for connection in self._links.sockets.values():
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)
        if self._background is not None:
            self._background.close()
            self._background = None
        self._life.close()
        for connection in self._links.sockets.values():
            connection.close()
