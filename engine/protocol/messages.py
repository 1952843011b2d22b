"""The control protocol's messages: a JSON header line, then raw bytes where the message carries arrays.

The same framing serves between driver and agent and between agent and task. Arrays are never written as JSON, and whoever only passes a
message on never looks into them: an agent starts without numpy.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import socket
import stat
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FILE_PIECE_BYTES",
    "MOST_ERROR_CHARACTERS",
    "MOST_PEERS_PROBED",
    "MOST_STACK_CHARACTERS",
    "PROTOCOL",
    "Header",
    "Lent",
    "Message",
    "PreparedJson",
    "ProtocolError",
    "RawArray",
    "ReusableBuffer",
    "Stream",
    "encoded",
    "header_of",
]

PROTOCOL = 15
"""Raised by one with every change of what is said, or when; driver and agents have to agree on it."""

MOST_STACK_CHARACTERS = 32 * 1024
"""Of what a node tells of where one of its tasks stands."""

MOST_PEERS_PROBED = 32
"""How many other nodes one node tries to reach, where its driver wants to know."""

MOST_ERROR_CHARACTERS = 4000
"""Of what a task says of an error that ends it, whose first line is in the run's status, and a host of what is wrong there."""

MAX_HEADER_BYTES = 2 * 2**20
"""A state of ten thousand arrays is described in half of that; what a hostile header is read into takes fifty times its bytes."""

MAX_ARRAY_BYTES = 32 * 2**20
"""Of the arrays of one message together: logits come in blocks, and states and files in chunks."""

MAX_PREFACE_BYTES = 16 * 2**20
"""Of what a node's shell prints before the agent's first message."""

HEADER_WEIGHT = 50
"""How many bytes of memory a byte of a header takes at most, once it is read: a list of empty lists does."""

FILE_PIECE_BYTES = 8 * 2**20
"""Files travel to the driver in pieces of at most this size."""

MOST_PROBE_SECONDS = 32_767
"""The most that Linux takes for TCP_KEEPIDLE and TCP_KEEPINTVL."""

MOST_DIMENSIONS = 64
"""As many as numpy has."""

_dumps = json.JSONEncoder(separators=(",", ":")).encode


class ProtocolError(ConnectionError):
    """The peer sent something that is not a message."""


class RawArray(NamedTuple):
    """An array as it travels: numpy's type string, the shape, and the bytes in C order."""

    dtype: str
    shape: Sequence[int]
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Message:
    """A message: what kind it is, JSON-ready fields, and arrays by name."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, RawArray | NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or `default` where the message has none of this name."""
        return self.fields.get(key, default)

    def array(self, name: str) -> NDArray[Any]:
        """Return an array of the message in numpy, without a copy. Raises ProtocolError for types that must not travel."""
        import numpy as np

        raw = self.arrays[name]
        if not isinstance(raw, RawArray):
            return raw
        dtype = np.dtype(raw.dtype)
        if dtype.hasobject:
            raise ProtocolError("arrays of Python objects do not travel")
        return np.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)


class Header(NamedTuple):
    """What the first line of a message says. `described`: each array's name, type, shape and bytes, which follow in this order.

    `weight` is about how many bytes of memory the message takes, with its arrays.
    """

    kind: str
    fields: dict[str, Any]
    described: Sequence[tuple[str, str, list[int], int]]
    array_bytes: int
    weight: int


def encoded(message: Message) -> list[bytes | bytearray | memoryview]:
    """Return the bytes of a message, in pieces that follow each other; arrays are not copied where they lie in C order."""
    arrays = {name: _raw(array) for name, array in message.arrays.items()}
    header: dict[str, Any] = {"kind": message.kind, **message.fields}
    if arrays:
        header["arrays"] = [[name, array.dtype, list(array.shape), len(array.data)] for name, array in arrays.items()]
    try:
        text = _dumps(header)
    except TypeError:
        text = _dumps_with_prepared(header)
    return [text.encode() + b"\n", *(array.data for array in arrays.values() if len(array.data))]


def _dumps_with_prepared(header: Mapping[str, Any]) -> str:
    found: list[PreparedJson] = []

    def stand_in(value: object) -> str:
        if not isinstance(value, PreparedJson):
            raise TypeError(f"{type(value).__name__} does not travel: {value!r:.100}")
        found.append(value)
        return value.stand_in

    text = json.JSONEncoder(separators=(",", ":"), default=stand_in).encode(header)
    for prepared in found:
        text = text.replace(f'"{prepared.stand_in}"', prepared.text)
    return text


