"""Messages of the control protocol: a JSON header line, then the raw bytes of arrays."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import select
import socket
import stat
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, Union

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROTOCOL = 17  # incremented with every change; driver and agents have to agree
MAX_STACK_CHARACTERS = 32 * 1024  # stacks of one task
MAX_PEERS_PROBED = 32  # nodes that one node probes for the driver
MAX_ERROR_CHARACTERS = 4000  # error of a task, or problem of a host
MAX_HEADER_BYTES = 2 * 2**20  # ten thousand arrays take half of it; hostile headers take 50 × their bytes in memory
MAX_ARRAY_BYTES = 32 * 2**20  # all arrays of a message: logits, states and files come in pieces
MAX_PREFACE_BYTES = 16 * 2**20  # output of a node's shell before the agent's first message
HEADER_WEIGHT = 50  # bytes of memory per byte of a header, at most (a list of empty lists)
FILE_PIECE_BYTES = 8 * 2**20  # largest piece of a file sent to the driver
MAX_PROBE_SECONDS = 32_767  # Linux's maximum of TCP_KEEPIDLE and TCP_KEEPINTVL
MAX_DIMENSIONS = 64  # as in numpy
Size = Annotated[int, msgspec.Meta(ge=0)]


def _plain(value: object) -> float:
    """Return a number of another type, such as numpy's, as a float. Raises TypeError."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} does not travel: {value!r:.100}")


class ProtocolError(ConnectionError):
    """Invalid message of a peer."""


class RawArray(NamedTuple):
    """Array in a message: numpy's type string, shape, and bytes in C order."""

    dtype: str
    shape: Sequence[int]
    data: bytes | bytearray | memoryview


Arrays = Mapping[str, "RawArray | NDArray[Any]"]


def _numpy(raw: RawArray | NDArray[Any]) -> NDArray[Any]:
    """Return an array without a copy. Raises ProtocolError for arrays of Python objects."""
    import numpy as np

    if not isinstance(raw, RawArray):
        return raw
    dtype = np.dtype(raw.dtype)
    if dtype.hasobject:
        raise ProtocolError("arrays of Python objects do not travel")
    return np.frombuffer(raw.data, dtype=dtype).reshape(raw.shape)


class WireMessage(
    msgspec.Struct,
    tag_field="kind",
    tag=lambda name: re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower(),
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
):
    """Base of the typed messages.

    `ARRAYS` has numpy's type and the dimensions of each array; optional ones are in `OPTIONAL`.
    """

    ARRAYS: ClassVar[Mapping[str, tuple[str, int]]] = {}
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    MAX_BYTES: ClassVar[int] = MAX_ARRAY_BYTES  # of each array

    arrays: Any = None  # of type `Arrays`; on the wire their names, types, shapes and sizes

    @property
    def kind(self) -> str:
        """The name of the message's type on the wire."""
        return str(self.__struct_config__.tag)

    def array(self, name: str) -> NDArray[Any]:
        """Return an array without a copy."""
        return _numpy(self.arrays[name])


class Message:
    """Message as it travels: its header's line without newline, and its arrays.

    A `MessageParser` decodes it; agents pass on those of tasks without decoding them.
    """

    __slots__ = ("arrays", "kind", "line", "to")

    def __init__(self, kind: str, line: bytes, arrays: Arrays | None = None, to: str | None = None) -> None:
        self.kind = kind
        self.line = line
        self.arrays: Arrays = arrays or {}
        self.to = to  # the task to which an agent sends it on

    @property
    def protocol(self) -> int | None:
        """The protocol that a greeting of any release names; None if it names none."""
        try:
            return _GREETING.decode(self.line).protocol
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None

    @classmethod
    def from_typed(cls, message: WireMessage) -> Message:
        """Return a typed message without its arrays, to send it on."""
        return cls(message.kind, _ENCODER.encode(message))

    def sent_by(self, task: str) -> Message:
        """Return the message with the field ``from``, last and without decoding it."""
        return Message(self.kind, self.line.rstrip()[:-1] + b',"from":' + msgspec.json.encode(task) + b"}", self.arrays)


