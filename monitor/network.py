"""Network traffic by interface (frames) and task (TCP payload), without RDMA and NVLink."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .processes import read_file, read_socket_inodes, sum_pairs

# Netlink libraries offer neither one dump for IPv4 and IPv6 (each walks the whole connection table) nor closing notices with final counts.
# Layouts: ``linux/netlink.h``, ``linux/inet_diag.h``, ``linux/tcp.h``
_NETLINK_SOCK_DIAG = 4
_TCPDIAG_GETSOCK = 18  # requests both address families
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_INET_DIAG_INFO = 2
_TCP_DESTROY_GROUPS = 0b101  # multicast groups 1 (IPv4 TCP) and 3 (IPv6 TCP)
# full sockets' states with possible bytes: not SYN_RECV (3), TIME_WAIT (6), CLOSE (7), LISTEN (10)
_STATES = sum(1 << state for state in (1, 2, 4, 5, 8, 9, 11))
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBB48sII")  # family, source length, target length, extensions, socket id, states, bytecode
_COOKIE_OFFSET, _INODE_OFFSET, _ATTRIBUTES_OFFSET = 44, 68, 72  # in struct inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_BYTES_OFFSET = 120  # of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info
_BYTES = struct.Struct("=QQ")
_RECEIVE_BYTES = 1 << 16
_TIMEOUT_SECONDS = 2.0  # dumps are immediate; this bounds an unexpected wait
_LISTENER_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """Acknowledged and received payload bytes of a connection.

    `cookie` is unique; `inode` is 0 if unopened.
    """

    cookie: int
    inode: int
    sent_bytes: int
    received_bytes: int


class SockDiag:
    """Kernel's socket table of the thread's network namespace. Raises OSError where unsupported."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("TCP byte counts come from Linux's sock_diag, which this system does not have")
        self._requests = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
        self._requests.settimeout(_TIMEOUT_SECONDS)
        self._notices = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
        self._sequence = 0
        try:
            self._notices.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LISTENER_BUFFER_BYTES)
            self._notices.bind((0, _TCP_DESTROY_GROUPS))
            self._notices.setblocking(False)
        except OSError:
            self.close()
            raise

    def open_sockets(self) -> list[TcpSocket]:
        """Return the namespace's TCP connections. Raises OSError without the kernel's answer."""
        self._sequence += 1
        body = _REQUEST.pack(socket.AF_INET, 0, 0, 1 << (_INET_DIAG_INFO - 1), bytes(48), _STATES, 0)
        header = _HEADER.pack(_HEADER.size + len(body), _TCPDIAG_GETSOCK, _NLM_F_REQUEST | _NLM_F_DUMP, self._sequence, 0)
        self._requests.send(header + body)
        return list(self._answers())

    def closed_sockets(self) -> list[TcpSocket]:
        """Return connections closed since the last call, with inode 0.

        Raises OSError (ENOBUFS) for lost notices; retry works.
        """
        closed: list[TcpSocket] = []
        while True:
            try:
                packet = self._notices.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return closed
            closed.extend(_tcp_socket(body) for kind, _, body in _messages(packet) if kind == _SOCK_DIAG_BY_FAMILY)

    def close(self) -> None:
        """Close the descriptors; a second call does nothing."""
        self._requests.close()
        self._notices.close()

    def _answers(self) -> Iterator[TcpSocket]:
        while True:
            for kind, sequence, body in _messages(self._requests.recv(_RECEIVE_BYTES)):
                if sequence != self._sequence:  # rest of an abandoned dump
                    continue
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    code = -int.from_bytes(body[:4], sys.byteorder, signed=True)
                    raise OSError(code, os.strerror(code))
                yield _tcp_socket(body)


