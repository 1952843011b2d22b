"""The live page's server against real clients: who is answered and who is refused."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import ExitStack, closing, contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import is_over, wait_until
from strangers import listens

from crosstrain.report.pages.live_server import (
    MAX_ANSWERS,
    MAX_HEAD_BYTES,
    READ_SECONDS,
    Document,
    LocalServer,
    RefusedRequestError,
    parse_request,
)

BODY = b"<p>\xc3\xa9</p>" * 1000
HOSTS = {"127.0.0.1:4000", "localhost:4000"}


@contextmanager
def serving(find=lambda path: Document("text/html", BODY) if path == "/" else None):
    """Yield a running server and its reports."""
    reports = []
    with closing(LocalServer(find, reports.append)) as server:
        server.start()
        yield server, reports


@pytest.fixture(scope="module")
def server():
    with serving() as (live_server, reports):
        yield live_server
    assert reports == []


def sent(server, data, end=False):
    """Return the whole answer to some bytes; `end` closes the sending side."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return received(connection)


def received(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


def request(server, target=None, *, method="GET", host=None, more=""):
    target = f"/?token={server.token}" if target is None else target
    host = f"127.0.0.1:{server.port}" if host is None else host
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode("latin-1")


def status(answer):
    return int(re.match(rb"HTTP/1\.1 (\d{3}) ", answer)[1])


def test_address_serves_the_page_with_strict_headers(server):
    assert re.fullmatch(rf"http://127\.0\.0\.1:{server.port}/\?token=[\w-]{{43}}", server.address)
    for host in (None, f"localhost:{server.port}", f"LocalHost:{server.port}"):
        head, _, body = sent(server, request(server, host=host)).partition(b"\r\n\r\n")
        assert status(head) == 200
        assert body == BODY
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert lines["Content-Length"] == str(len(BODY))
    assert lines["Content-Type"] == "text/html; charset=utf-8"
    assert (lines["Cache-Control"], lines["Referrer-Policy"], lines["X-Content-Type-Options"]) == ("no-store", "no-referrer", "nosniff")
    policy = dict(rule.split(" ", 1) for rule in lines["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
    assert not any("access-control" in name.lower() for name in lines)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"target": "/"}, 403),
        ({"target": "/?token="}, 403),
        ({"target": "/?token=wrong"}, 403),
        ({"target": "/?token=%C3%A9%00"}, 403),
        ({"target": "/?" + "&".join("token=a" for _ in range(100))}, 400),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1"}, 421),
        ({"host": "127.0.0.1:1"}, 421),
        ({"host": ""}, 421),
        ({"more": "Host: 127.0.0.1\r\n"}, 421),
        ({"method": "POST", "more": "Content-Length: 3\r\n"}, 405),
        ({"method": "HEAD"}, 405),
        ({"method": "OPTIONS", "more": "Origin: http://evil.example\r\nAccess-Control-Request-Method: GET\r\n"}, 405),
        ({"method": "CONNECT", "target": "127.0.0.1:22"}, 400),
        ({"target": "http://evil.example/"}, 400),
        ({"more": "no header\r\n"}, 400),
        ({"more": "X: a\n b\r\n"}, 400),
        ({"more": f"X: {'a' * MAX_HEAD_BYTES}\r\n"}, 431),
        ({"target": f"/{'a' * MAX_HEAD_BYTES}"}, 431),
        ({"more": "".join(f"X-{number}: a\r\n" for number in range(2000))}, 431),
    ],
)
def test_invalid_request_is_refused_with_one_line(server, change, expected):
    answer = sent(server, request(server, **change))
    assert status(answer) == expected
    assert len(answer) < 1500
    assert answer.partition(b"\r\n\r\n")[2].count(b"\n") == 1
    assert server.token.encode() not in answer
    assert b"Access-Control" not in answer


def test_token_alone_gives_not_found_for_other_paths(server):
    assert status(sent(server, request(server, f"/no?token={server.token}"))) == 404
    assert status(sent(server, request(server, "/no"))) == 403
    assert status(sent(server, request(server, f"/?token={server.token}x"))) == 403
    assert status(sent(server, request(server, f"/?token={server.token}&token={server.token}"))) == 403


def test_endless_request_is_refused_and_not_stored(server):
    """Sends more than all buffers hold, so that the sender notices that nobody reads."""
    with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
        sent(server, b"GET /" + b"a" * 100_000_000)
    assert status(sent(server, request(server))) == 200


