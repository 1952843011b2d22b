"""Ask the kernel for the byte counts of TCP sockets, over a plain netlink socket.

Works without privileges and sees the sockets of its own network namespace. Two things are done by hand that general netlink libraries
do not offer: one dump for IPv4 and IPv6 together (each walks the whole connection table, which is large on large hosts), and
the notices of closing sockets, which carry their final counts. Layouts: ``linux/netlink.h``, ``linux/inet_diag.h``, ``linux/tcp.h``.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["SockDiag", "TcpSocket"]

_NETLINK_SOCK_DIAG = 4
_TCPDIAG_GETSOCK = 18  # the request type that asks for both address families at once
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_INET_DIAG_INFO = 2
_TCP_DESTROY_GROUPS = 0b101  # multicast groups 1 (IPv4 TCP) and 3 (IPv6 TCP)
# Every state in which a connection has or had bytes and still is a full socket: not SYN_RECV (3), TIME_WAIT (6), CLOSE (7), LISTEN (10).
_STATES = sum(1 << state for state in (1, 2, 4, 5, 8, 9, 11))

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBB48sII")  # family, source length, target length, extensions, socket id, states, bytecode
_COOKIE_OFFSET, _INODE_OFFSET, _ATTRIBUTES_OFFSET = 44, 68, 72  # in struct inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_BYTES_OFFSET = 120  # of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info
_BYTES = struct.Struct("=QQ")
_RECEIVE_BYTES = 1 << 16
_TIMEOUT_SECONDS = 2.0  # a dump is answered at once; this only bounds a wait that should not happen
_LISTENER_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A connection's payload bytes so far: sent and acknowledged, received in order.

    `cookie` is the kernel's number for the socket, never used twice; `inode` is 0 while no process holds it open.
    """

    cookie: int
    inode: int
    sent_bytes: int
    received_bytes: int


class SockDiag:
    """A line to the kernel's socket table, for the network namespace of the thread that makes it. Raises OSError where there is none."""

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
        """Return every TCP connection of the namespace. Raises OSError where the kernel refuses or does not answer."""
        self._sequence += 1
        body = _REQUEST.pack(socket.AF_INET, 0, 0, 1 << (_INET_DIAG_INFO - 1), bytes(48), _STATES, 0)
        header = _HEADER.pack(_HEADER.size + len(body), _TCPDIAG_GETSOCK, _NLM_F_REQUEST | _NLM_F_DUMP, self._sequence, 0)
        self._requests.send(header + body)
        return list(self._answers())

    def closed_sockets(self) -> list[TcpSocket]:
        """Return the connections that were closed since the last call, with their final counts and inode 0.

        Raises OSError (ENOBUFS) where more were closed than the kernel kept notices of; the next call works again.
        """
        closed: list[TcpSocket] = []
        while True:
            try:
                packet = self._notices.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return closed
            closed.extend(_tcp_socket(body) for kind, _, body in _messages(packet) if kind == _SOCK_DIAG_BY_FAMILY)

    def close(self) -> None:
        """Give the descriptors back; a second call does nothing."""
        self._requests.close()
        self._notices.close()

    def _answers(self) -> Iterator[TcpSocket]:
        while True:
            for kind, sequence, body in _messages(self._requests.recv(_RECEIVE_BYTES)):
                if sequence != self._sequence:  # the rest of a dump that was given up
                    continue
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    code = -int.from_bytes(body[:4], sys.byteorder, signed=True)
                    raise OSError(code, os.strerror(code))
                yield _tcp_socket(body)


def _messages(packet: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Cut a packet into (type, sequence, body)."""
    offset = 0
    while offset + _HEADER.size <= len(packet):
        length, kind, _, sequence, _ = _HEADER.unpack_from(packet, offset)
        yield kind, sequence, packet[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _tcp_socket(body: bytes) -> TcpSocket:
    """Read a ``struct inet_diag_msg`` with its attributes."""
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
