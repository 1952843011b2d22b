"""Who may push to a shard: of each worker its newest connection alone, and that only until the chief ends it.

The chief counts the connections of a worker; the count, its generation, goes with it to every other shard. A worker that is lost, or stood
still for too long, has its lease ended on all of them before its ticket goes back to the queue. So whatever it still sends is refused, also
where it arrives late.
"""

from __future__ import annotations

import threading

__all__ = ["Lease", "Leases"]


class Lease:
    """The right of one connection to push. Held while a push is applied, so that none is under way once `end` has returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> None:
        """Raise ConnectionError where the lease has ended."""
        self._lock.acquire()
        if self._ended:
            self._lock.release()
            raise ConnectionError("it pushed after its lease had ended")

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def end(self) -> None:
        """Have every later push refused; waits for the one that is being applied."""
        with self._lock:
            self._ended = True


class Leases:
    """Those of a shard's workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: dict[int, tuple[int, Lease]] = {}
        self._ended: dict[int, int] = {}

    def begin(self, worker: int, generation: int) -> Lease:
        """Return the lease of a worker's new connection; those before it end. Raises ConnectionError where it is not the newest."""
        with self._lock:
            newest, before = self._current.get(worker, (0, None))
            if generation <= max(newest, self._ended.get(worker, 0)):
                raise ConnectionError(f"it joined as generation {generation} of its worker, which has ended")
            lease = Lease()
            self._current[worker] = generation, lease
        if before is not None:
            before.end()
        return lease

    def end(self, worker: int, generation: int) -> None:
        """End a worker's leases up to this generation, also of a connection that has not joined yet."""
        with self._lock:
            self._ended[worker] = max(generation, self._ended.get(worker, 0))
            newest, lease = self._current.get(worker, (0, None))
        if lease is not None and newest <= generation:
            lease.end()
