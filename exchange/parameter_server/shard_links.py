"""The chief's connections to the parameter servers beyond itself: their state, their part in the end of a lease, and their own end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from .shards import Vector, bytes_of
from .wire_protocol import NO_STEP, Connection, Kind

__all__ = ["ShardLinks"]

log = logging.getLogger(__name__)


class ShardLinks:
    """One connection a server, in their order. Safe from several threads; all methods but `close` raise OSError where a server is lost."""

    def __init__(self, links: Sequence[Connection]) -> None:
        self._links = links
        self._lock = threading.Lock()

    def fetch(self, into: Sequence[Sequence[Vector]]) -> None:
        """Copy each server's state into its pieces."""
        with self._lock:
            for link in self._links:
                link.send(Kind.FETCH)
            for link, shard in zip(self._links, into, strict=True):
                link.receive()
                link.receive_buffers([bytes_of(piece) for piece in shard])

    def store(self, shards: Sequence[Sequence[Vector]], updates: int) -> None:
        """Replace each server's state by its pieces."""
        with self._lock:
            for link, shard in zip(self._links, shards, strict=True):
                link.send(Kind.STORE, version=updates)
                link.send_buffers([bytes_of(piece) for piece in shard])
                link.receive()

    def end_lease(self, worker: int, generation: int, last_step: int | None) -> bool:
        """Have every server refuse what a worker's connection still pushes; return whether all have applied the step it pushed last."""
        question = (NO_STEP if last_step is None else last_step).to_bytes(8, "little", signed=True)
        with self._lock:
            for link in self._links:
                link.send(Kind.END_LEASE, examples=worker, version=generation, trailer=question)
            answers = [link.receive() for link in self._links]
        return all(answer.version for answer in answers)

    def close(self, seconds: float) -> None:
        """Send the servers home; each may take so long. One that does not go is told in the log."""
        free = self._lock.acquire(timeout=seconds)
        for index, link in enumerate(self._links, start=1):
            try:
                if not free:
                    raise TimeoutError("it has not answered before")
                link.connection.settimeout(seconds)
                link.send(Kind.END)
                link.receive()
            except OSError as error:
                log.warning("ps-%d did not end in good order: %s", index, error)
            finally:
                link.close()
