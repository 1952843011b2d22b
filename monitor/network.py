"""What went over the network: by interface, and by task from its TCP sockets.

Interfaces count frames, sockets count payload. An interface belongs to a network namespace, so on a node that has one of its own the
interfaces are the node; on a shared host only the sockets can be told apart. Neither sees RDMA, NVLink or shared memory.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .procfs import read_file, read_socket_inodes
from .sock_diag import SockDiag, TcpSocket

__all__ = ["Bytes", "InterfaceCounters", "SocketCounters", "open_inodes", "without_loopback"]

Bytes = tuple[int, int]
"""(sent, received)"""

# A process that was forked a moment ago is not known as ours yet, so a socket is given up as a stranger's at the third look only.
_LOOKS = 3


class InterfaceCounters:
    """Bytes of each interface since this object was made. Raises OSError where the system does not show them."""

    def __init__(self) -> None:
        self._before = _read_interfaces()
        self._totals: dict[str, Bytes] = dict.fromkeys(self._before, (0, 0))

    def read(self) -> dict[str, Bytes]:
        """Return (sent, received) bytes by interface; never fall, also when an interface is made again or goes away."""
        now = _read_interfaces()
        for name, (sent, received) in now.items():
            sent_before, received_before = self._before.get(name, (0, 0))
            if sent < sent_before or received < received_before:  # a new interface with an old name counts from 0
                sent_before = received_before = 0
            total_sent, total_received = self._totals.get(name, (0, 0))
            self._totals[name] = (total_sent + sent - sent_before, total_received + received - received_before)
        self._before = now
        return dict(self._totals)


def without_loopback(interfaces: Mapping[str, Bytes]) -> Bytes:
    """Return the sum over every interface but ``lo``: what left and reached the node."""
    return _sum([counts for name, counts in interfaces.items() if name != "lo"])


def _read_interfaces() -> dict[str, Bytes]:
    """Read the table of the calling thread's network namespace: name, 8 columns received, 8 columns sent, bytes first in each."""
    interfaces: dict[str, Bytes] = {}
    for line in read_file("/proc/thread-self/net/dev").decode().splitlines()[2:]:
        name, _, columns = line.rpartition(":")
        values = columns.split()
        interfaces[name.strip()] = (int(values[8]), int(values[0]))
    return interfaces


@dataclass(slots=True)
class _Connection:
    """A task's connection as last seen. `absent` counts the dumps since it was last in one."""

    owner: object
    sent: int = 0
    received: int = 0
    absent: int = 0

    def see(self, found: TcpSocket) -> None:
        self.sent = max(self.sent, found.sent_bytes)
        self.received = max(self.received, found.received_bytes)
        self.absent = 0


class SocketCounters:
    """TCP payload bytes of each owner (a task), loopback included; the traffic between two tasks counts with both.

    A connection's last bytes come with the kernel's notice of its closing. One that opens and closes between two readings has no owner
    any more when it is seen, and is not counted. Raises OSError where sock_diag is not to be had.
    """

    def __init__(self) -> None:
        self._diag = SockDiag()
        self._connections: dict[int, _Connection] = {}
        self._looks: dict[int, int] = {}
        """How often nobody of ours was found to hold a socket, by cookie."""
        self._closed: dict[object, Bytes] = {}

    def read(self, members: Mapping[object, Callable[[], set[int]]]) -> list[str]:
        """Count what went over the sockets of each owner since the last call; the values return the inodes an owner holds open now.

        Returns what went wrong on the way without being fatal. Raises OSError where the kernel refuses.
        """
        problems = self._take_notices()
        present = self._diag.open_sockets()
        self._claim(present, members)
        for found in present:
            connection = self._connections.get(found.cookie)
            if connection is not None:
                connection.see(found)
        self._retire({found.cookie for found in present})
        return problems

    def forget_strangers(self) -> None:
        """Look again at the sockets that belonged to nobody of ours: a process may have handed one over since."""
        self._looks.clear()

    def total_of(self, owner: object) -> Bytes:
        """Return the (sent, received) bytes of an owner as of the last reading; (0, 0) where it had no connection."""
        ours = [(connection.sent, connection.received) for connection in self._connections.values() if connection.owner is owner]
        return _sum([self._closed.get(owner, (0, 0)), *ours])

    def total(self) -> Bytes:
        """Return the (sent, received) bytes of all owners there ever were, as of the last reading."""
        return _sum([*self._closed.values(), *((connection.sent, connection.received) for connection in self._connections.values())])

    def close(self) -> None:
        """Give the descriptors back."""
        self._diag.close()

    def _take_notices(self) -> list[str]:
        try:
            closed = self._diag.closed_sockets()
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            return ["more TCP connections closed than the kernel kept notices of: their bytes count up to the reading before"]
        for found in closed:
            if found.cookie in self._connections:
                self._connections[found.cookie].see(found)
        return []

    def _claim(self, present: list[TcpSocket], members: Mapping[object, Callable[[], set[int]]]) -> None:
        """Find the owners of sockets not seen before. One without an inode waits to be accepted, and is looked at again."""
        unknown = {
            found.inode: found.cookie
            for found in present
            if found.inode and found.cookie not in self._connections and self._looks.get(found.cookie, 0) < _LOOKS
        }
        if not unknown:
            return
        for owner, open_inodes in members.items():
            for inode in open_inodes() & unknown.keys():
                self._connections[unknown.pop(inode)] = _Connection(owner)
        for cookie in unknown.values():
            self._looks[cookie] = self._looks.get(cookie, 0) + 1

    def _retire(self, present: set[int]) -> None:
        """Move connections that are gone to their owner's sum, one reading late, because the notice of the closing may still come."""
        for cookie in self._connections.keys() - present:
            connection = self._connections[cookie]
            connection.absent += 1
            if connection.absent > 1:
                del self._connections[cookie]
                self._closed[connection.owner] = _sum([self._closed.get(connection.owner, (0, 0)), (connection.sent, connection.received)])
        self._looks = {cookie: looks for cookie, looks in self._looks.items() if cookie in present}


def open_inodes(pids: list[int]) -> set[int]:
    """Return the inodes of the sockets that any of these processes holds open. Raises PermissionError on another user's process."""
    return set().union(*(read_socket_inodes(pid) for pid in pids))


def _sum(counts: list[Bytes]) -> Bytes:
    return sum(sent for sent, _ in counts), sum(received for _, received in counts)
