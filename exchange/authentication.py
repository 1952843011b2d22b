"""Mutual authentication by the attempt's secret, before anything else is read.

The MACs (HMAC-SHA256) cover nonces and hello, and name the side, so neither can be reflected or replayed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from ..core.cluster import MAX_RANKS
from ..core.errors import RunFailedError, UsageError
from ..core.listener import Exchange

_NONCE_BYTES, _MAC_BYTES = 32, 32
_ACCEPTED, _REFUSED = b"\x01", b"\x00"
RETRY_SECONDS = 0.02
Hello = TypeVar("Hello")


class RefusedError(ConnectionError):
    """A final refusal: another try would end in the same way."""


def greet(exchange: Exchange, secret: str, hello: bytes) -> None:
    """Authenticate with a server, and check it. `secret` is hexadecimal.

    Raises RefusedError if it is final, else OSError.
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
    """Return an authenticated client's hello; `read` checks the protocol, `check` the request.

    Raises OSError with the reason.
    """
    raw = exchange.receive(hello_bytes + _NONCE_BYTES)
    packed, nonce = raw[:hello_bytes], raw[hello_bytes:]
    hello = read(packed)
    server_nonce = secrets.token_bytes(_NONCE_BYTES)
    exchange.send(server_nonce + _mac(secret, b"server", packed, nonce + server_nonce))
    if not hmac.compare_digest(exchange.receive(_MAC_BYTES), _mac(secret, b"client", packed, nonce + server_nonce)):
        raise ConnectionError("it does not know this run's secret")
    try:
        check(hello)
    except ConnectionError:
        exchange.send(_REFUSED)
        raise
    return hello


def accept(connection: socket.socket) -> bool:
    """Notify a client that was let through.

    Return False, and close the connection, if it is gone.
    """
    try:
        connection.sendall(_ACCEPTED)
    except OSError:
        connection.close()
        return False
    return True


def connect(endpoint: tuple[str, int], secret: str, hello: bytes, deadline: float, name: str) -> socket.socket:
    """Connect to server `name`, which may not listen yet, and greet it, until `deadline`.

    Raises RunFailedError.
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
    """Send small frames immediately, detect vanished hosts, and block without timeout.

    The engine detects stalls.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.settimeout(None)


def _mac(secret: str, side: bytes, hello: bytes, nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), side + hello + nonces, "sha256")


def refuse_too_many(ranks: int) -> None:
    """Raise UsageError for more ranks than a mesh connects."""
    if ranks > MAX_RANKS:
        raise UsageError(
            f"exchange: got 'direct', which connects each worker with each other one, {MAX_RANKS} at most, and this job has {ranks}; "
            "choose native."
        )


def gpu_error() -> UsageError:
    """Return the error about gradients in the memory of a GPU."""
    return UsageError(
        "exchange: got 'direct', which adds up gradients in the host's memory; on GPUs native is better (nccl). "
        "Choose native, or --device cpu."
    )
