"""Replacement of lost nodes: the new agent is the node once it has greeted."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest
from untyped import Message

from crosstrain.core.errors import RunFailedError
from crosstrain.engine.protocol.messages import PROTOCOL, Stream
from crosstrain.launch.driver.nodes import Nodes
from crosstrain.launch.launchers.base import NodeChannel
from crosstrain.monitor.host import describe_host

FAILED_START = -1
"""In place of a protocol: an agent that ends immediately, as if its host refused connections."""


class Cluster:
    """Nodes behind sockets operated by the test; `coming` greet in turn as replacements."""

    def __init__(self, files, count, coming):
        self.files = files
        self.coming = list(coming)
        self.useless = []
        self.ends = {}
        channels = [self.channel(node) for node in range(count)]
        self.nodes = Nodes(channels, node_timeout_seconds=30.0, replace=self.replace, on_useless=self.useless.append)
        for node in range(count):
            self.greet(node)
        self.nodes.greet(30.0)

    def channel(self, node):
        ends = [self.files.enter_context(end) for end in socket.socketpair()]
        ours, theirs = (Stream(end.makefile("rb"), end.makefile("wb")) for end in ends)
        self.files.callback(theirs.close)
        self.files.callback(ours.close)
        self.files.callback(ends[1].close)
        self.files.callback(ends[1].shutdown, socket.SHUT_RDWR)
        self.ends[node] = (theirs, ends[1])
        return NodeChannel(node, ours, f"10.0.0.{node}", None, None, shares_files=False)

    def replace(self, node):
        protocol = self.coming.pop(0) if self.coming else None
        if protocol is None:
            return None
        channel = self.channel(node)
        if protocol == FAILED_START:
            self.ends[node][1].shutdown(socket.SHUT_RDWR)
        elif protocol:
            self.greet(node, protocol)
        return channel

    def greet(self, node, protocol=PROTOCOL):
        greeting = {"node": node, "pid": 1, "identity": {"boot": "b", "network": "n"}, "scratch": "", "address": None, "protocol": protocol}
        self.ends[node][0].send(Message("hello", {**greeting, "host": {**describe_host({}), "hostname": f"host-{node}"}}))

    def lose(self, node):
        self.ends[node][1].shutdown(socket.SHUT_RDWR)
        while node not in self.nodes.peers.lost:
            self.nodes.receive(1.0, {"worker-1": 1})


def test_replacement_is_the_node_and_late_messages_are_lost():
    with ExitStack() as files:
        cluster = Cluster(files, 3, [PROTOCOL])
        nodes = cluster.nodes
        old = cluster.ends[1][0]
        old.send(Message("phase", {"name": "left behind", "from": "worker-1"}))
        cluster.lose(1)
        assert nodes.answering == {0, 2}
        nodes.restore(30.0)
        assert (nodes.answering, list(nodes.peers.lost)) == ({0, 1, 2}, [])
        assert nodes.hosts[1]["hostname"] == "host-1"
        cluster.ends[1][0].send(Message("phase", {"name": "new", "from": "worker-1"}))
        heard = [answer for _ in range(20) if (answer := nodes.receive(0.1, {"worker-1": 1})) is not None]
        assert [(node, message.name) for node, message in heard] == [(1, "new")]


@pytest.mark.parametrize("coming", [[], [0], [PROTOCOL - 1]], ids=["none", "silent", "of-another-release"])
def test_failed_replacement_is_no_violation(coming):
    with ExitStack() as files:
        cluster = Cluster(files, 2, coming)
        cluster.lose(1)
        cluster.nodes.restore(0.5)
        assert (cluster.nodes.answering, list(cluster.nodes.peers.lost)) == ({0}, [1])
        assert cluster.nodes.violation is None
        assert len(cluster.useless) == (coming == [PROTOCOL - 1])
        assert isinstance(cluster.nodes.loss(1), RunFailedError)


def test_nodes_are_retried_and_reported_while_others_work(monkeypatch):
    monkeypatch.setattr("crosstrain.launch.driver.nodes.RETRY_SECONDS", 0.05)
    with ExitStack() as files:
        cluster = Cluster(files, 3, [None, PROTOCOL - 1, PROTOCOL])
        notified = threading.Event()

        def more(answering):
            if answering == {0, 1, 2}:
                notified.set()
            return notified.is_set()

        cluster.nodes.when_more_answer = more
        cluster.lose(2)
        cluster.nodes.keep_restoring(5.0)
        for _ in range(100):
            cluster.nodes.receive(0.05, {})
            cluster.nodes.check()
            if notified.is_set():
                break
        assert notified.is_set()
        assert cluster.coming == []
        assert len(cluster.useless) == 1


def test_refusing_host_is_retried_until_it_is_back(monkeypatch):
    """As a host that restarts."""
    monkeypatch.setattr("crosstrain.launch.driver.nodes.RETRY_SECONDS", 0.05)
    with ExitStack() as files:
        cluster = Cluster(files, 2, [FAILED_START, FAILED_START, PROTOCOL])
        cluster.lose(1)
        cluster.nodes.restore(30.0)
        assert (cluster.nodes.answering, list(cluster.nodes.peers.lost), cluster.coming) == ({0, 1}, [], [])


def test_retries_of_a_refusing_host_are_bounded(monkeypatch):
    monkeypatch.setattr("crosstrain.launch.driver.nodes.RETRY_SECONDS", 0.05)
    with ExitStack() as files:
        cluster = Cluster(files, 2, [FAILED_START] * 1000)
        cluster.lose(1)
        began = time.monotonic()
        cluster.nodes.restore(1.0)
        assert time.monotonic() - began >= 1.0
        assert len(cluster.coming) < 999
        assert list(cluster.nodes.peers.lost) == [1]
        cluster.coming = [FAILED_START]
        began = time.monotonic()
        cluster.nodes.restore(60.0)
        assert time.monotonic() - began < 30
        assert (list(cluster.nodes.peers.lost), cluster.coming) == ([1], [])


@pytest.mark.parametrize(("coming", "used"), [([PROTOCOL, 0], {0, 1}), ([0, FAILED_START, PROTOCOL], {0, 2})])
def test_replaced_node_is_used_though_another_hangs(monkeypatch, coming, used):
    """A refusing host does not wait for a hanging one either."""
    monkeypatch.setattr("crosstrain.launch.driver.nodes.RETRY_SECONDS", 0.2)
    with ExitStack() as files:
        cluster = Cluster(files, 3, coming)
        answering_sets = []
        cluster.nodes.when_more_answer = lambda answering: answering_sets.append(set(answering)) or answering == used
        cluster.lose(1)
        cluster.lose(2)
        cluster.nodes.keep_restoring(60.0)
        for _ in range(100):
            cluster.nodes.receive(0.05, {})
            cluster.nodes.check()
            if used in answering_sets:
                break
        assert answering_sets[-1] == used


def test_only_node_can_be_replaced_repeatedly():
    """With its channel the serving thread ends; the next channel gets another thread."""
    rounds = 30
    with ExitStack() as files:
        cluster = Cluster(files, 1, [PROTOCOL] * rounds)
        for _ in range(rounds):
            cluster.lose(0)
            cluster.nodes.restore(30.0)
            assert cluster.nodes.answering == {0}
