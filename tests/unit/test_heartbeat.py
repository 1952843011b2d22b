"""Heartbeat timeouts: silence counted without a clock, over sockets and with hostile peers."""

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from untyped import Message

from crosstrain.core.cluster import TaskSpec
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.core.job import Job
from crosstrain.core.liveness import MAX_TICK_SECONDS, SilenceCounter
from crosstrain.engine.protocol.join_messages import JoinRequest
from crosstrain.engine.protocol.messages import ALIVE, PROTOCOL, Stream
from crosstrain.launch.driver import nodes
from crosstrain.launch.driver.task_group import TaskGroup
from crosstrain.launch.launchers.base import NodeChannel
from crosstrain.launch.launchers.environments import detect
from crosstrain.launch.launchers.joining import _ask
from crosstrain.launch.launchers.rendezvous import ExternalLauncher
from crosstrain.monitor.host import describe_host

LIMIT = 10.0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=200))
def test_silence_is_sum_of_capped_ticks_since_arrival(ticks):
    counter = SilenceCounter(LIMIT, 0.0)
    counter.tick(0.0, {1: 0})
    now, arrived, expected = 0.0, 0, 0.0
    for seconds, hears in ticks:
        now += seconds
        arrived += hears
        passed = min(seconds, MAX_TICK_SECONDS)
        expected = 0.0 if hears else expected + passed
        silent = counter.tick(now, {1: arrived})
        if abs(expected - LIMIT) > 1e-6:
            assert silent == ([1] if expected > LIMIT else [])


@given(st.integers(1, 18), st.floats(0, 1e9))
def test_stopped_process_grants_peers_most_of_the_timeout(ticks_before, absence_seconds):
    counter, now = SilenceCounter(LIMIT, 0.0), 0.0
    counter.tick(now, {1: 0, 2: 0})
    for _ in range(ticks_before):
        now += 0.25
        counter.tick(now, {1: 0, 2: 0})
    assert counter.tick(now + absence_seconds, {1: 0, 2: 0}) == []
    assert counter.tick(now + absence_seconds + 0.25, {1: 1, 2: 0}) == []


def test_each_peer_is_counted_separately():
    counter = SilenceCounter(1.0, 0.0)
    silent_peers = [counter.tick(0.5 * tick, {1: 0, 2: tick, **({3: 0} if tick != 2 else {})}) for tick in range(5)]
    assert silent_peers == [[], [], [1], [1], [1]]


@pytest.fixture
def pair():
    """Yield both ends of a TCP connection, as streams."""
    with ExitStack() as files, socket.create_server(("127.0.0.1", 0)) as server:
        ours = files.enter_context(socket.create_connection(server.getsockname()))
        theirs = files.enter_context(server.accept()[0])
        streams = tuple(Stream(end.makefile("rb"), end.makefile("wb")) for end in (ours, theirs))
        for stream in streams:
            files.callback(stream.close)
        yield streams, (ours, theirs)


def arrives(stream, before):
    deadline = time.monotonic() + 30
    while stream.arrivals == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return stream.arrivals


def test_partial_and_unread_data_are_arrivals(pair):
    (ours, _), (_, theirs) = pair
    before = ours.arrivals
    theirs.sendall(b'{"kind":"x","arrays":[["a","|u1",[100000000],100000000]]}\n')
    before = arrives(ours, before)
    assert ours.unread_bytes > 0

    def read():
        with pytest.raises(ConnectionError):
            ours.receive()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(5):
        before = arrives(ours, before)
        theirs.sendall(bytes(1000))
    before = arrives(ours, before)
    theirs.shutdown(socket.SHUT_RDWR)
    reader.join(30)
    assert not reader.is_alive()
    ours.close()
    assert ours.arrivals[1] == 0


