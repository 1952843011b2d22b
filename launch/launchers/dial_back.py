"""The transport of agents that connect to the driver and prove that they know the secret."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ...core.listener import Exchange
from ...engine.protocol.join_messages import Refused
from ...engine.protocol.messages import Detached, MessageParser, ProtocolError, Stream, WireMessage
from ...engine.protocol.transport import accept

J = TypeVar("J", bound=WireMessage)


class Joiner(NamedTuple, Generic[J]):
    """A process that knows the secret, and its first message."""

    stream: Stream
    message: J


def prove(exchange: Exchange, secret: bytes, joins: MessageParser[J]) -> Joiner[J]:
    """Return an authenticated process with its first message, a request to join. Raises OSError."""
    stream = accept(exchange, secret)
    try:
        message = stream.receive()
        if message is None:
            raise ProtocolError("no message")
        return Joiner(stream, joins.parse(message))
    except ProtocolError as error:
        stream.close()
        raise ConnectionError("it knows the secret, but did not ask to join; is it another version of trainer?") from error
    except OSError:
        stream.close()
        raise


def refuse(joiner: Joiner[J], reason: str, *, for_now: bool = False) -> None:
    """Reject an authenticated process. `for_now`: another driver may accept it."""
    with contextlib.suppress(OSError):  # it is gone
        joiner.stream.send(Refused(reason, for_now))
    joiner.stream.close()


class LateStream(Stream):
    """The channel to an agent that has not connected yet; sent data is buffered until `connect`."""

    def __init__(self, begins_after: bytes | None = None) -> None:
        self._late = _LateFiles()
        super().__init__(self._late, self._late, begins_after)  # type: ignore[arg-type] # has what a Stream asks of its files

    def connect(self, joined: Stream) -> bool:
        """Use this connection; return False if this stream has ended."""
        with self._lock:
            connected = self._late.connect(joined)
        if connected:
            self._late.notify_decided()
        return connected

    def give_up_waiting(self) -> None:
        """Stop waiting for the connection."""
        self._late.give_up()
        self._late.notify_decided()

    def cut(self) -> None:
        """End the connection immediately, or the wait for it."""
        self.give_up_waiting()
        super().cut()

    def when_open(self, begin: Callable[[], None]) -> None:
        """Call `begin` once the connection is there or impossible, possibly from another thread."""
        self._late.when_decided(begin)

    def detach(self) -> Detached:
        """See `Stream.detach`. Raises ConnectionError if the connection has not come."""
        with self._lock:
            return self._late.detach()._replace(begins_after=self._begins_after, begun=self._begin)


class _LateFiles:
    def __init__(self) -> None:
        self._joined: Stream | None = None
        self._buffered = bytearray()
        self._changed = threading.Condition()
        self._over = False
        self._begin: Callable[[], None] | None = None

    def connect(self, joined: Stream) -> bool:
        with self._changed:
            if self._over or self._joined is not None:
                return False
            self._joined = joined
            self._changed.notify_all()
        joined.writer.write(bytes(self._buffered))
        joined.writer.flush()
        self._buffered.clear()
        return True

    def give_up(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def when_decided(self, begin: Callable[[], None]) -> None:
        with self._changed:
            self._begin = begin
            decided = self._over or self._joined is not None
        if decided:
            self.notify_decided()

    def notify_decided(self) -> None:
        """Call `begin` once: the connection is there and has the buffered data, or is impossible."""
        with self._changed:
            begin, self._begin = self._begin, None
        if begin is not None:
            begin()

    def detach(self) -> Detached:
        if self._joined is None:
            raise ConnectionError("the channel was closed before the agent had dialled")
        return self._joined.detach()

    def _stream(self) -> Stream:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._joined is not None)
            if self._joined is None:
                raise ConnectionError("the channel was closed before the agent had dialled")
            return self._joined

    def readline(self, limit: int) -> bytes:
        return self._stream().reader.readline(limit)

    def readinto1(self, data: memoryview) -> int:
        count: int = self._stream().reader.readinto1(data)  # type: ignore[attr-defined] # of every buffered binary file
        return count

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._joined is not None:
            return self._joined.writer.write(data)
        if self._over:
            raise BrokenPipeError("the channel was closed before the agent had dialled")
        self._buffered += data
        return len(data)

    def flush(self) -> None:
        if self._joined is not None:
            self._joined.writer.flush()

    def fileno(self) -> int:
        if self._joined is None:
            raise ValueError("there is no connection yet")
        return self._joined.reader.fileno()

    def close(self) -> None:
        self.give_up()
        if self._joined is not None:
            self._joined.close()
