"""The connections that carry vectors: frames, and what can go wrong with whoever is at the other end."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Iterable, Mapping

from ...core.cluster import Task
from ...core.errors import RunFailedError
from .life import LifeSigns
from .peers import PeerLostError, names_of

__all__ = ["Head", "Links"]

_LAYOUT = struct.Struct("<QQQ")


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

    WAIT_SECONDS = 0.5
    """How long a call waits for bytes before it looks whether those that it waits for still give signs of life."""

    def __init__(self, task: Task, connections: Mapping[int, socket.socket], life: LifeSigns) -> None:
        self.rank, self.ranks = task.rank, task.cluster.workers
        self.sockets = dict(connections)
        self._names, self._life = names_of(task), life
        wait = struct.pack("ll", *divmod(round(self.WAIT_SECONDS * 1e6), 1_000_000))
        for connection in self.sockets.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self.head = Head(task.cluster.secret)

    def check_life(self, awaited: Iterable[int]) -> None:
        """Raise PeerLostError for a rank that is waited for and gives no sign of life."""
        silent = self._life.silent
        for peer in awaited:
            if peer in silent:
                raise self.lost(peer, f"it has not been heard of for {self._life.limit_seconds:g} s (--node-timeout)")

    def lost(self, peer: int, why: object) -> PeerLostError:
        """Return the error about a rank that is lost."""
        return PeerLostError(self._names[peer], why)

    def check_head(self, peer: int, found: memoryview, expected: bytes) -> None:
        """Raise RunFailedError where a rank has sent another frame than the one that is due: it is not where this one is."""
        if bytes(found) != expected:
            got, due = _LAYOUT.unpack(found), _LAYOUT.unpack(expected)
            what = (
                "of another attempt" if got[0] != due[0] else f"number {got[1]} of {got[2]} bytes, and number {due[1]} of {due[2]} was due"
            )
            raise RunFailedError(f"exchange: {self._names[peer]} sent a frame {what}; the workers are out of step")
