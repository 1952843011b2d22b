"""Ports for the tasks of a node, reserved without a race between runs.

Frameworks want a number, not a socket, so that a port cannot be held for them. Instead the range from `FIRST_PORT` to `LAST_PORT`,
outside of Linux's ephemeral range, is handed out in blocks: whoever has bound a block's first port owns the block, and the kernel gives it
back with the process. A port that another program holds is skipped; one taken in between makes the start fail and be tried with other
ports.
"""

from __future__ import annotations

import os
import socket

from ...core.errors import RunFailedError

__all__ = ["FIRST_PORT", "LAST_PORT", "PortBlock"]

FIRST_PORT = 21000
BLOCK_PORTS = 50
BLOCKS = 180
LAST_PORT = FIRST_PORT + BLOCKS * BLOCK_PORTS - 1


class PortBlock:
    """A block of ports held by this process until `release` or its end."""

    def __init__(self) -> None:
        start = os.getpid() % BLOCKS
        for offset in range(BLOCKS):
            first = FIRST_PORT + (start + offset) % BLOCKS * BLOCK_PORTS
            lock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                lock.bind(("127.0.0.1", first))
            except OSError:
                lock.close()
                continue
            self._lock = lock
            self._next = first + 1
            self._end = first + BLOCK_PORTS
            return
        raise RunFailedError(f"all {BLOCKS} blocks of ports from {FIRST_PORT} on are in use; are other runs still going?")

    def take(self, count: int) -> list[int]:
        """Return `count` ports on which nobody listens now. No call returns a port that an earlier call returned.

        Raises RunFailedError where the block has no more free ports.
        """
        taken: list[int] = []
        while len(taken) < count:
            if self._next >= self._end:
                raise RunFailedError(f"no {count} free ports left up to {self._end - 1}")
            if _free(self._next):
                taken.append(self._next)
            self._next += 1
        return taken

    def release(self) -> None:
        """Give the block back."""
        self._lock.close()


def _free(port: int) -> bool:
    """Whether the port can be bound on every address, as TensorFlow's server will (it listens on all interfaces)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
