"""Transports of the control protocol: standard input and output, or TCP with mutual HMAC.

HMAC-SHA256 is over role and both random challenges (ISO/IEC 9798-4 style). Failures close without explanation; before the proof each
side reads 64 bytes at most, within one deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from ...core.errors import UsageError
from ...core.listener import PROOF_SECONDS, Exchange
from ...core.process import child_working_directory
from .messages import (
    HEADER_WEIGHT,
    MAX_HEADER_BYTES,
    MAX_PREFACE_BYTES,
    Detached,
    Header,
    Message,
    ProtocolError,
    Stream,
    WireMessage,
    encoded,
    parse_header,
)

CHALLENGE_BYTES = 32
DIGEST_BYTES = 32
SECRET_VARIABLE = "TRAINER_SECRET"
MAX_SECRET_BYTES = 4096
AGENT_BEGINS = b"crosstrain-agent-begins"  # precedes an agent's messages, as a shell or daemon may have printed


class HandshakeError(ConnectionError):
    """The peer has no secret, another protocol, was too slow or is gone; a retry may succeed."""


class WrongSecretError(HandshakeError):
    """The peer proved another secret; retries fail too."""


def read_secret(secret_file: Path | None) -> bytes:
    """Return the secret from a file or ``TRAINER_SECRET``. Raises UsageError."""
    if secret_file is not None:
        from ...core.bounded_json import UnreadableError, decode_text, open_regular

        shown = f"--secret-file: {str(secret_file)!r}"
        try:
            with open_regular(secret_file) as file:
                data = file.read(MAX_SECRET_BYTES + 1)
            text = decode_text(data).strip()
        except OSError as error:
            raise UsageError(f"--secret-file: cannot read {str(secret_file)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{shown} is no text, such as `openssl rand -hex 16` makes") from error
        except UnreadableError as error:
            raise UsageError(f"{shown} {error}; {SECRET_VARIABLE} may hold the secret itself") from error
        if len(data) > MAX_SECRET_BYTES:
            raise UsageError(f"{shown} has more than {MAX_SECRET_BYTES} bytes; `openssl rand -hex 16` makes 33")
    else:
        text = os.environ.get(SECRET_VARIABLE, "").strip()
    if len(text) < 16:
        described = f"one of {len(text)} characters" if text else "none"
        raise UsageError(
            f"a shared secret of at least 16 characters is needed where nodes find each other over the network (found {described}): "
            f"set {SECRET_VARIABLE} or --secret-file to the same value on every node, such as the output of `openssl rand -hex 16`"
        )
    return text.encode()


def start_over_stdio(
    popen: Callable[..., subprocess.Popen[bytes]], command: Sequence[str], begins_after: bytes | None = None
) -> tuple[subprocess.Popen[bytes], Stream]:
    """Start a child in a new session with a stream.

    Its output is a socket, much faster than a pipe for states.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = popen(command, stdin=subprocess.PIPE, stdout=theirs, start_new_session=True, cwd=child_working_directory())
        reader = ours.makefile("rb")  # keeps this end open
    assert process.stdin is not None
    return process, Stream(reader, process.stdin, begins_after)


def take_stdio(*, announce: bool = False) -> Stream:
    """Return the stream to this process's parent over standard input and output.

    Prints then go to standard error. With `announce`, messages begin after the line `AGENT_BEGINS`.
    """
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if announce:
        writer.write(b"\n" + AGENT_BEGINS + b"\n")
        writer.flush()
    return Stream(sys.stdin.buffer, writer)


def over_socket(connection: socket.socket) -> Stream:
    """Return the stream over a connected socket, which it owns."""
    with connection:  # the files keep it open
        return Stream(connection.makefile("rb"), connection.makefile("wb"))


def accept(exchange: Exchange, secret: bytes) -> Stream:
    """Return the stream after a handshake as listener. Raises HandshakeError."""
    return _handshake(exchange, secret, ours=b"driver", theirs=b"agent")


def connect(address: tuple[str, int], secret: bytes, timeout_seconds: float = PROOF_SECONDS) -> Stream:
    """Return the stream after a handshake within `timeout_seconds`.

    Raises OSError, HandshakeError, WrongSecretError.
    """
    deadline = time.monotonic() + timeout_seconds
    connection = socket.create_connection(address, timeout=timeout_seconds)
    return _handshake(Exchange(connection, deadline), secret, ours=b"agent", theirs=b"driver")


