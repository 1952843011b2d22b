"""The documents of the live page, and the parsing of requests."""

from __future__ import annotations

import hmac
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from ...core.errors import TrainerError, raised
from ..runs.run import Run, started_runs
from .page import render


@dataclass(frozen=True, slots=True)
class Content:
    """A page without its executable scripts, and these in order; scripts of data stay."""

    document: bytes
    scripts: tuple[bytes, ...]


def content_of(page: str) -> Content:
    """Separate a page from its scripts; every script tag is real, as ``<`` in texts is escaped."""
    kept: list[str] = []
    scripts: list[bytes] = []
    at = 0
    while (start := page.find("<script", at)) >= 0:
        begin = page.index(">", start) + 1
        end = page.index("</script>", begin)
        kept.append(page[at:start])
        at = end + len("</script>")
        if 'type="application/json"' in page[start:begin]:
            kept.append(page[start:at])
        else:
            scripts.append(page[begin:end].encode())
    return Content("".join([*kept, page[at:]]).encode(), tuple(scripts))


@dataclass(frozen=True, slots=True)
class Rendered:
    """The page, if any; the runs that are not on it with the reasons; another problem, if any."""

    page: str | None
    left_out: Mapping[Path, str]
    problem: str | None = None


def render_readable(paths: Sequence[Path]) -> Rendered:
    """Return the page of the runs. Never raises for damaged, vanished or changing files."""
    left_out: dict[Path, str] = {}
    kept = list(paths)
    while kept:
        page, problem = _attempt(kept)
        if page is not None:
            return Rendered(page, left_out)
        found = _culprits(kept, problem)
        if not found:
            return Rendered(None, left_out, problem)
        left_out |= found
        kept = [path for path in kept if path not in found]
    return Rendered(None, left_out)


def _attempt(paths: Sequence[Path]) -> tuple[str | None, str]:
    try:
        return render(started_runs([Run(path) for path in paths])), ""
    except TrainerError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 — of files that change or vanish while they are read; told on the page, which goes on
        return None, raised(error)


def _culprits(paths: Sequence[Path], problem: str) -> dict[Path, str]:
    if len(paths) == 1:
        return {paths[0]: problem}
    found: dict[Path, str] = {}
    for half in (paths[: len(paths) // 2], paths[len(paths) // 2 :]):
        page, problem = _attempt(half)
        if page is None:
            found |= _culprits(half, problem)
    return found


MOST_HEAD_BYTES = 8192  # of request line and headers; a browser sends less than one kilobyte
READ_SECONDS = 3.0  # for a whole request; on one machine it takes milliseconds
_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_MOST_PARAMETERS = 8


@dataclass
class RefusedRequestError(Exception):
    """The request is refused, with the reason in one line."""

    status: HTTPStatus
    text: str


def read_head(connection: socket.socket) -> bytes | None:
    """Return the head, if the peer sends one. Raises RefusedRequestError and OSError."""
    deadline = time.monotonic() + READ_SECONDS
    head = bytearray()
    while (end := head.find(_END)) < 0 and len(head) <= MOST_HEAD_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = connection.recv(MOST_HEAD_BYTES)
        except TimeoutError:
            if not head:  # browsers keep spare connections open
                return None
            raise RefusedRequestError(HTTPStatus.REQUEST_TIMEOUT, f"a request is to be there within {READ_SECONDS:g} s") from None
        if not piece:
            return None
        head += piece
    if not 0 <= end <= MOST_HEAD_BYTES:
        raise RefusedRequestError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has at most {MOST_HEAD_BYTES} bytes before its body"
        )
    return bytes(head[:end])


def parse_request(head: bytes, hosts: Collection[str], token: str) -> str:
    """Return the path. Raises RefusedRequestError without token or for other hosts (rebinding)."""
    first, *lines = head.decode("latin-1").split("\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    headers = [_HEADER.fullmatch(line) for line in lines]
    if found is None or None in headers:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
    given = [header[2].strip(" \t").lower() for header in headers if header is not None and header[1].lower() == "host"]
    if len(given) != 1 or given[0] not in hosts:
        raise RefusedRequestError(HTTPStatus.MISDIRECTED_REQUEST, f"this is {' or '.join(sorted(hosts))} alone")
    if found[1] != "GET":
        raise RefusedRequestError(HTTPStatus.METHOD_NOT_ALLOWED, "GET alone")
    return _path_with_token(found[2], token)


def _path_with_token(target: str, token: str) -> str:
    try:
        address = urlsplit(f"http://host{target}")
        parameters = parse_qsl(address.query, keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)
    except ValueError:
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "this address cannot be read") from None
    tokens = [value for name, value in parameters if name == "token"]
    if len(tokens) != 1 or not hmac.compare_digest(tokens[0].encode(), token.encode()):
        raise RefusedRequestError(HTTPStatus.FORBIDDEN, "the address that `trainer report --live` has printed is needed, with its token")
    return address.path
