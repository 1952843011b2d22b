"""A node that sends too much waits or is disconnected; the driver's memory is bounded."""

import os
import socket
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import wait_until
from test_node_messages import NODE_OF, SOUND, cluster, read, send
from untyped import Message, fields_of

from crosstrain.core.errors import RunFailedError
from crosstrain.core.listener import Exchange
from crosstrain.engine.protocol.messages import FILE_PIECE_BYTES, MAX_HEADER_BYTES, ProtocolError, RawArray, Stream
from crosstrain.engine.protocol.node_messages import Leaving
from crosstrain.engine.protocol.transport import WrongSecretError, accept, connect
from crosstrain.launch.driver.node_channels import MAX_WAITING_BYTES, NodeConnections
from crosstrain.launch.driver.nodes import Nodes, ReportHandlers
from crosstrain.launch.driver.outstanding_requests import OutstandingRequests
from crosstrain.launch.launchers.base import NodeChannel
from crosstrain.launch.node.agent import Agent

SECRET = b"a secret of some length"


@contextmanager
def streams():
    """Yield the driver's and the node's end of a connection."""
    with ExitStack() as ends:
        pair = [ends.enter_context(end) for end in socket.socketpair()]
        both = tuple(Stream(*(ends.enter_context(end.makefile(mode)) for mode in ("rb", "wb"))) for end in pair)
        ends.callback(pair[1].shutdown, socket.SHUT_RDWR)  # first, so that the driver's serving threads end
        yield both


