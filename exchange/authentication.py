"""Who may join: both sides prove that they know the run's secret before anything else is read.

The client sends a hello, of a size that both sides know, with a nonce; the server answers with its own nonce and a MAC over both; the
client checks it and sends its MAC in turn. The MACs (HMAC-SHA256) cover the hello, and name the side, so that neither can be reflected
or replayed. Every attempt of a run has a secret of its own, so that nobody joins who belongs to another one.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from ..core.errors import RunFailedError
from ..core.untrusted.listener import Exchange

__all__ = ["RefusedError", "accept", "admit_client", "connect", "greet", "tune"]

_NONCE_BYTES, _MAC_BYTES = 32, 32
_ACCEPTED, _REFUSED = b"\x01", b"\x00"
RETRY_SECONDS = 0.02

Hello = TypeVar("Hello")


class RefusedError(ConnectionError):
    """The peer proved who it is, or that it is somebody else, and another try would end in the same way."""


def greet(exchange: Exchange, secret: str, hello: bytes) -> None:
    """Prove ourselves to a server and have it prove itself. `secret` is hexadecimal.

    Raises RefusedError where it refuses for good, OSError where it goes away.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    exchange.send(hello + nonce)
    answer = exchange.receive(_NONCE_BYTES + _MAC_BYTES)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(secret, b"server", hello, nonces)):
        raise RefusedError("it does not know this run's secret")
    exchange.send(_mac(secret, b"client", hello, nonces))
    if exchange.receive(1) != _ACCEPTED:
        raise RefusedError("it refused the connection; its log says why")


def admit_client(
    exchange: Exchange, secret: str, hello_bytes: int, read: Callable[[bytes], Hello], check: Callable[[Hello], None]
) -> Hello:
    """Return the hello of a client that has proved itself, to which `accept` tells so; its nonce and MAC are all that is read besides.

    `read` raises ConnectionError for a hello of another protocol, and hears everybody's; `check` for one that asks for what is not here,
    and hears that of clients who know the secret. Raises OSError, with the reason, for a client that must not join.
    """
    raw = exchange.receive(hello_bytes + _NONCE_BYTES)
    packed, nonce = raw[:hello_bytes], raw[hello_bytes:]
    hello = read(packed)
    own = secrets.token_bytes(_NONCE_BYTES)
    exchange.send(own + _mac(secret, b"server", packed, nonce + own))
    if not hmac.compare_digest(exchange.receive(_MAC_BYTES), _mac(secret, b"client", packed, nonce + own)):
        raise ConnectionError("it does not know this run's secret")
    try:
        check(hello)
    except ConnectionError:
        exchange.send(_REFUSED)
        raise
    return hello


def accept(connection: socket.socket) -> bool:
    """Tell a client that it has joined, and return True; close the connection of one that has gone meanwhile, and return False.

    To be called when the door has let it through (`AuthenticatingListener`), so that no client believes it which is shut there.
    """
    try:
        connection.sendall(_ACCEPTED)
    except OSError:
        connection.close()
        return False
    return True


def connect(endpoint: tuple[str, int], secret: str, hello: bytes, deadline: float, name: str) -> socket.socket:
    """Connect to a server and greet it, until `deadline` (of time.monotonic): it may not be listening yet, or have strangers at its door.

    `name` is what people call it. Raises RunFailedError where it lets nobody in in time, or refuses for good.
    """
    where = f"{name} at {endpoint[0]}:{endpoint[1]}"
    while True:
        left = deadline - time.monotonic()
        try:
            return _greeted(endpoint, secret, hello, max(0.1, left))
        except RefusedError as error:
            raise RunFailedError(f"{where} could not be joined: {error}") from error
        except OSError as error:
            if left <= 0:
                raise RunFailedError(f"start_timeout: {where} has not answered in time: {error}") from error
            time.sleep(RETRY_SECONDS)


def _greeted(endpoint: tuple[str, int], secret: str, hello: bytes, seconds: float) -> socket.socket:
    """Return a connection on which both sides have proved themselves within `seconds`. Raises OSError.

    It is for the server to end a handshake that takes too long: whoever gave up on its own might just have been let in.
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


def tune(connection: socket.socket) -> None:
    """Send small frames at once, notice hosts that vanished, and block without a time limit: a stalled peer is the engine's to judge."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.settimeout(None)


def _mac(secret: str, side: bytes, hello: bytes, nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), side + hello + nonces, "sha256")