def test_close_does_not_wait_for_reader_or_writer(pair):
    """The peer neither writes nor reads."""
    (ours, _), _ = pair
    ended = []

    def read():
        with suppress(ValueError):  # on a busy machine it runs after the close
            assert ours.receive() is None
        ended.append(None)

    def write():
        with suppress(OSError, ValueError):  # the error depends on where it was
            while True:
                ours.send(Message("x", {"text": "x" * 10**6}))
        ended.append(None)

    threads = [threading.Thread(target=work, daemon=True) for work in (read, write)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    closing = threading.Thread(target=ours.close, daemon=True)
    closing.start()
    for thread in (closing, *threads):
        thread.join(30)
        assert not thread.is_alive()
    assert ended == [None, None]


def test_silence_limit_sets_tcp_timeouts(pair):
    (ours, theirs), (end, other_end) = pair
    ours.limit_silence(20.0)
    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 6
    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    assert other_end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    theirs.limit_silence(365 * 86_400.0)  # the maximum of the option


class Nodes:
    """A driver's control over sockets whose other ends the test uses."""

    def __init__(self, files, count, limit_seconds):
        self.streams, channels = [], []
        for node in range(count):
            ends = [files.enter_context(end) for end in socket.socketpair()]
            ours, theirs = (Stream(end.makefile("rb"), end.makefile("wb")) for end in ends)
            files.callback(theirs.close)
            files.callback(ours.close)
            files.callback(ends[1].shutdown, socket.SHUT_RDWR)
            self.streams.append(theirs)
            channels.append(NodeChannel(node, ours, f"10.0.0.{node}", None, None, shares_files=False))
        placed = [TaskSpec("worker", node, node, leading=node == 0) for node in range(count)]
        heard = nodes.Nodes(channels, node_timeout_seconds=limit_seconds)
        self.control = TaskGroup(heard, placed)
        self.over = threading.Event()
        files.callback(self.over.set)

    def greet(self, protocol=PROTOCOL):
        for node, stream in enumerate(self.streams):
            fields = {
                "node": node,
                "pid": 1,
                "identity": {"boot": "b", "network": "n"},
                "scratch": "",
                "address": None,
                "protocol": protocol,
            }
            stream.send(Message("hello", {**fields, "host": {**describe_host({}), "hostname": f"host-{node}"}}))
        self.control.nodes.greet(30.0)

    def send_heartbeats(self, node):
        """Send heartbeats and read messages until the test is over."""

        def talk():
            with suppress(OSError, ValueError):  # the test is over
                while not self.over.wait(0.1):
                    self.streams[node].send(ALIVE)

        threading.Thread(target=talk, daemon=True).start()

    def listen(self):
        while True:
            self.control.receive(1.0)

    def failure(self):
        with pytest.raises(RunFailedError) as raised:
            self.listen()
        return raised.value


@pytest.mark.quick_cases("False")
@pytest.mark.parametrize("victim", [False, True])
def test_silent_node_is_blamed_if_its_victim_fails_first(victim):
    with ExitStack() as files:
        nodes = Nodes(files, 3, 3.0)
        for node in (0, 1):
            nodes.send_heartbeats(node)
        nodes.greet()
        if victim:
            error = {"type": "RuntimeError", "message": "Connection reset by peer", "errno": None, "exit_code": None, "peer_lost": True}
            nodes.streams[1].send(Message("error", {**error, "from": "worker-1"}))
            death = {
                "task": "worker-1",
                "order": 1,
                "code": 1,
                "signal": None,
                "tail": [],
                "pid": 1,
                "cpu_seconds": 0.5,
                "max_rss_bytes": 1,
            }
            nodes.streams[1].send(Message("death", death))
        error = nodes.failure()
        assert str(error) == "node 2 (host host-2, 10.0.0.2) has not been heard of for 3 s (--node-timeout)"
        assert error.task == "agent-2"
        while (message := nodes.streams[2].receive()) is not None:  # it is disconnected, and reads its end when it can
            assert message.kind == ALIVE.kind


def test_several_silent_nodes_are_all_named():
    with ExitStack() as files:
        nodes = Nodes(files, 3, 3.0)
        nodes.send_heartbeats(0)
        nodes.greet()
        assert str(nodes.failure()) == (
            "node 1 (host host-1, 10.0.0.1) and node 2 (host host-2, 10.0.0.2) have not been heard of for 3 s (--node-timeout)"
        )


def test_agent_of_other_protocol_is_refused():
    with ExitStack() as files, pytest.raises(RunFailedError, match=f"node 0 speaks protocol 3, this driver {PROTOCOL}: install the same"):
        Nodes(files, 1, None).greet(protocol=3)


@pytest.mark.parametrize(("fields", "spoken"), [({}, "a protocol from before it had a number"), ({"protocol": 99}, "protocol 99")])
def test_other_protocol_is_reported_to_both_sides(pair, fields, spoken):
    place = detect({}, "10.0.0.1:29400", 0, 2)
    launcher = ExternalLauncher(Job(nodes=2), place, b"x" * 16, {})
    problem = launcher._problem(JoinRequest(1, 0, {}, **fields), {}, set())
    assert problem == f"it speaks {spoken}, the driver {PROTOCOL}: install the same version everywhere"
    (ours, theirs), _ = pair
    theirs.send(Message("welcome", fields))
    with pytest.raises(UsageError, match=f"the driver speaks {spoken}, this process {PROTOCOL}: install the same version everywhere"):
        _ask(JoinRequest(1, 0, {}), ours, starts_again=False)
