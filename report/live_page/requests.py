"""One request of HTTP as it comes from a stranger: read within bounds of time and size, and refused in a line where it is not wanted."""

from __future__ import annotations

import hmac
import re
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

__all__ = ["MOST_HEAD_BYTES", "READ_SECONDS", "RefusedRequestError", "parse_request", "read_head"]

MOST_HEAD_BYTES = 8192
"""Of a request line with its headers; a browser's has less than one kilobyte."""

READ_SECONDS = 3.0
"""Within which a request is there, however its bytes come; on one machine that takes milliseconds."""

_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_MOST_PARAMETERS = 8


@dataclass
class RefusedRequestError(Exception):
    """The request is not answered, and why, in one line."""

    status: HTTPStatus
    text: str


def read_head(connection: socket.socket) -> bytes | None:
    """Return the request line and the headers; None where the peer says nothing, or goes. Raises RefusedRequestError and OSError."""
    deadline = time.monotonic() + READ_SECONDS
    head = bytearray()
    while (end := head.find(_END)) < 0 and len(head) <= MOST_HEAD_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = connection.recv(MOST_HEAD_BYTES)
        except TimeoutError:
            if not head:  # a browser keeps a connection ready for later
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
    """Return the path that a request asks for. Raises RefusedRequestError for all but GET, for other hosts, and without the token.

    Another host in the request than one of `hosts` is that of a page which has had its name lead to this machine.
    """
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
