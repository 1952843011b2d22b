"""Messages of the control protocol: a JSON header line, then the raw bytes of arrays."""

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

from ...core.errors import TrainerError
from ...core.liveness import told_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROTOCOL = 15  # incremented with every change; driver and agents have to agree
MOST_STACK_CHARACTERS = 32 * 1024  # stacks of one task
MOST_PEERS_PROBED = 32  # nodes that one node probes for the driver
MOST_ERROR_CHARACTERS = 4000  # error of a task, or problem of a host
MAX_HEADER_BYTES = 2 * 2**20  # ten thousand arrays take half of it; hostile headers take 50 × their bytes in memory
MAX_ARRAY_BYTES = 32 * 2**20  # all arrays of a message: logits, states and files come in pieces
MAX_PREFACE_BYTES = 16 * 2**20  # output of a node's shell before the agent's first message
HEADER_WEIGHT = 50  # bytes of memory per byte of a header, at most (a list of empty lists)
FILE_PIECE_BYTES = 8 * 2**20  # largest piece of a file sent to the driver
MOST_PROBE_SECONDS = 32_767  # Linux's maximum of TCP_KEEPIDLE and TCP_KEEPINTVL
MOST_DIMENSIONS = 64  # as in numpy
_dumps = json.JSONEncoder(separators=(",", ":")).encode


class ProtocolError(ConnectionError):
    """Invalid message of a peer."""


class RawArray(NamedTuple):
    """Array in a message: numpy's type string, shape, and bytes in C order."""

    dtype: str
    shape: Sequence[int]
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Message:
    """Kind, JSON-ready fields, and arrays by name."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, RawArray | NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field or `default`."""
        return self.fields.get(key, default)

    def array(self, name: str) -> NDArray[Any]:
        """Return an array without a copy. Raises ProtocolError for arrays of Python objects."""
        import numpy as np

        raw = self.arrays[name]
        if not isinstance(raw, RawArray):
            return raw
        dtype = np.dtype(raw.dtype)
        if dtype.hasobject:
            raise ProtocolError("arrays of Python objects do not travel")
        return np.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)


class Header(NamedTuple):
    """First line of a message, with its arrays; `weight`: approximate bytes of memory of the message."""

    kind: str
    fields: dict[str, Any]
    described: Sequence[tuple[str, str, list[int], int]]
    array_bytes: int
    weight: int


def encoded(message: Message) -> list[bytes | bytearray | memoryview]:
    """Return a message's bytes in pieces; arrays in C order are not copied."""
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
    """Return the header in a message's first line. Raises ProtocolError."""
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
    """Descriptors of `Stream.lend`, owned by the borrower: `held` bytes are read ahead; call `begun` after the line `begins_after`."""

    reading: int
    writing: int
    held: bytes
    begins_after: bytes | None
    begun: Callable[[], None]


class PreparedJson:
    """Large value in the fields of many messages, encoded as JSON once."""

    def __init__(self, value: Any) -> None:
        self.text = _dumps(value)
        self.stand_in = secrets.token_hex(16)  # unique in a message


class ReusableBuffer:
    """Memory for one message's arrays; fresh memory per chunk costs more than forwarding it."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, size: int) -> memoryview:
        """Return `size` bytes, overwritten by the next call."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]