def _handshake(exchange: Exchange, secret: bytes, *, ours: bytes, theirs: bytes) -> Stream:
    connection = exchange.connection
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = secrets.token_bytes(CHALLENGE_BYTES)
        exchange.send(sent)
        received = exchange.receive(CHALLENGE_BYTES)
        exchange.send(_proof(secret, ours, sent, received))
        if not hmac.compare_digest(exchange.receive(DIGEST_BYTES), _proof(secret, theirs, received, sent)):
            raise WrongSecretError("it does not know the secret")
        connection.settimeout(None)
    except WrongSecretError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise HandshakeError(str(error)) from error
    return over_socket(connection)


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, b"crosstrain:" + role + b":" + first + second, hashlib.sha256).digest()


# Non-blocking `Stream`s serve many peers from one thread.
PIECE_BYTES = 2**18  # read at a time from one peer
PIECES_AT_A_TIME = 16  # per system call, which takes 1,024 at most
_END = ord("\n")


class Incoming:
    """Messages of one peer from a non-blocking descriptor, which it owns, for one thread."""

    def __init__(self, detached: Detached) -> None:
        self.arrived_bytes = len(detached.held)
        self.ended = False
        self.descriptor = detached.reading
        self._detached = detached
        self._begins_after = detached.begins_after
        self._text = bytearray(detached.held)
        self._searched = 0
        self._header: Header | None = None
        self._header_line = b""
        self._memory = self._room = memoryview(b"")  # of the message's arrays, and what is left of it to fill

    def fill(self) -> bool:
        """Read a piece; return whether bytes came. Raises OSError where the peer is gone."""
        try:
            piece = b""
            if self._room:
                count = os.readv(self.descriptor, [self._room[:PIECE_BYTES]])
                self._room = self._room[count:]
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
        """Return the next message and its weight; None if incomplete. Raises ProtocolError."""
        if self._begins_after is not None and not self._skip_preface():
            return None
        if self._header is None and not self._begin_message():
            return None
        size = min(len(self._text), len(self._room))
        self._room[:size] = self._text[:size]
        del self._text[:size]
        self._room = self._room[size:]
        header = self._header
        if self._room or header is None:
            return None
        self._header = None
        return header.message(self._header_line, self._memory), HEADER_WEIGHT * len(self._header_line) + header.array_bytes

    def close(self) -> None:
        """Close the descriptor, at most once."""
        self.ended = True
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _line(self) -> bytes | None:
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
        self._header, self._header_line = parse_header(line), line
        self._memory = self._room = memoryview(bytearray(self._header.array_bytes))
        return True

    def _skip_preface(self) -> bool:
        """Skip up to `begins_after`; return whether it came. Raises ProtocolError for too much."""
        assert self._begins_after is not None
        if self._begins_after in self._text:
            while (line := self._line()) is not None:
                if line.rstrip(b"\r\n") == self._begins_after:
                    self._begins_after = None
                    self._detached.begun()
                    return True
        else:
            del self._text[: self._text.rfind(_END) + 1]
        if self.arrived_bytes > MAX_PREFACE_BYTES:
            raise ProtocolError("too much before its first message")
        return False


class Outgoing:
    """Buffered messages to a slow peer, thread-safe.

    Owns its descriptor; drops messages once `failed`.
    """

    def __init__(self, detached: Detached) -> None:
        self.failed = False
        self.descriptor = detached.writing
        self._shared = detached.reading == detached.writing
        self._pieces: deque[memoryview] = deque()
        self._changed = threading.Condition()

    def send(self, message: Message | WireMessage) -> bool:
        """Send a message; return whether part of it waits for `flush`."""
        pieces = [memoryview(piece).cast("B") for piece in encoded(message)]
        with self._changed:
            if self.failed:
                return False
            is_idle = not self._pieces
            self._pieces.extend(pieces)
            if is_idle:
                self._write()
            return bool(self._pieces)

    @property
    def waiting(self) -> bool:
        """Whether bytes are buffered."""
        return bool(self._pieces)

    def flush(self) -> bool:
        """Send buffered bytes; return whether none are left."""
        with self._changed:
            self._write()
            return not self._pieces

    def wait(self, seconds: float) -> None:
        """Wait at most so long until all is sent or has failed, while another thread flushes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pieces, max(0.0, seconds))

    def stop(self) -> None:
        """Stop sending."""
        with self._changed:
            self._fail()

    def close(self) -> None:
        """Stop sending, and close the descriptor unless shared with `Incoming`."""
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
                self._drop(os.writev(self.descriptor, [*islice(self._pieces, PIECES_AT_A_TIME)]))
        except BlockingIOError:
            return
        except OSError:
            self._fail()
        self._changed.notify_all()

    def _drop(self, count: int) -> None:
        while count:
            first = self._pieces[0]
            if count < len(first):
                self._pieces[0] = first[count:]
                return
            count -= len(first)
            self._pieces.popleft()
