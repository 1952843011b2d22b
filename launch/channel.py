"""The transports of the control protocol: the agent's standard input and output, or TCP with a mutual HMAC handshake.

The handshake proves to each side that the other knows the secret without sending it: both send a random challenge, each answers with
HMAC-SHA256 over its role and both challenges (ISO/IEC 9798-4 style). A connection that fails it is closed without an explanation.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.errors import UsageError
from ..engine.messages import Stream

__all__ = ["HandshakeError", "accept", "connect", "over_socket", "read_secret", "start_over_stdio"]

CHALLENGE_BYTES = 32
DIGEST_BYTES = 32
SECRET_VARIABLE = "TRAINER_SECRET"
HANDSHAKE_TIMEOUT_SECONDS = 10.0


class HandshakeError(ConnectionError):
    """The peer does not know the secret, or does not speak the protocol."""


def read_secret(secret_file: Path | None) -> bytes:
    """Return the shared secret from a file or from ``TRAINER_SECRET``. Raises UsageError where there is none, or a short one."""
    if secret_file is not None:
        try:
            text = secret_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UsageError(f"--secret-file: cannot read {str(secret_file)!r}: {error.strerror}") from error
    else:
        text = os.environ.get(SECRET_VARIABLE, "").strip()
    if len(text) < 16:
        found = f"one of {len(text)} characters" if text else "none"
        raise UsageError(
            f"a shared secret of at least 16 characters is needed where nodes find each other over the network (found {found}): "
            f"set {SECRET_VARIABLE} or --secret-file to the same value on every node, such as the output of `openssl rand -hex 16`"
        )
    return text.encode()


def start_over_stdio(popen: Callable[..., subprocess.Popen[bytes]], command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Stream]:
    """Start a child in a session of its own; return it, and the channel to it over its standard input and output.

    `popen` takes what `subprocess.Popen` takes. The output is a socket, which a whole state passes in a fraction of a pipe's time.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = popen(command, stdin=subprocess.PIPE, stdout=theirs, start_new_session=True)
        reader = ours.makefile("rb")  # keeps our end open
    assert process.stdin is not None
    return process, Stream(reader, process.stdin)


def over_socket(connection: socket.socket) -> Stream:
    """Return the channel over a connected socket, which from now on belongs to it."""
    with connection:  # the files keep the connection open
        return Stream(connection.makefile("rb"), connection.makefile("wb"))


def accept(connection: socket.socket, secret: bytes) -> Stream:
    """Check that the peer knows the secret, prove that we do, and return the channel (the listening side)."""
    return _handshake(connection, secret, ours=b"driver", theirs=b"agent")


def connect(address: tuple[str, int], secret: bytes, timeout_seconds: float) -> Stream:
    """Connect, prove that we know the secret, check that the peer does, and return the channel. Raises OSError where nobody listens."""
    connection = socket.create_connection(address, timeout=timeout_seconds)
    return _handshake(connection, secret, ours=b"agent", theirs=b"driver")


def _handshake(connection: socket.socket, secret: bytes, *, ours: bytes, theirs: bytes) -> Stream:
    try:
        connection.settimeout(HANDSHAKE_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(CHALLENGE_BYTES)
        connection.sendall(own)
        other = _exactly(connection, CHALLENGE_BYTES)
        connection.sendall(_proof(secret, ours, own, other))
        if not hmac.compare_digest(_exactly(connection, DIGEST_BYTES), _proof(secret, theirs, other, own)):
            raise HandshakeError("the peer does not know the secret")
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return over_socket(connection)


def _proof(secret: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.new(secret, b"crosstrain:" + role + b":" + own + other, hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise HandshakeError("the peer closed the connection during the handshake; do both sides use the same secret?")
        received += piece
    return received