def test_flooding_node_waits_and_loses_no_message():
    size, count, sent = FILE_PIECE_BYTES, 4 * MAX_WAITING_BYTES // FILE_PIECE_BYTES, []

    def flood(node):
        for number in range(count):
            node.send(Message("log", {"number": number}, {"text": RawArray("|u1", [size], bytes(size))}))
            sent.append(number)

    with streams() as (driver, node):
        members = NodeConnections([NodeChannel(1, driver, "127.0.0.1", None, None, False)])
        flooding = threading.Thread(target=flood, args=(node,))
        flooding.start()
        wait_until(lambda: len(sent) >= MAX_WAITING_BYTES // size - 2, 20, "what may wait")
        time.sleep(0.3)
        assert len(sent) <= MAX_WAITING_BYTES // size + 1  # and one that was read but may not be queued yet
        assert [fields_of(members.next(5.0)[1])["number"] for _ in range(count)] == list(range(count))
        flooding.join()


def test_message_larger_than_queue_limit_is_received():
    """A header's size is estimated, so a single message may exceed the limit."""
    with streams() as (driver, node):
        members = NodeConnections([NodeChannel(1, driver, "127.0.0.1", None, None, False)])
        for number in range(3):
            threading.Thread(target=node.send, args=(Message("long", {"text": "x" * (MAX_HEADER_BYTES - 100)}),)).start()
            assert members.next(5.0)[1].kind == "long", number


def listen(control):
    while True:
        control.receive(5.0)


@pytest.mark.parametrize("kind", ["phase", "error", "sample"])
def test_node_repeating_messages_is_disconnected_and_blamed(kind):
    with cluster() as (control, (_, node)):

        def flood():
            with suppress(OSError), node.makefile("rb") as reader, node.makefile("wb") as writer:  # cut off
                while True:
                    Stream(reader, writer).send(SOUND[kind])

        flooding = threading.Thread(target=flood)
        flooding.start()
        with pytest.raises(
            RunFailedError, match=rf"node 1.* sent more messages '{kind}' .*: it is broken, or hostile, and has been"
        ) as raised:
            listen(control)
        assert raised.value.task == "agent-1"
        flooding.join(5.0)
        assert not flooding.is_alive()


@pytest.mark.parametrize("kind", ["log", "trace"])
def test_files_are_accepted_only_from_stopping_nodes(kind):
    with cluster() as (control, (_, node)):
        send(node, SOUND[kind])
        with pytest.raises(RunFailedError, match=f"node 1.* sent a message '{kind}' before it was asked to stop"):
            control.receive(5.0)


@given(interval=st.floats(0.05, 60.0), seconds=st.floats(0.0, 1e4), num_requests=st.integers(0, 30))
def test_regular_and_requested_samples_are_accepted(interval, seconds, num_requests):
    """However late the driver reads them."""
    requests = OutstandingRequests([1])
    requests.allow_samples(1, interval)
    requests._sampling[1] = (time.monotonic() - seconds, interval)
    for _ in range(num_requests):
        requests.add_request(1, "sampled")
    regular = min(2000, int(seconds / interval))
    assert all(requests.violation_in(1, read(SOUND["sample"])) is None for _ in range(regular + num_requests))


def test_node_may_announce_leaving_once():
    calls = []
    with streams() as (ours, theirs):
        channel = NodeChannel(0, ours, "127.0.0.1", None, None, False)
        nodes = Nodes([channel], ReportHandlers(leaving=lambda: calls.append(True)))
        for _ in range(2):
            theirs.send(Message("leaving"))
        assert nodes.receive(5.0, {}) is None
        assert calls == [True]
        assert nodes.receive(5.0, {}) == (0, None)
        assert calls == [True]
        assert "sent a message 'leaving' that nobody asked for: it is broken, or hostile, and has been cut off" in nodes.describe_loss(0)


def test_replacement_agent_may_announce_leaving():
    requests = OutstandingRequests([0, 1], may_leave=True)
    for _ in range(2):
        assert requests.violation_in(1, Leaving()) is None
        assert requests.violation_in(1, Leaving()) is not None
        requests.reset_agent(1)


def test_restarted_tasks_may_repeat_their_messages():
    requests = OutstandingRequests([1])
    for _ in range(3):
        requests.started(NODE_OF, ["worker-1"])
        assert requests.violation_in(1, read(SOUND["death"])) is None
        assert "more messages 'death' of worker-1" in requests.violation_in(1, read(SOUND["death"]))


@pytest.mark.parametrize("size", [0, 1, FILE_PIECE_BYTES, FILE_PIECE_BYTES + 1, 2 * FILE_PIECE_BYTES + 5])
def test_log_of_any_size_is_sent_once_in_pieces(tmp_path, monkeypatch, size):
    sent = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the agent's folder, which only the end of `serve` removes
    agent = Agent(SimpleNamespace(send=sent.append), 1)
    agent._logs, agent._ships_logs, text = tmp_path, True, os.urandom(size)
    (tmp_path / "worker-1.log").write_bytes(text)
    agent._ship_logs()
    assert b"".join(message.array("text").tobytes() for message in sent) == text
    assert sent
    assert all(message.task == "worker-1" and message.array("text").size <= FILE_PIECE_BYTES for message in sent)
    agent._ship_logs()
    assert len(sent) == max(1, -(-size // FILE_PIECE_BYTES))


def test_header_is_bounded():
    with streams() as (driver, node):
        sending = threading.Thread(target=node.send, args=(Message("x", {"text": "x" * MAX_HEADER_BYTES}),), daemon=True)
        sending.start()
        with pytest.raises(ProtocolError, match="too long"):
            driver.receive()
        driver.cut()
        sending.join(5.0)


def test_replayed_handshake_is_refused():
    """An agent's messages, replayed to the same driver, fail, as the challenge differs."""
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_server(("127.0.0.1", 0)) as listening:

        def accept_agent():
            return accept(Exchange(door.accept()[0], time.monotonic() + 5.0), SECRET)

        def relay_messages():
            inner = socket.create_connection(door.getsockname())
            outer, _ = listening.accept()
            with inner, outer:
                outer.sendall(inner.recv(32, socket.MSG_WAITALL))
                for _ in range(2):
                    recorded.extend(piece := outer.recv(32, socket.MSG_WAITALL))
                    inner.sendall(piece)
                outer.sendall(inner.recv(32, socket.MSG_WAITALL))

        relay = threading.Thread(target=relay_messages)
        relay.start()
        agent = threading.Thread(target=lambda: connect(listening.getsockname(), SECRET).close())
        agent.start()
        accept_agent().close()
        for thread in (relay, agent):
            thread.join(5.0)
        assert len(recorded) == 64
        with socket.create_connection(door.getsockname()) as again:
            again.sendall(recorded)
            with pytest.raises(WrongSecretError):
                accept_agent()
