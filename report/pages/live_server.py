"""An HTTP server on 127.0.0.1 with a token, bounded in time, threads and memory."""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qsl, urlsplit

from ...core.listener import AuthenticatingListener, Exchange
from .followed_runs import FollowedRuns, Refresher

MAX_HEAD_BYTES = 8192  # of request line and headers; a browser sends less than one kilobyte
READ_SECONDS = 3.0  # for a whole request; on one machine it takes milliseconds
_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_MAX_PARAMETERS = 8


@dataclass
class RefusedRequestError(Exception):
    """The request is refused, with the reason in one line."""

    status: HTTPStatus
    text: str


def read_head(connection: socket.socket) -> bytes | None:
    """Return the head, if the peer sends one. Raises RefusedRequestError and OSError."""
    deadline = time.monotonic() + READ_SECONDS
    head = bytearray()
    while (end := head.find(_END)) < 0 and len(head) <= MAX_HEAD_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = connection.recv(MAX_HEAD_BYTES)
        except TimeoutError:
            if not head:  # browsers keep spare connections open
                return None
            raise RefusedRequestError(HTTPStatus.REQUEST_TIMEOUT, f"a request is to be there within {READ_SECONDS:g} s") from None
        if not piece:
            return None
        head += piece
    if not 0 <= end <= MAX_HEAD_BYTES:
        raise RefusedRequestError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has at most {MAX_HEAD_BYTES} bytes before its body"
        )
    return bytes(head[:end])


def parse_request(head: bytes, hosts: Collection[str], token: str) -> str:
    """Return the path. Raises RefusedRequestError without token or for other hosts (rebinding)."""
    first, *lines = head.decode("latin-1").split("\r\n")
    request = _REQUEST_LINE.fullmatch(first)
    headers = [_HEADER.fullmatch(line) for line in lines]
    if request is None or None in headers:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
    requested_hosts = [header[2].strip(" \t").lower() for header in headers if header is not None and header[1].lower() == "host"]
    if len(requested_hosts) != 1 or requested_hosts[0] not in hosts:
        raise RefusedRequestError(HTTPStatus.MISDIRECTED_REQUEST, f"this is {' or '.join(sorted(hosts))} alone")
    if request[1] != "GET":
        raise RefusedRequestError(HTTPStatus.METHOD_NOT_ALLOWED, "GET alone")
    return _path_with_token(request[2], token)


def _path_with_token(target: str, token: str) -> str:
    try:
        address = urlsplit(f"http://host{target}")
        parameters = parse_qsl(address.query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "this address cannot be read") from None
    tokens = [value for name, value in parameters if name == "token"]
    if len(tokens) != 1 or not hmac.compare_digest(tokens[0].encode(), token.encode()):
        raise RefusedRequestError(HTTPStatus.FORBIDDEN, "the address that `trainer report --live` has printed is needed, with its token")
    return address.path


_TEMPLATES = Path(__file__).parent / "templates"


def find_document(refresher: Refresher, path: str, token: str) -> Document | None:
    """Return the document of the live page at a path, if any, and record the request."""
    refresher.ask()
    published = refresher.published
    state = {field.name: getattr(published, field.name) for field in fields(published) if field.name != "content"}
    scripts: Sequence[bytes] = ()
    documents = {
        "/": Document("text/html", (_TEMPLATES / "live.html").read_bytes().replace(b"{token}", token.encode())),
        "/live.js": Document("text/javascript", (_TEMPLATES / "live.js").read_bytes()),
    }
    if published.content is not None:
        scripts = published.content.scripts
        documents["/page"] = Document("text/html", published.content.document)
    documents |= {f"/script-{number}.js": Document("text/javascript", script) for number, script in enumerate(scripts)}
    documents["/state"] = Document("application/json", json.dumps({**state, "scripts": len(scripts)}).encode())
    return documents.get(path)


MAX_ANSWERS = 32  # concurrent, each with a thread; a browser asks for two or three
SEND_SECONDS = 30.0  # for a document; the largest has 5 MB
REFUSAL_SECONDS = 1.0
MAX_REFUSED_BYTES = 1 << 20  # limit of a refused request: closing before reading it may lose the refusal
_PIECE_BYTES = 65536
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # only scripts served here run, not those in a run's texts; plotly.js sets inline styles


@dataclass(frozen=True, slots=True)
class Document:
    """An answer: its media type, such as ``text/html``, in UTF-8, and its bytes."""

    kind: str
    body: bytes


class LocalServer:
    """A server on a free port of 127.0.0.1; `find` runs in a thread per request."""

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
        """The URL for a browser."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def start(self) -> None:
        """Start answering."""
        self._listener = AuthenticatingListener(self._listening, self._read_request, self._answer, self._report)

    def close(self) -> None:
        """Stop listening, and abort current answers; idempotent."""
        if self._listener is None:
            self._listening.close()
        else:
            self._listener.close()
        with self._lock:
            self._closed = True
            for connection in self._answering:
                with contextlib.suppress(OSError):  # the peer closed it first
                    connection.shutdown(socket.SHUT_RDWR)

    def _read_request(self, exchange: Exchange) -> tuple[socket.socket, Document | None]:
        connection = exchange.connection
        try:
            head = read_head(connection)
            if head is None:
                return connection, None
            document = self._find(parse_request(head, self._hosts, self.token))
            if document is None:
                raise RefusedRequestError(HTTPStatus.NOT_FOUND, "there is nothing at this address")
        except RefusedRequestError as refusal:
            with contextlib.suppress(OSError):  # the peer has gone, or takes nothing
                _refuse(connection, refusal)
            return connection, None
        except ConnectionError:  # the peer has gone before its request
            return connection, None
        return connection, document

    def _answer(self, request: tuple[socket.socket, Document | None], host: str) -> None:
        connection, document = request
        with connection:
            if document is None:
                return
            with self._lock:
                taken = not self._closed and len(self._answering) < MAX_ANSWERS
                if taken:
                    self._answering.add(connection)
            try:
                if taken:
                    _send(connection, HTTPStatus.OK, document, SEND_SECONDS)
                else:
                    _refuse(connection, RefusedRequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too much is asked for at once; try again"))
            except OSError:  # the peer has gone, or takes nothing
                return
            finally:
                with self._lock:
                    self._answering.discard(connection)


def _send(connection: socket.socket, status: HTTPStatus, document: Document, seconds: float) -> None:
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
    _send(connection, refusal.status, Document("text/plain", f"{refusal.text}.\n".encode()), REFUSAL_SECONDS)
    connection.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + REFUSAL_SECONDS
    left_bytes = MAX_REFUSED_BYTES
    while left_bytes > 0 and (left_seconds := deadline - time.monotonic()) > 0:
        connection.settimeout(left_seconds)
        piece = connection.recv(_PIECE_BYTES)
        if not piece:
            return
        left_bytes -= len(piece)


def serve(places: Sequence[Path], announce: Callable[[str], None], report: Callable[[str], None], check: Callable[[], None]) -> NoReturn:
    """Serve the page of `places` until `check` raises; signals can interrupt this thread."""
    refresher = Refresher(FollowedRuns(places), report)
    with contextlib.closing(LocalServer(lambda path: find_document(refresher, path, server.token), report)) as server:
        announce(server.address)
        server.start()
        refresher.follow(check)