def test_slow_client_gets_408_and_silent_one_is_closed(server):
    with ExitStack() as opened:
        silent, slow, dripping = (opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(3))
        slow.sendall(b"GET / HTTP/1.1\r\n")
        over = threading.Event()

        def drip():
            while not over.wait(READ_SECONDS / 10):
                try:
                    dripping.sendall(b"G")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert status(sent(server, request(server))) == 200
            assert [status(received(connection)) for connection in (slow, dripping)] == [408, 408]
            assert received(silent) == b""
        finally:
            over.set()
            thread.join()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300) | st.text(alphabet="GET /?token=HTP1.\r\n:os", max_size=200).map(str.encode))
def test_random_bytes_reveal_nothing_and_do_no_harm(server, data):
    answer = sent(server, data + b"\r\n\r\n", end=True)
    assert 400 <= status(answer) < 500
    assert len(answer) < 1500
    assert status(sent(server, request(server))) == 200


@given(
    target=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60),
    lines=st.lists(st.tuples(st.sampled_from(["Host", "host", "X-A", "Cookie"]), st.text(max_size=40)), max_size=5),
    method=st.sampled_from(["GET", "get", "PUT", "DELETE"]),
)
def test_request_without_token_and_host_is_refused(target, lines, method):
    head = "\r\n".join([f"{method} /{target} HTTP/1.1", *(f"{name}: {value}" for name, value in lines)]).encode("latin-1", "replace")
    with pytest.raises(RefusedRequestError):
        parse_request(head, HOSTS, "s3cret-token")


@given(
    path=st.from_regex(r"/[a-z0-9._-]{0,20}", fullmatch=True),
    host=st.sampled_from(sorted(HOSTS)),
    parameter=st.from_regex(r"[a-z]{1,4}=[a-z]{0,5}", fullmatch=True),
)
def test_request_with_token_and_host_is_accepted(path, host, parameter):
    head = f"GET {path}?{parameter}&token=s3cret HTTP/1.1\r\nAccept: */*\r\nhOsT:{host} \r\nCookie: a=b; token=no"
    assert parse_request(head.encode("latin-1"), HOSTS, "s3cret") == path


def connection_threads():
    """Return the threads that serve connections, without those of other tests."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("peer ")]


@pytest.mark.thorough
def test_hundreds_of_connections_block_nobody():
    with serving() as (server, _), ExitStack() as opened:
        for number in range(400):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            connection.sendall([b"", b"GET", b"\x00" * 100][number % 3])
        assert status(sent(server, request(server))) == 200
        assert len(connection_threads()) < 400
        wait_until(lambda: not connection_threads(), 60, "the threads of connections to end")


def test_concurrent_answers_are_limited():
    """Each client reads its document slowly, so that its request stays open."""
    body = b"x" * 30_000_000
    with serving(lambda path: Document("text/plain", body)) as (server, _), ExitStack() as opened:
        taking = []
        for _ in range(MAX_ANSWERS):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            connection.sendall(request(server))
            assert connection.recv(1) == b"H"
            taking.append(connection)
        assert status(sent(server, request(server))) == HTTPStatus.SERVICE_UNAVAILABLE
        assert len(received(taking.pop())) > len(body)
        wait_until(lambda: status(sent(server, request(server))) == 200, 60, "room for another request")


def test_closing_leaves_neither_port_nor_thread():
    threads = set(threading.enumerate())
    with ExitStack() as opened:
        with serving(lambda path: Document("text/plain", b"x" * 30_000_000)) as (server, _):
            taking = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            taking.sendall(request(server))
            assert taking.recv(1) == b"H"
            silent = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            assert listens(server.port)
        assert not listens(server.port)
        assert is_over(silent)
        wait_until(lambda: set(threading.enumerate()) <= threads, 60, "the threads to end")
    server.close()


def test_unopened_server_can_be_closed():
    with closing(LocalServer(lambda path: None, lambda text: None)) as server:
        assert listens(server.port)
    assert not listens(server.port)


def test_server_accepts_local_connections_only(server):
    lines = Path("/proc/net/tcp").read_text().splitlines()
    (line,) = (line for line in lines if f":{server.port:04X} 00000000:0000 0A" in line)
    assert line.split()[1].startswith("0100007F:")