def header_of(line: bytes | bytearray, parse: Callable[[bytes | bytearray], Any] = json.loads) -> Header:
    """Return what the first line of a message says; `parse` reads JSON. Raises ProtocolError for what is no such line."""
    try:
        header = parse(line)
        kind = header.pop("kind")
        if not isinstance(kind, str):
            raise TypeError("a kind that is no text")
        described = [_described(*entry) for entry in header.pop("arrays", ())]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a message: {bytes(line[:80])!r}") from error
    total = sum(size for *_, size in described)
    if total > MAX_ARRAY_BYTES:
        raise ProtocolError("arrays of more bytes than a message may have")
    return Header(kind, header, described, total, HEADER_WEIGHT * len(line) + total)


class Lent(NamedTuple):
    """What `Stream.lend` gives: descriptors for `reading` and `writing`, the same one where it serves both, which belong to the borrower.

    `held` are bytes that have been read and belong to no message that was received. What precedes the line `begins_after`, where there is
    such a line, is to be skipped, and `begun` to be called after it.
    """

    reading: int
    writing: int
    held: bytes
    begins_after: bytes | None
    begun: Callable[[], None]


class PreparedJson:
    """A value among the fields of many messages, such as the description of a large cluster, that is written as JSON once for all."""

    def __init__(self, value: Any) -> None:
        self.text = _dumps(value)
        self.stand_in = secrets.token_hex(16)  # no other text of a message is that


