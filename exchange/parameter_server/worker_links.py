"""The connections of workers to the chief: of each worker its newest counts, and an older one is served to its end before that begins."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from .wire_protocol import Connection

__all__ = ["WorkerLinks"]


class WorkerLinks:
    """Used by the connections' threads. `dismiss` is called with a worker whose thread may wait for a ticket, to have it wait no longer.

    `readmit` is called when the place is free again.
    """

    def __init__(self, dismiss: Callable[[int], None], readmit: Callable[[int], None]) -> None:
        self._dismiss, self._readmit = dismiss, readmit
        self._changed = threading.Condition()
        self._links: dict[int, Connection] = {}
        self._generations: Counter[int] = Counter()
        self._newest: dict[int, float] = {}

    def enter(self, worker: int, link: Connection, arrival: float) -> int:
        """Take the worker's place; return the generation of this connection: how many have had it. Waits until the one before has left.

        Connections' threads may come here in another order than their peers did, of which `arrival` tells. Raises ConnectionError where a
        later one has come: this one's process is gone, and must not push the one out that was started in its stead.
        """
        with self._changed:
            newest = self._newest[worker] = max(arrival, self._newest.get(worker, arrival))
            while worker in self._links and arrival == newest:
                self._cut(worker)
                self._changed.wait()
                newest = self._newest[worker]
            if arrival != newest:
                raise ConnectionError("another has come in its place")
            self._links[worker] = link
            self._generations[worker] += 1
            return self._generations[worker]

    def leave(self, worker: int) -> None:
        """Give the place back; what the worker held has been given back by now."""
        with self._changed:
            del self._links[worker]
            self._readmit(worker)
            self._changed.notify_all()

    def cut(self, worker: int) -> None:
        """End a worker's connection, where it has one."""
        with self._changed:
            self._cut(worker)

    def _cut(self, worker: int) -> None:
        if worker in self._links:
            self._links[worker].abort()
            self._dismiss(worker)