def _messages(packet: bytes) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    while offset + _HEADER.size <= len(packet):
        length, kind, _, sequence, _ = _HEADER.unpack_from(packet, offset)
        yield kind, sequence, packet[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _tcp_socket(body: bytes) -> TcpSocket:
    sent = received = 0
    offset = _ATTRIBUTES_OFFSET
    while offset + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if kind == _INET_DIAG_INFO and length >= _ATTRIBUTE.size + _BYTES_OFFSET + _BYTES.size:
            sent, received = _BYTES.unpack_from(body, offset + _ATTRIBUTE.size + _BYTES_OFFSET)
        offset += (length + 3) & ~3 or _ATTRIBUTE.size
    return TcpSocket(
        cookie=int.from_bytes(body[_COOKIE_OFFSET : _COOKIE_OFFSET + 8], sys.byteorder),
        inode=int.from_bytes(body[_INODE_OFFSET : _INODE_OFFSET + 4], sys.byteorder),
        sent_bytes=sent,
        received_bytes=received,
    )


Bytes = tuple[int, int]  # (sent, received)
# a process forked just now is not yet known, so a socket counts as foreign at the third look
_LOOKS = 3
# closing notices come after a connection has left the dumps, later on a busy machine
_NOTICE_SECONDS = 1.0


class InterfaceCounters:
    """Bytes of each interface since this object was made. Raises OSError where unsupported."""

    def __init__(self) -> None:
        self._before = _read_interfaces()
        self._totals: dict[str, Bytes] = dict.fromkeys(self._before, (0, 0))

    def read(self) -> dict[str, Bytes]:
        """Return (sent, received) bytes by interface.

        They never fall, even if an interface is recreated or removed.
        """
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
    """Return the sum over every interface but ``lo``."""
    return sum_pairs([counts for name, counts in interfaces.items() if name != "lo"])


def _read_interfaces() -> dict[str, Bytes]:
    """Read the network namespace's table: name, 8 columns received, 8 sent, bytes first in each."""
    interfaces: dict[str, Bytes] = {}
    for line in read_file("/proc/thread-self/net/dev").decode().splitlines()[2:]:
        name, _, columns = line.rpartition(":")
        values = columns.split()
        interfaces[name.strip()] = (int(values[8]), int(values[0]))
    return interfaces


@dataclass(slots=True)
class _Connection:
    """Task's connection as last seen.

    `absent_since`: monotonic time of the first dump without it.
    """

    owner: object
    sent: int = 0
    received: int = 0
    absent_since: float | None = None

    def see(self, entry: TcpSocket) -> None:
        self.sent = max(self.sent, entry.sent_bytes)
        self.received = max(self.received, entry.received_bytes)
        self.absent_since = None


class SocketCounters:
    """TCP payload bytes of each task, with loopback; without connections between two readings.

    Raises OSError without sock_diag.
    """

    def __init__(self) -> None:
        self._diag = SockDiag()
        self._connections: dict[int, _Connection] = {}
        self._looks: dict[int, int] = {}  # looks without an owner, by cookie
        self._closed: dict[object, Bytes] = {}

    def read(self, members: Mapping[object, Callable[[], set[int]]]) -> list[str]:
        """Count traffic since the last call; `members` return open inodes.

        Returns minor problems; raises OSError if refused.
        """
        problems = self._take_notices()
        present = self._diag.open_sockets()
        self._claim(present, members)
        for entry in present:
            connection = self._connections.get(entry.cookie)
            if connection is not None:
                connection.see(entry)
        self._retire({entry.cookie for entry in present})
        return problems

    def forget_unowned(self) -> None:
        """Retry sockets without an owner, as a process may have passed one on."""
        self._looks.clear()

    def total_of(self, owner: object) -> Bytes:
        """Return an owner's (sent, received) bytes at the last reading; (0, 0) without connections."""
        ours = [(connection.sent, connection.received) for connection in self._connections.values() if connection.owner is owner]
        return sum_pairs([self._closed.get(owner, (0, 0)), *ours])

    def total(self) -> Bytes:
        """Return all owners' (sent, received) bytes at the last reading."""
        return sum_pairs([*self._closed.values(), *((connection.sent, connection.received) for connection in self._connections.values())])

    def close(self) -> None:
        """Close the descriptors."""
        self._diag.close()

    def _take_notices(self) -> list[str]:
        try:
            closed = self._diag.closed_sockets()
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            return ["more TCP connections closed than the kernel kept notices of: their bytes count up to the reading before"]
        for entry in closed:
            if entry.cookie in self._connections:
                self._connections[entry.cookie].see(entry)
        return []

    def _claim(self, present: list[TcpSocket], members: Mapping[object, Callable[[], set[int]]]) -> None:
        """Find new sockets' owners; sockets without an inode wait to be accepted, and are retried."""
        unknown = {
            entry.inode: entry.cookie
            for entry in present
            if entry.inode and entry.cookie not in self._connections and self._looks.get(entry.cookie, 0) < _LOOKS
        }
        if not unknown:
            return
        for owner, open_inodes in members.items():
            for inode in open_inodes() & unknown.keys():
                self._connections[unknown.pop(inode)] = _Connection(owner)
        for cookie in unknown.values():
            self._looks[cookie] = self._looks.get(cookie, 0) + 1

    def _retire(self, present: set[int]) -> None:
        """Add ended connections to their owner's sum, `_NOTICE_SECONDS` late for closing notices."""
        now = time.monotonic()
        for cookie in self._connections.keys() - present:
            connection = self._connections[cookie]
            if connection.absent_since is None:
                connection.absent_since = now
            elif now - connection.absent_since > _NOTICE_SECONDS:
                del self._connections[cookie]
                before = self._closed.get(connection.owner, (0, 0))
                self._closed[connection.owner] = sum_pairs([before, (connection.sent, connection.received)])
        self._looks = {cookie: looks for cookie, looks in self._looks.items() if cookie in present}


def open_inodes(pids: list[int]) -> set[int]:
    """Return the inodes of sockets open in the processes.

    Raises PermissionError for another user's.
    """
    return set().union(*(read_socket_inodes(pid) for pid in pids))
