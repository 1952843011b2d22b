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
from ...core.untrusted.listener import Exchange
from .wire_protocol import Connection, tune

__all__ = ["PROTOCOL", "Hello", "RefusedError", "admit", "connect", "greet"]

PROTOCOL = 2
_MAGIC = b"ctps"
_NONCE_BYTES = 32
_HELLO = struct.Struct("<4sHBxIQ")
_ROLES: tuple[Literal["chief", "worker"], ...] = ("chief", "worker")
_ACCEPTED, _REFUSED = b"\x01", b"\x00"
RETRY_SECONDS = 0.02


class RefusedError(ConnectionError):
    """The peer proved who it is, or that it is somebody else, and another try would end in the same way."""


class Hello(NamedTuple):
    """Who connects (role and index within it), and the size of the shard (in elements) that it expects to find."""

    role: Literal["chief", "worker"]
    place: int
    elements: int


def _mac(secret: str, side: bytes, hello: bytes, nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), side + hello + nonces, "sha256")


def greet(exchange: Exchange, secret: str, hello: Hello) -> None:
    """Prove ourselves to a server and have it prove itself. Raises RefusedError where it refuses for good, OSError where it goes away."""
    head = _HELLO.pack(_MAGIC, PROTOCOL, _ROLES.index(hello.role), hello.place, hello.elements)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    exchange.send(head + nonce)
    answer = exchange.receive(_NONCE_BYTES + 32)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(secret, b"server", head, nonces)):
        raise RefusedError("the parameter server does not know this run's secret")
    exchange.send(_mac(secret, b"client", head, nonces))
    if exchange.receive(1) != _ACCEPTED:
        raise RefusedError("the parameter server refused the connection; its log says why")


def admit(exchange: Exchange, secret: str, elements: int) -> Hello:
    """Check a client, of which no more than 80 bytes are read. Raises OSError, with the reason, where it must not join."""
    raw = exchange.receive(_HELLO.size + _NONCE_BYTES)
    head, nonce = raw[: _HELLO.size], raw[_HELLO.size :]
    magic, protocol, role, place, expected = _HELLO.unpack(head)
    if magic != _MAGIC or protocol != PROTOCOL or role >= len(_ROLES):
        raise ConnectionError(f"it does not speak protocol {PROTOCOL} of the parameter server")
    own = secrets.token_bytes(_NONCE_BYTES)
    exchange.send(own + _mac(secret, b"server", head, nonce + own))
    if not hmac.compare_digest(exchange.receive(32), _mac(secret, b"client", head, nonce + own)):
        raise ConnectionError("it does not know this run's secret")
    if expected != elements:
        exchange.send(_REFUSED)
        raise ConnectionError(f"it expects a shard of {expected} elements, this one has {elements}")
    exchange.send(_ACCEPTED)
    return Hello(_ROLES[role], place, expected)


def connect(endpoint: tuple[str, int], secret: str, hello: Hello, deadline: float) -> Connection:
    """Connect to a shard and greet it, until `deadline` (of time.monotonic): it may not be listening yet, or have strangers at its door.

    Raises RunFailedError where no shard lets us in in time, or it refuses for good.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            return Connection(_greeted(endpoint, secret, hello, max(0.1, left)))
        except RefusedError as error:
            raise RunFailedError(f"the parameter server at {endpoint[0]}:{endpoint[1]} could not be joined: {error}") from error
        except OSError as error:
            if left <= 0:
                raise RunFailedError(f"no parameter server answered at {endpoint[0]}:{endpoint[1]} in time: {error}") from error
            time.sleep(RETRY_SECONDS)


def _greeted(endpoint: tuple[str, int], secret: str, hello: Hello, seconds: float) -> socket.socket:
    """Return a connection on which both sides have proved themselves within `seconds`. Raises OSError.

    It is for the shard to end a handshake that takes too long: whoever gave up on its own might just have been let in.
    """
    deadline = time.monotonic() + seconds
    connection = socket.create_connection(endpoint, timeout=seconds)
    try:
        greet(Exchange(connection, deadline), secret, hello)
    except OSError:
        connection.close()
        raise
    tune(connection)
    return connection
