"""Who may join: both sides prove that they know the run's secret before anything else is read.

The client sends a hello with a nonce; the server answers with its own nonce and a MAC over both; the client checks it and sends its
MAC in turn. The MACs (HMAC-SHA256) cover the hello, and name the side, so that neither can be reflected or replayed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Literal, NamedTuple

from ...core.errors import RunFailedError
from .wire import Link, tune

__all__ = ["PROTOCOL", "Hello", "admit", "connect", "greet"]

PROTOCOL = 1
_MAGIC = b"ctps"
_NONCE_BYTES = 32
_HELLO = struct.Struct("<4sHBxIQ")
_ROLES: tuple[Literal["chief", "worker"], ...] = ("chief", "worker")
_ACCEPTED = b"\x01"
RETRY_SECONDS = 0.02


class Hello(NamedTuple):
    """Who connects (role and index within it), and the size of the shard (in elements) that it expects to find."""

    role: Literal["chief", "worker"]
    place: int
    elements: int


def _mac(secret: str, side: bytes, hello: bytes, nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), side + hello + nonces, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError("the connection was closed during the handshake")
        received += piece
    return bytes(received)


def greet(connection: socket.socket, secret: str, hello: Hello) -> None:
    """Prove ourselves to a server and have it prove itself. Raises ConnectionError where it refuses or cannot."""
    head = _HELLO.pack(_MAGIC, PROTOCOL, _ROLES.index(hello.role), hello.place, hello.elements)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(head + nonce)
    answer = _exactly(connection, _NONCE_BYTES + 32)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(secret, b"server", head, nonces)):
        raise ConnectionError("the parameter server does not know this run's secret")
    connection.sendall(_mac(secret, b"client", head, nonces))
    if _exactly(connection, 1) != _ACCEPTED:
        raise ConnectionError("the parameter server refused the connection")


def admit(connection: socket.socket, secret: str, elements: int) -> Hello:
    """Check a client. Raises ConnectionError, with the reason, where it must not join; the caller closes the connection."""
    raw = _exactly(connection, _HELLO.size + _NONCE_BYTES)
    head, nonce = raw[: _HELLO.size], raw[_HELLO.size :]
    magic, protocol, role, place, expected = _HELLO.unpack(head)
    if magic != _MAGIC or protocol != PROTOCOL or role >= len(_ROLES):
        raise ConnectionError(f"it does not speak protocol {PROTOCOL} of the parameter server")
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own + _mac(secret, b"server", head, nonce + own))
    if not hmac.compare_digest(_exactly(connection, 32), _mac(secret, b"client", head, nonce + own)):
        raise ConnectionError("it does not know this run's secret")
    if expected != elements:
        raise ConnectionError(f"it expects a shard of {expected} elements, this one has {elements}")
    connection.sendall(_ACCEPTED)
    return Hello(_ROLES[role], place, expected)


def connect(endpoint: tuple[str, int], secret: str, hello: Hello, deadline: float) -> Link:
    """Connect to a shard that may not be listening yet, until `deadline` (of time.monotonic), and greet it.

    Raises RunFailedError where nobody listens in time or the handshake fails.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection(endpoint, timeout=max(0.1, left))
            break
        except OSError as error:
            if left <= 0:
                raise RunFailedError(f"no parameter server answered at {endpoint[0]}:{endpoint[1]} in time: {error}") from error
            time.sleep(RETRY_SECONDS)
    try:
        greet(connection, secret, hello)
    except OSError as error:
        connection.close()
        raise RunFailedError(f"the parameter server at {endpoint[0]}:{endpoint[1]} could not be joined: {error}") from error
    tune(connection)
    return Link(connection)