M = TypeVar("M", bound=WireMessage)


class MessageParser(Generic[M]):
    """Decodes messages of these bases' types.

    The types are inspected once: threads that do so at the same time would crash msgspec 0.22.
    """

    def __init__(self, *bases: type[M]) -> None:
        kinds = tuple({kind: None for base in bases for kind in _leaves(base)})
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(Union[kinds])  # noqa: UP007 — of a tuple of types

    def parse(self, message: Message) -> M:
        """Return the typed message, with types and bounds checked. Raises ProtocolError."""
        try:
            parsed = self._decoder.decode(message.line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message {message.kind[:100]!r} that is none ({str(error)[:300]})") from error
        arrays = {name: _raw(array) for name, array in message.arrays.items()}
        if (wrong := _wrong_with_arrays(parsed, arrays)) is not None:
            raise ProtocolError(f"a message {message.kind!r} {wrong}")
        parsed.arrays = arrays or None
        return parsed


def _leaves(base: type[Any]) -> Iterator[type[Any]]:
    for kind in base.__subclasses__():
        yield from _leaves(kind)
    if not base.__subclasses__():
        yield base


def _wrong_with_arrays(parsed: WireMessage, arrays: Mapping[str, RawArray]) -> str | None:
    for name in arrays:
        if name not in parsed.ARRAYS:
            return f"with an array {name[:100]!r}"
    for name, (dtype, dimensions) in parsed.ARRAYS.items():
        array = arrays.get(name)
        if array is None and name in parsed.OPTIONAL:
            continue
        if array is None:
            return f"without its array {name!r}"
        if array.dtype != dtype or len(array.shape) != dimensions or math.prod(array.shape) * int(dtype[2:]) != len(array.data):
            return f"whose array {name!r} is of another type or shape"
        if len(array.data) > parsed.MAX_BYTES:
            return f"of {len(array.data)} bytes"
    return None


class Header(msgspec.Struct):
    """First line of a message, with its arrays' names, types, shapes and bytes."""

    kind: str
    to: str | None = None
    arrays: list[tuple[str, str, Annotated[list[Size], msgspec.Meta(max_length=MAX_DIMENSIONS)], Size]] = []

    @property
    def array_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(size for *_, size in self.arrays)

    def message(self, line: bytes, memory: memoryview) -> Message:
        """Return the message of this line, whose arrays' bytes are in `memory`."""
        arrays = {}
        for name, dtype, shape, size in self.arrays:
            arrays[name], memory = RawArray(dtype, shape, memory[:size]), memory[size:]
        return Message(self.kind, line[:-1], arrays, self.to)


ProtocolNumber = Annotated[int, msgspec.Meta(ge=0, le=10**6)]


class _Greeting(msgspec.Struct):
    protocol: ProtocolNumber | None = None


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_HEADER = msgspec.json.Decoder(Header)
_GREETING = msgspec.json.Decoder(_Greeting)


def encoded(message: Message | WireMessage) -> list[bytes | bytearray | memoryview]:
    """Return a message's bytes in pieces; arrays in C order are not copied."""
    arrays = {name: _raw(array) for name, array in (message.arrays or {}).items()}
    if isinstance(message, Message):
        line = message.line
    elif arrays:
        listed = [[name, array.dtype, list(array.shape), len(array.data)] for name, array in arrays.items()]
        line = _ENCODER.encode(msgspec.structs.replace(message, arrays=listed))
    else:
        line = _ENCODER.encode(message)
    return [line + b"\n", *(array.data for array in arrays.values() if len(array.data))]


def _decode_header(line: bytes) -> Header:
    """Parse in a quarter of `json.loads`' time; fall back to it for NaN and lone surrogates.

    The message's type then refuses these.
    """
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return _HEADER.decode(line.decode())
    return msgspec.convert(json.loads(line), Header)


def parse_header(line: bytes) -> Header:
    """Return the header in a message's first line. Raises ProtocolError."""
    try:
        header = _decode_header(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {line[:80]!r}") from error
    if header.array_bytes > MAX_ARRAY_BYTES:
        raise ProtocolError("arrays of more bytes than a message may have")
    return header


class Detached(NamedTuple):
    """Descriptors of a stream for non-blocking use, owned by their holder.

    `held` bytes are read ahead; call `begun` after the line `begins_after`.
    """

    reading: int
    writing: int
    held: bytes
    begins_after: bytes | None
    begun: Callable[[], None]


class ReusableBuffer:
    """Memory for one message's arrays; fresh memory per chunk costs more than forwarding it."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, size: int) -> memoryview:
        """Return `size` bytes, overwritten by the next call."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]


class Stream:
    """Messages over a pair of binary files. Threads may send, cut and close; only one receives.

    All up to the line `begins_after` is skipped.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes], begins_after: bytes | None = None) -> None:
        self._reader: Any = reader  # buffered binary files have readinto too
        self.writer = writer
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
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

    def send(self, message: Message | WireMessage) -> None:
        """Write a message and flush. Raises OSError (BrokenPipeError) where the peer is gone."""
        parts = encoded(message)
        with self._lock:
            for part in parts:
                self.writer.write(part)
            self.writer.flush()

    def receive(self, room: ReusableBuffer | None = None) -> Message | None:
        """Read a message; None at the end.

        Raises ProtocolError if it is invalid, ConnectionError where the stream ends within it.
        """
        if not self.begun and not self._skip_preface():
            return None
        line = self._reader.readline(MAX_HEADER_BYTES)
        self._taken_bytes += len(line)
        if not line.endswith(b"\n"):
            if len(line) == MAX_HEADER_BYTES:
                raise ProtocolError("a header that is too long")
            return None
        header = parse_header(line)
        memory = (room or ReusableBuffer()).take(header.array_bytes)
        self._fill(memory)
        return header.message(line, memory)

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
        """End a connection immediately, also under blocked threads.

        Pipes and closed connections ignore it.
        """
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

    def detach(self) -> Detached:
        """Hand over the connection for non-blocking use, and stop using it here.

        Raises OSError or ValueError once closed.
        """
        reading = self._duplicate(self._reader)
        same = self._reader.fileno() == self.writer.fileno()
        writing = reading if same else self._duplicate(self.writer)
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        waiting = self._reader.peek()  # includes later arrivals, as nothing blocks now
        return Detached(reading, writing, self._reader.read1(len(waiting)) if waiting else b"", self._begins_after, self._begin)

    def _begin(self) -> None:
        self._begins_after = None

    def _connections(self) -> list[socket.socket]:
        connections = []
        for file in (self._reader, self.writer):
            with suppress(OSError, ValueError):  # closed
                descriptor = self._duplicate(file)
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    connections.append(socket.socket(fileno=descriptor))
                else:
                    os.close(descriptor)
        return connections

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
    probe = max(1, min(int(seconds / 3), MAX_PROBE_SECONDS))
    wanted = {"TCP_KEEPIDLE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": min(int(seconds * 1000), 2**31 - 1)}
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _raw(array: RawArray | NDArray[Any]) -> RawArray:
    if isinstance(array, RawArray):
        return array
    import numpy as np

    flat = np.ascontiguousarray(array)
    return RawArray(flat.dtype.str, array.shape, flat.data.cast("B") if flat.nbytes else b"")


INTERVAL_SECONDS = 1.0  # heartbeat of either side, where it sends nothing else


class Alive(WireMessage):
    """Heartbeat."""

    ARRIVES: ClassVar = "always"


ALIVE = Alive()
ALIVE_LINE = _ENCODER.encode(ALIVE)


class ImpossibleAnswerError(Exception):
    """Impossible answer of a leading task, which fails the run."""