class ReusableBuffer:
    """Memory for the arrays of one message after another, for whoever is done with each message before the next is received.

    Fresh memory for each chunk of a state would take longer than the chunk's way through a process that passes it on.
    """

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, size: int) -> memoryview:
        """Return so many bytes, which may be overwritten after the next call."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]


class Stream:
    """Messages over a pair of binary files. Sending is safe from several threads; receiving belongs to one.

    Cutting and closing are safe from any thread, and wait for none. `weight` is about how many bytes of memory the message takes that was
    received last. What precedes the line `begins_after` is skipped, where there is such a line; `begun`: it has come.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes], begins_after: bytes | None = None) -> None:
        self._reader: Any = reader  # has readinto besides, as every buffered binary file
        self._writer = writer
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self.weight = 0
        self._taken_bytes = 0
        self._begins_after = begins_after

    @property
    def reader(self) -> IO[bytes]:
        """The file that is received from."""
        file: IO[bytes] = self._reader
        return file

    @property
    def writer(self) -> IO[bytes]:
        """The file that is sent to."""
        return self._writer

    @property
    def begun(self) -> bool:
        """Whether the next that is received is a message."""
        return self._begins_after is None

    def send(self, message: Message) -> None:
        """Write one message and flush. Raises OSError (BrokenPipeError) where the peer is gone."""
        parts = encoded(message)
        with self._lock:
            for part in parts:
                self._writer.write(part)
            self._writer.flush()

    def receive(self, room: ReusableBuffer | None = None) -> Message | None:
        """Read one message; None at the end of the stream. Its arrays lie in `room` if given, else in memory of their own.

        Raises ProtocolError for anything that is not a message, ConnectionError where the stream ends within one.
        """
        if not self.begun and not self._skip_preface():
            return None
        line = self._reader.readline(MAX_HEADER_BYTES)
        self._taken_bytes += len(line)
        if not line.endswith(b"\n"):
            if len(line) == MAX_HEADER_BYTES:
                raise ProtocolError("a header that is too long")
            return None
        header = header_of(line)
        self.weight = header.weight
        memory = None if room is None else room.of(header.array_bytes)
        arrays: dict[str, RawArray] = {}
        for name, dtype, shape, size in header.described:
            if memory is None:
                data = memoryview(bytearray(size))
            else:
                data, memory = memory[:size], memory[size:]
            self._fill(data)
            arrays[name] = RawArray(dtype, shape, data)
        return Message(header.kind, header.fields, arrays)

    def _skip_preface(self) -> bool:
        """Read up to the line after which the messages begin; return whether it came. Raises ProtocolError where too much precedes it."""
        while line := self._reader.readline(MAX_HEADER_BYTES):
            self._taken_bytes += len(line)
            if line.rstrip(b"\r\n") == self._begins_after:
                self._begins_after = None
                return True
            if self._taken_bytes > MAX_PREFACE_BYTES:
                raise ProtocolError("too much before its first message")
        return False

    def _fill(self, data: memoryview) -> None:
        while data:
            count = self._reader.readinto1(data)  # as much as there is, so that what arrives slowly is seen to arrive
            if not count:
                raise ConnectionError("the stream ended within an array")  # whoever sent it has gone, and did nothing wrong
            self._taken_bytes += count
            data = data[count:]

    def cut(self) -> None:
        """End a connection at once, also under threads that read or write; does nothing to pipes, or where it is closed already."""
        for connection in self._connections():
            with connection, suppress(OSError):  # the peer may be gone already
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def peer_ended(self) -> bool:
        """Whether the peer has ended a connection, however much of what it said is still unread; False for pipes."""
        for connection in self._connections():
            with connection:
                poll = select.poll()
                poll.register(connection, getattr(select, "POLLRDHUP", 0))
                if poll.poll(0):
                    return True
        return False

    def limit_silence(self, seconds: float) -> None:
        """Have the system end a connection over TCP whose peer acknowledges nothing for so long, also while nothing is sent."""
        for connection in self._connections():
            with connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    _limit_silence(connection, seconds)

    def when_open(self, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as there is a connection behind the stream, or none will come: at once, unless that is still awaited."""
        begin()

    def lend(self) -> Lent:
        """Give what lies behind to whoever reads and writes it from now on without blocking; nobody may send or receive here any more.

        The stream keeps its own files: what they lead to ends when those who have borrowed it have closed theirs too, or by `cut`. Raises
        OSError or ValueError where it has been closed.
        """
        reading = self._duplicate(self._reader)
        same = self._reader.fileno() == self._writer.fileno()
        writing = reading if same else self._duplicate(self._writer)
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        waiting = self._reader.peek()  # of what has arrived in the meantime, too: nothing blocks any more
        return Lent(reading, writing, self._reader.read1(len(waiting)) if waiting else b"", self._begins_after, self._begin)

    def _begin(self) -> None:
        self._begins_after = None

    def _connections(self) -> list[socket.socket]:
        """Return descriptors of our own for the sockets among the files; the caller closes them."""
        found = []
        for file in (self._reader, self._writer):
            with suppress(OSError, ValueError):  # it has been closed
                descriptor = self._duplicate(file)
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    found.append(socket.socket(fileno=descriptor))
                else:
                    os.close(descriptor)
        return found

    def _duplicate(self, file: IO[bytes]) -> int:
        """Return a descriptor of our own for a file. Raises ValueError once the stream is closed, when its number may be another file's."""
        with self._closing:
            if self._closed:
                raise ValueError("the stream is closed")
            return os.dup(file.fileno())

    @property
    def unread_bytes(self) -> int:
        """Bytes that have arrived and were not taken by this process yet; 0 where the stream has been closed."""
        count = bytearray(4)
        with self._closing, suppress(OSError, ValueError):
            if not self._closed:
                fcntl.ioctl(self._reader.fileno(), termios.FIONREAD, count)
        return int.from_bytes(count, sys.byteorder)

    @property
    def arrivals(self) -> tuple[int, int]:
        """Figures that change whenever something arrives, be it a part of a message or while this process is busy with another."""
        return self._taken_bytes, self.unread_bytes

    def close(self) -> None:
        """Close both directions; errors of a peer that is gone are of no interest here."""
        self.cut()  # closing would wait for a thread that reads
        with self._closing:
            self._closed = True
        for file in (self._writer, self._reader):
            try:
                file.close()
            except OSError:
                continue


def _limit_silence(connection: socket.socket, seconds: float) -> None:
    """Set what the system has of: probes after a third of the time and at each further one, and the time until all is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, min(int(seconds / 3), MOST_PROBE_SECONDS))
    wanted = {"TCP_KEEPIDLE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": min(int(seconds * 1000), 2**31 - 1)}
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _described(name: object, dtype: object, shape: object, size: object) -> tuple[str, str, list[int], int]:
    """Return what a header says of an array. Raises TypeError or ValueError where it says no such thing."""
    sizes = [size, *shape] if isinstance(shape, list) else []
    if not (isinstance(name, str) and isinstance(dtype, str) and sizes and all(type(each) is int for each in sizes)):
        raise TypeError("an array without a name, a type, a shape and a size")
    if any(each < 0 for each in sizes) or len(sizes) > MOST_DIMENSIONS:
        raise ValueError("an array of no such shape")
    return name, dtype, sizes[1:], sizes[0]


def _raw(array: RawArray | NDArray[Any]) -> RawArray:
    if isinstance(array, RawArray):
        return array
    import numpy as np

    flat = np.ascontiguousarray(array)
    return RawArray(flat.dtype.str, array.shape, flat.data.cast("B") if flat.nbytes else b"")