class Stream:
    """Messages over a pair of binary files. Threads may send, cut and close; only one receives.

    `weight`: approximate bytes of memory of the last message received. All up to the line `begins_after` is skipped.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes], begins_after: bytes | None = None) -> None:
        self._reader: Any = reader  # buffered binary files have readinto too
        self.writer = writer
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self.weight = 0
        self._taken_bytes = 0
        self._begins_after = begins_after

    @property
    def reader(self) -> IO[bytes]:
        """The file for receiving."""
        file: IO[bytes] = self._reader
        return file

    @property
    def begun(self) -> bool:
        """Whether the next bytes to receive are a message."""
        return self._begins_after is None

    def send(self, message: Message) -> None:
        """Write a message and flush. Raises OSError (BrokenPipeError) where the peer is gone."""
        parts = encoded(message)
        with self._lock:
            for part in parts:
                self.writer.write(part)
            self.writer.flush()

    def receive(self, room: ReusableBuffer | None = None) -> Message | None:
        """Read a message (None at the end). Raises ProtocolError if invalid, ConnectionError where the stream ends within it."""
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
        """Read up to `begins_after`; return whether it came. Raises ProtocolError for too much."""
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
            count = self._reader.readinto1(data)  # partial reads count as activity
            if not count:
                raise ConnectionError("the stream ended within an array")  # the peer is gone, which is no protocol error
            self._taken_bytes += count
            data = data[count:]

    def cut(self) -> None:
        """End a connection at once, also under blocked threads; pipes and closed connections ignore it."""
        for connection in self._connections():
            with connection, suppress(OSError):  # the peer may be gone
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def peer_ended(self) -> bool:
        """Whether the peer has ended a connection, even with unread bytes; False for pipes."""
        for connection in self._connections():
            with connection:
                poll = select.poll()
                poll.register(connection, getattr(select, "POLLRDHUP", 0))
                if poll.poll(0):
                    return True
        return False

    def limit_silence(self, seconds: float) -> None:
        """Have the system end a TCP connection whose peer acknowledges nothing for so many seconds."""
        for connection in self._connections():
            with connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    _limit_silence(connection, seconds)

    def when_open(self, begin: Callable[[], None]) -> None:
        """Call `begin` once the stream is connected or has failed."""
        begin()

    def lend(self) -> Lent:
        """Lend the connection to a non-blocking borrower, and stop using it here. Raises OSError or ValueError once closed."""
        reading = self._duplicate(self._reader)
        same = self._reader.fileno() == self.writer.fileno()
        writing = reading if same else self._duplicate(self.writer)
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        waiting = self._reader.peek()  # includes later arrivals, as nothing blocks now
        return Lent(reading, writing, self._reader.read1(len(waiting)) if waiting else b"", self._begins_after, self._begin)

    def _begin(self) -> None:
        self._begins_after = None

    def _connections(self) -> list[socket.socket]:
        found = []
        for file in (self._reader, self.writer):
            with suppress(OSError, ValueError):  # closed
                descriptor = self._duplicate(file)
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    found.append(socket.socket(fileno=descriptor))
                else:
                    os.close(descriptor)
        return found

    def _duplicate(self, file: IO[bytes]) -> int:
        """Duplicate a descriptor. Raises ValueError once closed, when its number may be reused."""
        with self._closing:
            if self._closed:
                raise ValueError("the stream is closed")
            return os.dup(file.fileno())

    @property
    def unread_bytes(self) -> int:
        """Bytes that arrived and were not read; 0 once closed."""
        count = bytearray(4)
        with self._closing, suppress(OSError, ValueError):
            if not self._closed:
                fcntl.ioctl(self._reader.fileno(), termios.FIONREAD, count)
        return int.from_bytes(count, sys.byteorder)

    @property
    def arrivals(self) -> tuple[int, int]:
        """Figures that change with every arrival, also within a message."""
        return self._taken_bytes, self.unread_bytes

    def close(self) -> None:
        """Close both directions, ignoring errors of a lost peer."""
        self.cut()  # closing would wait for a reading thread
        with self._closing:
            self._closed = True
        for file in (self.writer, self._reader):
            with suppress(OSError):
                file.close()


def _limit_silence(connection: socket.socket, seconds: float) -> None:
    """Set probes after each third of the time and the time-out, where the system has them."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, min(int(seconds / 3), MOST_PROBE_SECONDS))
    wanted = {"TCP_KEEPIDLE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": min(int(seconds * 1000), 2**31 - 1)}
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _described(name: object, dtype: object, shape: object, size: object) -> tuple[str, str, list[int], int]:
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


INTERVAL_SECONDS = 1.0  # heartbeat of either side, where it sends nothing else
ALIVE = Message("alive")


class ImpossibleAnswerError(Exception):
    """Impossible answer of a leading task, which fails the run."""


def error_message(error: BaseException, *, peer_lost: bool) -> Message:
    """Return an error's message; `peer_lost`: its only cause is the loss of a peer."""
    return Message(
        "error",
        {
            "type": _sendable(type(error).__name__),
            "message": _sendable(str(error)),
            "errno": _code(error.errno) if isinstance(error, OSError) else None,
            "exit_code": _code(error.exit_code) if isinstance(error, TrainerError) else None,
            "peer_lost": peer_lost,
            "out_of_memory": None if (told := told_of(error)) is None else _sendable(told),
        },
    )


def _sendable(text: str) -> str:
    """Truncate a text, and escape non-Unicode characters, as in file names."""
    return text.encode(errors="backslashreplace").decode()[:MOST_ERROR_CHARACTERS]


def _code(number: object) -> int | None:
    """Return an error number; None for others, such as the text in ``OSError("could not load", path)``."""
    return number if type(number) is int and -(2**31) <= number < 2**31 else None
