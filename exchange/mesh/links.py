"""The connections that carry vectors: frames, and waiting for them without using a core."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping

from ...core.cluster import Task
from .life import LifeSigns

__all__ = ["Head", "Links", "PeerLostError"]

_LAYOUT = struct.Struct("<QQQ")


class PeerLostError(ConnectionError):
    """Another rank has gone, or cannot be heard any more; the message names it."""


class Head:
    """The head of a frame: the attempt that it belongs to, its number among the frames of a connection, and the bytes that follow.

    All ranks send frame after frame in the same order, so the head that must come is known, and any other is an error.
    """

    SIZE = _LAYOUT.size

    def __init__(self, secret: str) -> None:
        self._attempt = int.from_bytes(hmac.digest(bytes.fromhex(secret), b"frames of the direct exchange", "sha256")[:8], "little")
        self._number = 0

    def next(self, size: int) -> bytes:
        """Return the head of the next frame, which has `size` bytes; equal on all ranks."""
        self._number += 1
        return _LAYOUT.pack(self._attempt, self._number, size)


class Links:
    """The connections of a rank to all others, by rank. Used by one thread at a time."""

    WAIT_MILLISECONDS = 500
    """How long a call waits for bytes before it looks whether those that it waits for still give signs of life."""

    def __init__(self, task: Task, connections: Mapping[int, socket.socket], life: LifeSigns) -> None:
        self.rank, self.ranks = task.rank, task.cluster.workers
        self.sockets = dict(connections)
        self._places = {
            placed.index: f"{placed.name} on node {placed.node} ({task.cluster.addresses[placed.node]})"
            for placed in task.cluster.of_role("worker")
        }
        self._life = life
        wait = struct.pack("ll", *divmod(self.WAIT_MILLISECONDS * 1000, 1_000_000))
        for connection in self.sockets.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self.head = Head(task.cluster.secret)

    def check_life(self, awaited: Iterable[int]) -> None:
        """Raise PeerLostError for a rank that is waited for and gives no sign of life."""
        silent = self._life.silent
        for peer in awaited:
            if peer in silent:
                raise PeerLostError(
                    f"lost {self._places[peer]}: it has not been heard of for {self._life.limit_seconds:g} s (--node-timeout)"
                )

    @contextlib.contextmanager
    def talking_to(self, peer: int) -> Iterator[None]:
        """Turn the system's errors about a rank's connection into PeerLostError."""
        try:
            yield
        except PeerLostError:
            raise
        except OSError as error:
            raise PeerLostError(f"lost {self._places[peer]}: {error}") from error

    def closed(self, peer: int) -> PeerLostError:
        """Return the error about a rank that has closed its connection."""
        return PeerLostError(f"lost {self._places[peer]}: it closed the connection")

    def check_head(self, peer: int, found: bytes | bytearray | memoryview, expected: bytes) -> None:
        """Raise ConnectionError where a rank has sent another frame than the one that is due."""
        if bytes(found) != expected:
            got, due = _LAYOUT.unpack(found), _LAYOUT.unpack(expected)
            what = (
                "of another attempt" if got[0] != due[0] else f"number {got[1]} of {got[2]} bytes, and number {due[1]} of {due[2]} was due"
            )
            raise ConnectionError(f"{self._places[peer]} sent a frame {what}")
