"""Messages over descriptors that never block: put together as their bytes come, in whatever pieces, and written as far as there is room.

The same messages as those of a `Stream`, with the same limits, for whoever serves many peers from one thread.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from itertools import islice
from typing import Any

import msgspec

from .messages import (
    MAX_HEADER_BYTES,
    MAX_PREFACE_BYTES,
    Header,
    Lent,
    Message,
    ProtocolError,
    RawArray,
    encoded,
    header_of,
)

__all__ = ["Incoming", "Outgoing"]

PIECE_BYTES = 2**18
"""Read at a time, from a peer that has so much to say; then it is the next one's turn."""

PIECES_AT_A_TIME = 16
"""Written by one call of the system, which takes 1,024 at most."""

_END = ord("\n")


class Incoming:
    """Puts the messages of one peer together. `arrived_bytes` counts what has come, and `ended`: nothing more comes.

    Belongs to one thread; the descriptor is its own.
    """

    def __init__(self, lent: Lent) -> None:
        self.arrived_bytes = len(lent.held)
        self.ended = False
        self.descriptor = lent.reading
        self._lent = lent
        self._begins_after = lent.begins_after
        self._text = bytearray(lent.held)
        self._searched = 0
        self._header: Header | None = None
        self._arrays: dict[str, RawArray] = {}
        self._room: list[memoryview] = []

    def fill(self) -> bool:
        """Take in a piece of what has arrived; return whether there was any. Raises OSError where the peer is gone."""
        try:
            piece = b""
            if self._room:
                count = os.readv(self.descriptor, [self._room[0][:PIECE_BYTES]])
                self._take_room(count)
            else:
                piece = os.read(self.descriptor, PIECE_BYTES)
                self._text += piece
                count = len(piece)
        except BlockingIOError:
            return False
        self.arrived_bytes += count
        self.ended = self.ended or not count
        return bool(count)

    def next(self) -> tuple[Message, int] | None:
        """Return the next message that is whole, and its weight; None where more has to come.

        Raises ProtocolError for what is no message, or too long for one.
        """
        if self._begins_after is not None and not self._skip_preface():
            return None
        if self._header is None and not self._begin_message():
            return None
        while self._room and self._text:
            size = min(len(self._text), len(self._room[0]))
            self._room[0][:size] = self._text[:size]
            del self._text[:size]
            self._take_room(size)
        header = self._header
        if self._room or header is None:
            return None
        message = Message(header.kind, header.fields, self._arrays)
        self._header, self._arrays = None, {}
        return message, header.weight

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        self.ended = True
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _take_room(self, count: int) -> None:
        """So many bytes of the message's arrays have come."""
        self._room[0] = self._room[0][count:]
        if not self._room[0]:
            del self._room[0]

    def _line(self) -> bytes | None:
        """Return the next line, with its end, where that has come."""
        end = self._text.find(_END, self._searched)
        if end < 0:
            self._searched = len(self._text)
            return None
        line = bytes(self._text[: end + 1])
        del self._text[: end + 1]
        self._searched = 0
        return line

    def _begin_message(self) -> bool:
        line = self._line()
        if len(self._text) >= MAX_HEADER_BYTES if line is None else len(line) > MAX_HEADER_BYTES:
            raise ProtocolError("a header that is too long")
        if line is None:
            return False
        header = header_of(line, _parse)
        for name, dtype, shape, size in header.described:
            data = memoryview(bytearray(size))
            self._arrays[name] = RawArray(dtype, shape, data)
            if size:
                self._room.append(data)
        self._header = header
        return True

    def _skip_preface(self) -> bool:
        """Drop what precedes the first message; return whether its line has come. Raises ProtocolError where too much precedes it."""
        assert self._begins_after is not None
        if self._begins_after in self._text:
            while (line := self._line()) is not None:
                if line.rstrip(b"\r\n") == self._begins_after:
                    self._begins_after = None
                    self._lent.begun()
                    return True
        else:
            del self._text[: self._text.rfind(_END) + 1]
        if self.arrived_bytes > MAX_PREFACE_BYTES:
            raise ProtocolError("too much before its first message")
        return False


def _parse(line: bytes | bytearray) -> Any:
    """Read JSON as `json.loads` does, in a quarter of its time; what only that reads, such as NaN, is left to it."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


class Outgoing:
    """What a peer is told, as far as it was not sent yet. Safe between threads; the descriptor is its own.

    `failed`: the peer takes nothing any more; whatever it is told from then on goes nowhere.
    """

    def __init__(self, lent: Lent) -> None:
        self.failed = False
        self.descriptor = lent.writing
        self._shared = lent.reading == lent.writing
        self._pieces: deque[memoryview] = deque()
        self._changed = threading.Condition()

    def tell(self, message: Message) -> bool:
        """Send a message behind those before it; return whether some of it has to wait for room (`flush`)."""
        pieces = [memoryview(piece).cast("B") for piece in encoded(message)]
        with self._changed:
            if self.failed:
                return False
            at_once = not self._pieces
            self._pieces.extend(pieces)
            if at_once:
                self._write()
            return bool(self._pieces)

    @property
    def waiting(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._pieces)

    def flush(self) -> bool:
        """Send as much as there is room for; return whether nothing is left."""
        with self._changed:
            self._write()
            return not self._pieces

    def wait(self, seconds: float) -> None:
        """Wait until all has been sent, or cannot be, for at most so long; somebody else has to `flush` meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pieces, max(0.0, seconds))

    def stop(self) -> None:
        """Send nothing any more."""
        with self._changed:
            self._fail()

    def close(self) -> None:
        """Send nothing any more, and give the descriptor back, unless it is that of what comes in as well; a second call does nothing."""
        with self._changed:
            self._fail()
            if self.descriptor >= 0 and not self._shared:
                os.close(self.descriptor)
            self.descriptor = -1

    def _fail(self) -> None:
        self.failed = True
        self._pieces.clear()
        self._changed.notify_all()

    def _write(self) -> None:
        try:
            while self._pieces:
                self._sent(os.writev(self.descriptor, [*islice(self._pieces, PIECES_AT_A_TIME)]))
        except BlockingIOError:
            return
        except OSError:
            self._fail()
        self._changed.notify_all()

    def _sent(self, count: int) -> None:
        """So many bytes of what is waiting have been taken."""
        while count:
            first = self._pieces[0]
            if count < len(first):
                self._pieces[0] = first[count:]
                return
            count -= len(first)
            self._pieces.popleft()
