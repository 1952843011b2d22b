"""Frames on a TCP connection: a header of fixed size, then raw float32 bytes, straight from and into the buffers that are computed on.

No lengths are taken from the peer to allocate by: both sides know the size of a shard, and the trailer of a header is bounded.
Every exchange is one request and one reply, and each of them one system call where the kernel takes it whole.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["AVERAGED", "NO_STEP", "OVERFLOWED", "REFRESH_SHARDS", "Connection", "Frame", "Kind"]


class Kind(IntEnum):
    """What a frame says. Fields of the header that a kind does not name are 0."""

    READY = 1
    """Worker to chief: warmed up and waiting for a ticket."""
    PULL = 2
    """Worker to a shard: send the parameters."""
    PUSH = 3
    """Worker to a shard: a gradient, and for buffers old − new. version = version read, lr, examples = the step, NO_STEP while calibrating;
    to the chief also loss and busy seconds."""
    SUMS = 4
    """Worker to chief: a piece of an evaluation. The trailer is the vector of its sums, float64, in the order of the model's objective."""
    FETCH = 5
    """Chief to a shard: send all of the state."""
    STORE = 6
    """Chief to a shard: the state to take over follows, piece by piece. version = updates."""
    END = 7
    """Chief to a shard: serve no longer. Worker to a shard: goodbye (no reply)."""
    ECHO = 8
    """Worker to a shard: answer with DONE. Times the exchange of small messages."""
    CALIBRATED = 9
    """Worker to chief: a component of a step was repeated. examples = how often, seconds = how long."""
    JOIN = 10
    """Worker to a shard, before all else: send the parameters. To all but the chief version = the generation, which the chief has told."""
    END_LEASE = 11
    """Chief to a shard: refuse what a worker's connection pushes from now on. examples = the worker, version = the generation; the trailer
    is the step that it pushed last to the chief, int64. The answer is DONE with version = 1 where that has been applied here, else 0."""
    PARAMETERS = 16
    """Shard to worker: parameters and their version; a trailer, where there is one, is the worker's next ticket. The chief's answer to JOIN
    has examples = the generation of the worker's connection. In fp16 its tickets, and its answers to PUSH, have loss = what the worker
    multiplies its next losses by."""
    STATE = 17
    """Shard to chief: its state follows, piece by piece. version = updates."""
    DONE = 18
    """Shard to chief, or to a worker's ECHO: what was asked for is done."""


class Frame(NamedTuple):
    """The header of a message: 8 + 5·8 bytes, little endian. `trailer` is the number of bytes after header and payload."""

    kind: int
    flags: int
    trailer: int
    version: int
    examples: int
    lr: float
    loss: float
    seconds: float


OVERFLOWED = 2
"""Flag of PUSH: the gradient overflowed; count the update, but let it change nothing."""

AVERAGED = 4
"""Flag of PULL: send the moving averages of the parameters in their place, for an evaluation."""

REFRESH_SHARDS = 1
"""Flag of PARAMETERS: time has passed since the push, so that other shards' parameters should be fetched again."""

NO_STEP = -1
"""In the place of a step, of a PUSH that is none of the training's."""

_LAYOUT = struct.Struct("<BBxxIqqddd")
_PAYLOAD = frozenset({Kind.PUSH, Kind.PARAMETERS})
_EMPTY = memoryview(bytearray())
MAX_TRAILER_BYTES = 1 << 16


class Connection:
    """One authenticated connection. Used by one thread at a time, except for `abort`."""

    __slots__ = ("_began", "_head_in", "_head_out", "connection")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._head_in = bytearray(_LAYOUT.size)
        self._head_out = bytearray(_LAYOUT.size)
        self._began = b""
        """What has arrived of a trailer, in the place of a payload, together with its header."""

    def send(
        self,
        kind: Kind,
        payload: memoryview = _EMPTY,
        *,
        flags: int = 0,
        version: int = 0,
        examples: int = 0,
        lr: float = 0.0,
        loss: float = 0.0,
        seconds: float = 0.0,
        trailer: bytes = b"",
    ) -> None:
        """Send one frame. `payload` is a view of bytes. Raises OSError where the peer is gone."""
        _LAYOUT.pack_into(self._head_out, 0, kind, flags, len(trailer), version, examples, lr, loss, seconds)
        sent = self.connection.sendmsg((self._head_out, payload, trailer))
        total = _LAYOUT.size + len(payload) + len(trailer)
        if sent != total:
            self._send_rest((memoryview(self._head_out), payload, memoryview(trailer)), sent)

    def _send_rest(self, buffers: tuple[memoryview, ...], sent: int) -> None:
        """Send what the kernel did not take at the first call."""
        for buffer in buffers:
            if sent < len(buffer):
                self.connection.sendall(buffer[sent:])
            sent = max(0, sent - len(buffer))

    def receive(self, payload: memoryview = _EMPTY) -> Frame:
        """Wait for one frame; its payload, where its kind has one, fills `payload` (of exactly that many bytes).

        Raises ConnectionError where the peer is gone, or sends what was not agreed.
        """
        got = self.connection.recvmsg_into((self._head_in, payload))[0]
        if got < _LAYOUT.size:
            self._receive_rest(memoryview(self._head_in), got)
            got = _LAYOUT.size
        frame = Frame._make(_LAYOUT.unpack_from(self._head_in))
        filled = got - _LAYOUT.size
        if frame.kind in _PAYLOAD:
            if filled < len(payload):
                self._receive_rest(payload, filled)
        elif filled > frame.trailer:
            raise ConnectionError("the peer sent bytes that its frame does not announce")
        else:
            self._began = bytes(payload[:filled])
        return frame

    def send_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Send the bytes that follow a frame of kind STATE or STORE, whose header went out by itself."""
        for buffer in buffers:
            self.connection.sendall(buffer)

    def receive_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` with the bytes that follow a frame of kind STATE or STORE; both sides know their sizes."""
        for buffer in buffers:
            self._receive_rest(buffer, 0)

    def receive_trailer(self, frame: Frame) -> bytes:
        """Return the bytes that follow the frame's payload. Raises ConnectionError where they are too many."""
        if frame.trailer > MAX_TRAILER_BYTES:
            raise ConnectionError(f"the peer announces a trailer of {frame.trailer} bytes; at most {MAX_TRAILER_BYTES} are agreed")
        trailer, began = bytearray(frame.trailer), self._began
        self._began = b""
        trailer[: len(began)] = began
        self._receive_rest(memoryview(trailer), len(began))
        return bytes(trailer)

    def _receive_rest(self, buffer: memoryview, filled: int) -> None:
        while filled < len(buffer):
            got = self.connection.recv_into(buffer[filled:], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the peer closed the connection")
            filled += got

    def abort(self) -> None:
        """Wake whoever waits on this connection, from any thread; it is of no use afterwards."""
        with contextlib.suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
