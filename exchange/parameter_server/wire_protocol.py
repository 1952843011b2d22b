"""Messages to a parameter server.

A connection begins with a hello (`exchange.authentication`), then frames follow.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

from ...core.listener import Exchange
from ..authentication import admit_client
from ..authentication import connect as open_connection
from .shards import Vector, bytes_of

# A frame is a fixed header, then raw float32 bytes; sizes to allocate never come from the peer, and trailers are bounded.


class Kind(IntEnum):
    """The meaning of a frame. Header fields that a kind does not name are 0."""

    READY = 1  # worker to chief: warmed up and waiting for a ticket
    PULL = 2  # worker to a shard: send the parameters
    PUSH = 3  # worker to shard: gradient, buffers' old − new; version = version read, lr, examples = step; to the chief loss, busy seconds
    SUMS = 4  # worker to chief: a piece of an evaluation; trailer: sums, float64, in the objective's order
    FETCH = 5  # chief to a shard: send all of the state
    STORE = 6  # chief to a shard: the new state follows, piece by piece; version = updates
    END = 7  # chief to a shard: stop serving; worker to a shard: goodbye (no reply)
    ECHO = 8  # worker to a shard: answer with DONE; times the exchange of small messages
    CALIBRATED = 9  # worker to chief: a component was repeated; examples = how often, seconds = how long
    JOIN = 10  # worker to a shard, first: send the parameters; to all but the chief version = its generation
    END_LEASE = 11  # chief to shard: refuse a worker's pushes; examples = worker, version = generation, trailer = last step, int64
    PARAMETERS = 16  # shard to worker; trailer: next ticket; chief's reply to JOIN: examples = generation; fp16: loss = next scale
    STATE = 17  # shard to chief: its state follows, piece by piece; version = updates
    DONE = 18  # the request is done; after END_LEASE version = 1 if that step was applied here, else 0


class Figures(NamedTuple):
    """The numbers that a frame carries; see `Kind`. The chief sends the loss scale as `loss`."""

    lr: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0


NO_FIGURES = Figures()


class Frame(NamedTuple):
    """Header of a message: 8 + 5·8 bytes, little endian.

    `trailer` is the number of bytes after header and payload.
    """

    kind: int
    flags: int
    trailer: int
    version: int
    examples: int
    lr: float
    loss: float
    seconds: float


OVERFLOWED = 2  # flag of PUSH: count the update, but change nothing
AVERAGED = 4  # flag of PULL: send moving averages, for an evaluation
REFRESH_SHARDS = 1  # flag of PARAMETERS: fetch the other shards' parameters again
NO_STEP = -1  # of a PUSH outside training
_LAYOUT = struct.Struct("<BBxxIqqddd")
_PAYLOAD = frozenset({Kind.PUSH, Kind.PARAMETERS})
_EMPTY = memoryview(bytearray())
MAX_TRAILER_BYTES = 1 << 16


class Connection:
    """An authenticated connection. Used by one thread at a time, except for `abort`."""

    __slots__ = ("_head_in", "_head_out", "_trailer_prefix", "connection")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._head_in = bytearray(_LAYOUT.size)
        self._head_out = bytearray(_LAYOUT.size)
        self._trailer_prefix = b""  # the part of a trailer that arrived with its header

    def send(
        self,
        kind: Kind,
        payload: memoryview = _EMPTY,
        *,
        flags: int = 0,
        version: int = 0,
        examples: int = 0,
        figures: Figures = NO_FIGURES,
        trailer: bytes = b"",
    ) -> None:
        """Send one frame; `payload` is a view of bytes. Raises OSError."""
        _LAYOUT.pack_into(self._head_out, 0, kind, flags, len(trailer), version, examples, *figures)
        sent = self.connection.sendmsg((self._head_out, payload, trailer))
        total = _LAYOUT.size + len(payload) + len(trailer)
        if sent != total:
            self._send_rest((memoryview(self._head_out), payload, memoryview(trailer)), sent)

    def _send_rest(self, buffers: tuple[memoryview, ...], sent: int) -> None:
        for buffer in buffers:
            if sent < len(buffer):
                self.connection.sendall(buffer[sent:])
            sent = max(0, sent - len(buffer))

    def receive(self, payload: memoryview = _EMPTY) -> Frame:
        """Wait for a frame; its payload, if any, fills `payload` exactly.

        Raises ConnectionError for a lost or wrong peer.
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
            self._trailer_prefix = bytes(payload[:filled])
        return frame

    def send_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Send the bytes after a frame of kind STATE or STORE."""
        for buffer in buffers:
            self.connection.sendall(buffer)

    def receive_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` with the bytes after a frame of kind STATE or STORE.

        Both sides know the sizes.
        """
        for buffer in buffers:
            self._receive_rest(buffer, 0)

    def receive_trailer(self, frame: Frame) -> bytes:
        """Return the bytes after the frame's payload. Raises ConnectionError for too many."""
        if frame.trailer > MAX_TRAILER_BYTES:
            raise ConnectionError(f"the peer announces a trailer of {frame.trailer} bytes; at most {MAX_TRAILER_BYTES} are agreed")
        trailer, prefix = bytearray(frame.trailer), self._trailer_prefix
        self._trailer_prefix = b""
        trailer[: len(prefix)] = prefix
        self._receive_rest(memoryview(trailer), len(prefix))
        return bytes(trailer)

    def _receive_rest(self, buffer: memoryview, filled: int) -> None:
        while filled < len(buffer):
            got = self.connection.recv_into(buffer[filled:], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the peer closed the connection")
            filled += got

    def abort(self) -> None:
        """Wake threads that wait on this connection, from any thread; it is useless afterwards."""
        with contextlib.suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


PROTOCOL = 2
_MAGIC = b"ctps"
_HELLO_LAYOUT = struct.Struct("<4sHBxIQ")
_ROLES: tuple[Literal["chief", "worker"], ...] = ("chief", "worker")


class Hello(NamedTuple):
    """A connecting task (role and index), and the size in elements of the shard that it expects."""

    role: Literal["chief", "worker"]
    place: int
    elements: int

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _HELLO_LAYOUT.pack(_MAGIC, PROTOCOL, _ROLES.index(self.role), self.place, self.elements)

    @classmethod
    def read(cls, data: bytes) -> Hello:
        """Read what `packed` wrote. Raises ConnectionError for another protocol."""
        magic, protocol, role, place, elements = _HELLO_LAYOUT.unpack(data)
        if magic != _MAGIC or protocol != PROTOCOL or role >= len(_ROLES):
            raise ConnectionError(f"it does not speak protocol {PROTOCOL} of the parameter server")
        return cls(_ROLES[role], place, elements)


def admit(exchange: Exchange, secret: str, elements: int) -> Hello:
    """Check a client, reading at most 84 bytes.

    Raises OSError, with the reason, if it must not join.
    """

    def check(hello: Hello) -> None:
        if hello.elements != elements:
            raise ConnectionError(f"it expects a shard of {hello.elements} elements, this one has {elements}")

    return admit_client(exchange, secret, _HELLO_LAYOUT.size, Hello.read, check)


def connect(endpoint: tuple[str, int], secret: str, hello: Hello, deadline: float) -> Connection:
    """Connect to a shard and greet it, until `deadline` (time.monotonic). Raises RunFailedError."""
    return Connection(open_connection(endpoint, secret, hello.packed(), deadline, "the parameter server"))


class WorkerLinks:
    """Workers' connections, for their threads.

    `dismiss` ends a worker's wait for a ticket, `readmit` frees its place.
    """

    def __init__(self, dismiss: Callable[[int], None], readmit: Callable[[int], None]) -> None:
        self._dismiss, self._readmit = dismiss, readmit
        self._changed = threading.Condition()
        self._links: dict[int, Connection] = {}
        self._generations: Counter[int] = Counter()
        self._newest: dict[int, float] = {}

    def enter(self, worker: int, link: Connection, arrival: float) -> int:
        """Wait for the worker's place; return its generation.

        Raises ConnectionError if a later `arrival` has come.
        """
        with self._changed:
            newest = self._newest[worker] = max(arrival, self._newest.get(worker, arrival))
            while worker in self._links and arrival == newest:
                self.cut(worker)
                self._changed.wait()
                newest = self._newest[worker]
            if arrival != newest:
                raise ConnectionError("another has come in its place")
            self._links[worker] = link
            self._generations[worker] += 1
            return self._generations[worker]

    def leave(self, worker: int) -> None:
        """Free the place, after the worker's ticket was returned."""
        with self._changed:
            del self._links[worker]
            self._readmit(worker)
            self._changed.notify_all()

    def cut(self, worker: int) -> None:
        """End a worker's connection, if any."""
        with self._changed:
            if worker in self._links:
                self._links[worker].abort()
                self._dismiss(worker)


log = logging.getLogger(__name__)


class ShardLinks:
    """Connections to all servers, one each, in order.

    Thread-safe; all methods but `close` raise OSError for a lost server.
    """

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
        """Have all servers refuse a worker's further pushes.

        Return whether all have applied its last step.
        """
        question = (NO_STEP if last_step is None else last_step).to_bytes(8, "little", signed=True)
        with self._lock:
            for link in self._links:
                link.send(Kind.END_LEASE, examples=worker, version=generation, trailer=question)
            answers = [link.receive() for link in self._links]
        return all(answer.version for answer in answers)

    def close(self, seconds: float) -> None:
        """End the servers, each within `seconds`; log those that do not."""
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
