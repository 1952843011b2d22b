"""The transports of the control protocol: the agent's standard input and output, or TCP with a mutual HMAC handshake.

The handshake proves to each side that the other knows the secret without sending it: both send a random challenge, each answers with
HMAC-SHA256 over its role and both challenges (ISO/IEC 9798-4 style). A connection that fails it is closed without an explanation.
Before the proof each side reads 64 bytes of the other's, no more, and the whole of it has one deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.errors import UsageError
from ...core.process import there_to_work_in
from ...core.untrusted.listener import PROOF_SECONDS, Exchange
from .messages import Stream

__all__ = ["AGENT_BEGINS", "HandshakeError", "WrongSecretError", "accept", "connect", "over_socket", "read_secret", "start_over_stdio"]

CHALLENGE_BYTES = 32
DIGEST_BYTES = 32
SECRET_VARIABLE = "TRAINER_SECRET"
MOST_SECRET_BYTES = 4096
"""Of a file with a secret, which as a variable could not be much longer."""

AGENT_BEGINS = b"crosstrain-agent-begins"
"""The line after which an agent's messages begin, where a shell or a daemon may have printed before it."""


class HandshakeError(ConnectionError):
    """The peer does not know the secret, does not speak the protocol, was too slow or went away; another try may fare better."""


class WrongSecretError(HandshakeError):
    """The peer gave its proof, and it is not that of our secret: another try ends in the same way."""


def read_secret(secret_file: Path | None) -> bytes:
    """Return the shared secret from a file or from ``TRAINER_SECRET``. Raises UsageError where there is none, or a short one."""
    if secret_file is not None:
        from ...core.settings.config_files import hand_written
        from ...core.untrusted.bounded_json import UnreadableError, open_regular  # imports pydantic, which an agent starts without

        try:
            with open_regular(secret_file) as file:
                data = file.read(MOST_SECRET_BYTES + 1)
            text = hand_written(data).strip()
        except OSError as error:
            raise UsageError(f"--secret-file: cannot read {str(secret_file)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--secret-file: {str(secret_file)!r} is no text, such as `openssl rand -hex 16` makes") from error
        except UnreadableError as error:
            raise UsageError(f"--secret-file: {str(secret_file)!r} {error}; {SECRET_VARIABLE} may hold the secret itself") from error
        if len(data) > MOST_SECRET_BYTES:
            raise UsageError(
                f"--secret-file: {str(secret_file)!r} has more than {MOST_SECRET_BYTES} bytes; `openssl rand -hex 16` makes 33"
            )
    else:
        text = os.environ.get(SECRET_VARIABLE, "").strip()
    if len(text) < 16:
        found = f"one of {len(text)} characters" if text else "none"
        raise UsageError(
            f"a shared secret of at least 16 characters is needed where nodes find each other over the network (found {found}): "
            f"set {SECRET_VARIABLE} or --secret-file to the same value on every node, such as the output of `openssl rand -hex 16`"
        )
    return text.encode()


def start_over_stdio(
    popen: Callable[..., subprocess.Popen[bytes]], command: Sequence[str], begins_after: bytes | None = None
) -> tuple[subprocess.Popen[bytes], Stream]:
    """Start a child in a session of its own; return it, and the channel to it over its standard input and output.

    `popen` takes what `subprocess.Popen` takes, and `begins_after` is as in `Stream`. The output is a socket, which a whole state passes in
    a fraction of a pipe's time.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = popen(command, stdin=subprocess.PIPE, stdout=theirs, start_new_session=True, cwd=there_to_work_in())
        reader = ours.makefile("rb")  # keeps our end open
    assert process.stdin is not None
    return process, Stream(reader, process.stdin, begins_after)


def over_socket(connection: socket.socket) -> Stream:
    """Return the channel over a connected socket, which from now on belongs to it."""
    with connection:  # the files keep the connection open
        return Stream(connection.makefile("rb"), connection.makefile("wb"))


def accept(exchange: Exchange, secret: bytes) -> Stream:
    """Check that the peer knows the secret, prove that we do, and return the channel (the listening side). Raises HandshakeError."""
    return _handshake(exchange, secret, ours=b"driver", theirs=b"agent")


def connect(address: tuple[str, int], secret: bytes, timeout_seconds: float = PROOF_SECONDS) -> Stream:
    """Connect, prove that we know the secret, check that the peer does, and return the channel; all within `timeout_seconds`.

    Raises OSError where nobody listens, HandshakeError where the peer turns us away or does not answer, WrongSecretError for another's
    secret.
    """
    deadline = time.monotonic() + timeout_seconds
    connection = socket.create_connection(address, timeout=timeout_seconds)
    return _handshake(Exchange(connection, deadline), secret, ours=b"agent", theirs=b"driver")


def _handshake(exchange: Exchange, secret: bytes, *, ours: bytes, theirs: bytes) -> Stream:
    connection = exchange.connection
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(CHALLENGE_BYTES)
        exchange.send(own)
        other = exchange.receive(CHALLENGE_BYTES)
        exchange.send(_proof(secret, ours, own, other))
        if not hmac.compare_digest(exchange.receive(DIGEST_BYTES), _proof(secret, theirs, other, own)):
            raise WrongSecretError("it does not know the secret")
        connection.settimeout(None)
    except WrongSecretError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise HandshakeError(str(error)) from error
    return over_socket(connection)


def _proof(secret: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.new(secret, b"crosstrain:" + role + b":" + own + other, hashlib.sha256).digest()
