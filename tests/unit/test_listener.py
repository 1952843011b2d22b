"""A listener under unauthenticated clients: bounded in time, memory and descriptors."""

import gc
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import free_ports, is_over, open_descriptors, wait_until
from strangers import Strangers, dripping, listens
from untyped import Message

from crosstrain.backends.tf.sync.rendezvous import meet
from crosstrain.core import listener as module
from crosstrain.core.cluster import Cluster, Task, TaskSpec
from crosstrain.core.errors import RunFailedError
from crosstrain.core.listener import MAX_UNPROVEN, PROOF_SECONDS, AuthenticatingListener
from crosstrain.engine.protocol.transport import HandshakeError, WrongSecretError, accept, connect
from crosstrain.exchange.authentication import accept as tell_accepted
from crosstrain.exchange.parameter_server import wire_protocol as authentication

pytestmark = pytest.mark.alone  # measures how soon clients are dropped and peers accepted

SECRET = "5e" * 32
HELLO = authentication.Hello("worker", 3, 1000)


def as_driver(exchange):
    return accept(exchange, SECRET.encode())


def as_shard(exchange):
    hello = authentication.admit(exchange, SECRET, 1000)
    return exchange.connection, hello if tell_accepted(exchange.connection) else None


def join_driver(address):
    return connect(address, SECRET.encode())


def join_shard(address):
    return authentication.connect(address, SECRET, HELLO, time.monotonic() + 20.0)


KINDS = pytest.mark.parametrize(("prove", "join"), [(as_driver, join_driver), (as_shard, join_shard)], ids=["rendezvous", "shard"])


@contextmanager
def opened(prove):
    """Open a listener on a free port; yield its address, the accepted peers and the reports."""
    admitted, reports = queue.Queue(), []
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    address = listening.getsockname()
    with AuthenticatingListener(listening, prove, lambda proven, host: admitted.put((proven, host)), reports.append):
        yield address, admitted, reports
    while not admitted.empty():
        close(admitted.get()[0])


def close(proven):
    (proven[0] if isinstance(proven, tuple) else proven).close()


def seconds_to_join(join, address, admitted):
    began = time.monotonic()
    peer = join(address)
    admitted_peer, host = admitted.get(timeout=30)
    assert host == "127.0.0.1"
    close(admitted_peer)
    peer.close()
    return time.monotonic() - began


def handshake_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("peer ")]


def test_listener_limits_are_as_documented():
    assert (PROOF_SECONDS, MAX_UNPROVEN) == (5.0, 256)


@KINDS
def test_hundred_unauthenticated_clients_delay_nobody(prove, join):
    with opened(prove) as (address, admitted, _), Strangers(address, 100):
        assert max(seconds_to_join(join, address, admitted) for _ in range(5)) < 1.0


@KINDS
def test_slow_client_is_disconnected_in_time(monkeypatch, prove, join):
    monkeypatch.setattr(module, "PROOF_SECONDS", 1.5)
    with opened(prove) as (address, admitted, reports):
        assert dripping(address, 15.0) == pytest.approx(1.5, abs=0.8)
        assert seconds_to_join(join, address, admitted) < 1.0
        wait_until(lambda: any("127.0.0.1" in text for text in reports), 5, "the report")


def test_oldest_client_is_dropped_and_nothing_leaks(monkeypatch):
    """Under a flood the newest are heard, files and threads stay bounded, and all are counted."""
    monkeypatch.setattr(module, "MAX_UNPROVEN", 20)
    before = open_descriptors()
    with opened(as_driver) as (address, admitted, reports), ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(70)]
        for client in clients[:50]:
            client.settimeout(5)
            assert len(client.recv(100)) <= 32
            assert is_over(client)
        assert len(handshake_threads()) <= 21
        assert len(open_descriptors() - before) <= 70 + 20 + 2
        assert seconds_to_join(join_driver, address, admitted) < 1.0
    wait_until(lambda: not handshake_threads() and open_descriptors() <= before, 5, "the end of every thread and file")
    assert len(reports) < 10
    assert "since the last one that was named" in reports[-1]


