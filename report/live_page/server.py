"""A door on 127.0.0.1 that hands out documents to whoever has its token: small, and bounded in time, threads and memory."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Self

from ...core.untrusted.listener import AuthenticatingListener, Exchange
from .requests import RefusedRequestError, parse_request, read_head

__all__ = ["MOST_ANSWERS", "Document", "LocalServer"]

MOST_ANSWERS = 32
"""At a time; each has a thread. A browser asks for two or three."""

SEND_SECONDS = 30.0
"""Within which a document is taken; the largest has 5 MB."""

REFUSAL_SECONDS = 1.0
MOST_REFUSED_BYTES = 1 << 20
"""So long, and so much, the rest of a refused request is read, and thrown away: closed at once, the connection might lose the refusal."""

_PIECE_BYTES = 65536

_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Scripts are those that are served here alone: one that came into the page with a text would not run. Styles: plotly.js sets them."""


@dataclass(frozen=True, slots=True)
class Document:
    """What an address answers with: its media type, such as ``text/html``, whose characters are UTF-8, and its bytes."""

    kind: str
    body: bytes


class LocalServer:
    """Listens at `address`, on a port that the system chooses, and begins to answer with `start`; a context manager.

    `find` returns the document at a path, from a thread of its own; None where there is none. `report` is given a sentence when
    connections had to be turned away. A request without the token, for another host or in another form gets one line.
    """

    def __init__(self, find: Callable[[str], Document | None], report: Callable[[str], None]) -> None:
        self._find, self._report = find, report
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self.token = secrets.token_urlsafe(32)
        self._hosts = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}
        self._listener: AuthenticatingListener[tuple[socket.socket, Document | None]] | None = None
        self._lock = threading.Lock()
        self._answering: set[socket.socket] = set()
        self._closed = False

    @property
    def address(self) -> str:
        """What to type into a browser."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def start(self) -> None:
        """Answer from now on."""
        self._listener = AuthenticatingListener(self._listening, self._hear, self._answer, self._report)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and break off what is being answered; a second call does nothing."""
        if self._listener is None:
            self._listening.close()
        else:
            self._listener.close()
        with self._lock:
            self._closed = True
            for connection in self._answering:
                with contextlib.suppress(OSError):  # the peer has gone by itself
                    connection.shutdown(socket.SHUT_RDWR)

    def _hear(self, exchange: Exchange) -> tuple[socket.socket, Document | None]:
        """Read a request; return what to answer it with, nothing where it has been refused or there was none."""
        connection = exchange.connection
        try:
            head = read_head(connection)
            if head is None:
                return connection, None
            found = self._find(parse_request(head, self._hosts, self.token))
            if found is None:
                raise RefusedRequestError(HTTPStatus.NOT_FOUND, "there is nothing at this address")
        except RefusedRequestError as refusal:
            with contextlib.suppress(OSError):  # whoever asked has gone, or takes nothing
                _refuse(connection, refusal)
            return connection, None
        except ConnectionError:  # it has gone before it had asked for anything
            return connection, None
        return connection, found

    def _answer(self, heard: tuple[socket.socket, Document | None], host: str) -> None:
        """Send the document, and close the connection."""
        connection, document = heard
        with connection:
            if document is None:
                return
            with self._lock:
                taken = not self._closed and len(self._answering) < MOST_ANSWERS
                if taken:
                    self._answering.add(connection)
            try:
                if taken:
                    _send(connection, HTTPStatus.OK, document, SEND_SECONDS)
                else:
                    _refuse(connection, RefusedRequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too much is asked for at once; try again"))
            except OSError:  # whoever asked has gone, or takes nothing
                return
            finally:
                with self._lock:
                    self._answering.discard(connection)


def _send(connection: socket.socket, status: HTTPStatus, document: Document, seconds: float) -> None:
    """Send an answer within the time. Raises OSError."""
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {document.kind}; charset=utf-8",
        f"Content-Length: {len(document.body)}",
        "Connection: close",
        "Cache-Control: no-store",
        f"Content-Security-Policy: {_POLICY}",
        "Cross-Origin-Resource-Policy: same-origin",
        "Cross-Origin-Opener-Policy: same-origin",
        "Referrer-Policy: no-referrer",
        "X-Content-Type-Options: nosniff",
        *(["Allow: GET"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
    )
    connection.settimeout(seconds)
    connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
    connection.sendall(document.body)


def _refuse(connection: socket.socket, refusal: RefusedRequestError) -> None:
    """Say why in one line, and read what else comes for a moment. Raises OSError where the peer has gone, or stays any longer."""
    _send(connection, refusal.status, Document("text/plain", f"{refusal.text}.\n".encode()), REFUSAL_SECONDS)
    connection.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + REFUSAL_SECONDS
    left_bytes = MOST_REFUSED_BYTES
    while left_bytes > 0 and (left_seconds := deadline - time.monotonic()) > 0:
        connection.settimeout(left_seconds)
        piece = connection.recv(_PIECE_BYTES)
        if not piece:
            return
        left_bytes -= len(piece)
