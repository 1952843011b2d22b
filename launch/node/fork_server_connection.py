"""An agent's end of its connection to a fork server, over which it has tasks forked and killed and hears of their ends."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["PACKET_BYTES", "ForkServerConnection", "ForkedTasksListener", "is_own_user", "receive_packet"]

PACKET_BYTES = 2**16
"""The largest message on sockets of a fork server, which keep messages apart (SOCK_SEQPACKET); a job takes a few kilobytes."""

MOST_DESCRIPTORS = 3


def receive_packet(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a message with the descriptors that came with it, or None at the end. Raises OSError."""
    text, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, MOST_DESCRIPTORS)
    return (json.loads(text), descriptors) if text else None


def is_own_user(connection: socket.socket) -> bool:
    """Whether this process's user is at the other end of a local socket, by the kernel's word (unix(7), SO_PEERCRED). For Linux."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())


class ForkedTasksListener(Protocol):
    """Hears of forked processes by the number under which each was asked for, from one thread."""

    def forked(self, number: int, pid: int) -> None:
        """Hear which process it is."""
        ...

    def ended(self, number: int, status: int, usage: resource.struct_rusage) -> None:
        """Hear how it has ended, as wait4(2) says it; its group is killed, and it is reaped."""
        ...

    def refused(self, number: int) -> None:
        """Hear that it could not be forked."""
        ...

    def fork_server_lost(self) -> None:
        """Hear that the server has ended: its processes end with it, and it forks no more."""
        ...


class ForkServerConnection:
    """A connection to the fork server, over a socket that it has been given the other end of."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def listen(self, listener: ForkedTasksListener) -> None:
        """Tell a listener what the server says, from a thread, until it has ended."""
        threading.Thread(target=self._read, args=(listener,), name="fork-server", daemon=True).start()

    def fork(self, number: int, temporary_folder: str, descriptors: Sequence[int]) -> bool:
        """Ask for a task with such a folder for temporary files; return False where the server is gone.

        `descriptors`: its channel, its log, and what it writes its stacks to, if anything.
        """
        return self._send({"fork": number, "temporary_folder": temporary_folder}, descriptors)

    def kill(self, number: int) -> None:
        """Ask for the end of a task and its process group; of one that has ended nothing is left to kill."""
        self._send({"kill": number})

    def _send(self, said: dict[str, object], descriptors: Sequence[int] = ()) -> bool:
        try:
            socket.send_fds(self._connection, [json.dumps(said).encode()], descriptors)
        except OSError:
            return False
        return True

    def _read(self, listener: ForkedTasksListener) -> None:
        while True:
            try:
                text = self._connection.recv(PACKET_BYTES)
            except OSError:
                text = b""
            if not text:
                listener.fork_server_lost()
                return
            said = json.loads(text)
            if "forked" in said:
                listener.forked(said["forked"], said["pid"])
            elif "refused" in said:
                listener.refused(said["refused"])
            else:
                listener.ended(said["ended"], said["status"], resource.struct_rusage(said["usage"]))