def test_exhausted_descriptors_drop_a_client():
    """Runs in another process, where nothing else opens or closes descriptors."""
    command = [sys.executable, "-c", "import test_listener; test_listener.use_up_descriptors()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def use_up_descriptors():
    """Exhaust the process's descriptors; a peer with the secret is accepted nevertheless."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened(as_driver) as (address, admitted, reports), ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection(address)).recv(1)
        knocking = stack.enter_context(socket.socket())
        gc.collect()
        gc.disable()  # a collection could free a descriptor below the limit
        try:
            lowest_free, highest = os.dup(0), max(map(int, os.listdir("/proc/self/fd")))
            while lowest_free < highest:  # fill gaps left by an earlier test
                stack.callback(os.close, lowest_free)
                lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
            knocking.connect(address)
            wait_until(lambda: any("cannot accept" in text for text in reports), 4, "the report")
            assert knocking.recv(1)  # a client was dropped for it
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            gc.enable()
        assert seconds_to_join(join_driver, address, admitted) < 2.0


def test_wrong_secret_is_reported_and_not_retried():
    with opened(as_driver) as (address, admitted, reports):
        with pytest.raises(WrongSecretError):
            connect(address, b"the secret of another run")
        with opened(as_shard) as (shard, *_), pytest.raises(RunFailedError, match="secret"):
            authentication.connect(shard, "ab" * 32, HELLO, time.monotonic() + 20.0)
        assert admitted.empty()
        wait_until(lambda: any("secret" in text for text in reports), 2, "the report")


def test_refusing_shard_reports_it_immediately():
    with opened(as_shard) as (address, _, reports):
        began = time.monotonic()
        with pytest.raises(RunFailedError, match="refused"):
            authentication.connect(address, SECRET, HELLO._replace(elements=7), time.monotonic() + 20.0)
        assert time.monotonic() - began < 2.0
        wait_until(lambda: any("7 elements" in text for text in reports), 2, "the report")


def test_worker_retries_after_dropped_connection():
    """The first connection is reset during the handshake; the second one succeeds."""
    first = threading.Event()

    def prove(exchange):
        if not first.is_set():
            first.set()
            raise ConnectionError("make room")
        return as_shard(exchange)

    with opened(prove) as (address, admitted, _):
        assert seconds_to_join(join_shard, address, admitted) < 2.0


def test_silent_listener_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(HandshakeError):
            connect(silent.getsockname(), SECRET.encode(), 1.0)
        assert time.monotonic() - began < 2.0


def test_accepted_peers_stay_connected_after_close():
    with opened(as_driver) as (address, admitted, _):
        ours = join_driver(address)
        theirs, _ = admitted.get(timeout=5)
    ours.send(Message("here", {"n": 1}))
    assert theirs.receive() == Message("here", {"n": 1})
    ours.close()
    theirs.close()


def test_foreign_clients_do_not_delay_tensorflow_start():
    ranks = tuple(TaskSpec("worker", index, 0, leading=True) for index in range(3))
    ports = dict(zip((rank.name for rank in ranks), range(free_ports(3), 30_000), strict=False))
    cluster = Cluster(ranks, ("127.0.0.1",), ports, SECRET)
    tasks = [Task(rank, cluster, 1) for rank in ranks]
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, tasks[0], 20.0)
        wait_until(lambda: listens(tasks[0].port), 5, "rank 0")
        with Strangers(("127.0.0.1", tasks[0].port), 100):
            other_joins = [pool.submit(meet, task, 20.0) for task in tasks[1:]]
            for done in (first, *other_joins):
                done.result(timeout=30)
            assert time.monotonic() - began < 2.0
            with socket.create_server(("127.0.0.1", tasks[0].port)):
                pass  # free again immediately, for TensorFlow


@KINDS
@hypothesis.settings(max_examples=200, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.binary(max_size=200), max_size=6), right_start=st.booleans(), hangs_up=st.booleans())
def test_random_bytes_are_never_accepted(doors, prove, join, pieces, right_start, hangs_up):
    """Nobody is accepted, no thread dies, and a peer with the secret is accepted afterwards."""
    address, admitted, _ = doors[prove]
    head = HELLO.packed() if right_start else b""
    with socket.create_connection(address) as client:
        try:
            for piece in [head, *pieces]:
                client.sendall(piece)
            if hangs_up:
                client.shutdown(socket.SHUT_WR)
                client.settimeout(10)
                while client.recv(4096):
                    pass
        except OSError:
            pass  # it has been disconnected by now
    assert admitted.empty()
    assert seconds_to_join(join, address, admitted) < 2.0


@pytest.fixture(scope="module")
def doors():
    with opened(as_driver) as driver, opened(as_shard) as shard:
        yield {as_driver: driver, as_shard: shard}
