"""Many channels in one thread: any pieces, slow readers, floods and closed peers."""

import json
import os
import random
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import wait_until
from untyped import Message, array_of, fields_of

from crosstrain.engine.protocol.messages import (
    FILE_PIECE_BYTES,
    MAX_HEADER_BYTES,
    MAX_PREFACE_BYTES,
    Detached,
    ProtocolError,
    RawArray,
    Stream,
    encoded,
)
from crosstrain.engine.protocol.node_messages import Sample
from crosstrain.engine.protocol.transport import Incoming, Outgoing, start_over_stdio
from crosstrain.launch.driver.node_channels import MAX_WAITING_BYTES, NodeConnections
from crosstrain.launch.launchers.base import NodeChannel

FIELDS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.none() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9) | st.lists(st.booleans(), max_size=3),
)
MESSAGES = st.builds(
    lambda kind, fields, sizes: Message(kind, fields, {str(n): np.arange(size, dtype="<i4") for n, size in enumerate(sizes)}),
    st.text(max_size=5),
    FIELDS,
    st.lists(st.integers(0, 9000), max_size=3),
)


def plain(message):
    """Return a message in a comparable form: as text, since NaN is not equal to itself."""
    arrays = {name: (array.dtype.str, array.shape, array.tobytes()) for name in message.arrays for array in [array_of(message, name)]}
    return json.dumps([message.kind, fields_of(message)], sort_keys=True), arrays


@contextmanager
def detached(begins_after=None, held=b"", begun=lambda: None):
    """Yield a stream's detached channel over a socket, and the other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        descriptor = ours.detach()
        yield Detached(descriptor, descriptor, held, begins_after, begun), theirs


def taken(incoming):
    messages = []
    while incoming.fill():
        while (item := incoming.next()) is not None:
            messages.append(item[0])
    return messages


@settings(max_examples=40)
@given(messages=st.lists(MESSAGES, max_size=6), pieces=st.lists(st.integers(1, 5000), min_size=1, max_size=40), held=st.integers(0, 500))
def test_messages_arrive_in_order_from_any_pieces(messages, pieces, held):
    data = b"".join(bytes(part) for message in messages for part in encoded(message))
    with detached(held=data[:held]) as (ours, theirs):
        incoming, received, rest, turn = Incoming(ours), [], data[held:], 0
        while (item := incoming.next()) is not None:
            received.append(item[0])
        while rest:
            size = pieces[turn % len(pieces)]
            theirs.sendall(rest[:size])
            rest, turn = rest[size:], turn + 1
            received += taken(incoming)
        assert [plain(message) for message in received] == [plain(message) for message in messages]
        assert incoming.arrived_bytes == len(data)
        assert not incoming.ended
        theirs.shutdown(socket.SHUT_WR)
        assert taken(incoming) == []
        assert incoming.ended
        incoming.close()


def outcome(receive):
    try:
        message = receive()
    except ConnectionError:
        return "refused"
    return None if message is None else plain(message)


LINES = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=4), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ).map(lambda value: json.dumps(value).encode()),
    FIELDS.map(lambda fields: json.dumps({"kind": "x", **fields}).encode()),
)


@settings(max_examples=100)
@given(LINES.filter(lambda line: b"\n" not in line))
@example(b'{"kind":"x","a":NaN}')
@example(b'{"kind":"x","a":-Infinity,"b":1e999}')
@example(b'{"kind":"x","a":"\\ud800"}')
@example(b'{"kind":"x","a":' + b"9" * 400 + b"}")
@example(b'{"kind":"x","kind":"y"}')
@example(b'{"kind":"x","a":"\xff"}')
@example(b'{"kind":"x","arrays":[["a","|u1",[3],1073741824]]}')
@example(b'{"kind":"x","arrays":[["a","|u1",[3],-1]]}')
@example(b"[" * 100_000)
@example(b'{"kind":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
def test_blocking_and_nonblocking_readers_agree(line):
    """The standard library's reader is the reference, except for nesting, where both may refuse."""
    with ExitStack() as ends:
        ours, theirs = (ends.enter_context(end) for end in socket.socketpair())
        reader, writer = (ends.enter_context(ours.makefile(mode)) for mode in ("rb", "wb"))
        writing = threading.Thread(target=lambda: (theirs.sendall(line + b"\n"), theirs.shutdown(socket.SHUT_WR)))
        writing.start()
        blocking = outcome(Stream(reader, writer).receive)
        writing.join()
    with detached(held=line + b"\n") as (descriptor, _):
        incoming = Incoming(descriptor)
        assert outcome(lambda: None if (item := incoming.next()) is None else item[0]) == blocking
        incoming.close()


@pytest.mark.parametrize("line", [b"x" * MAX_HEADER_BYTES, b"x" * MAX_HEADER_BYTES + b"\n"])
def test_a_header_is_bounded(line):
    with detached(held=line) as (ours, _):
        incoming = Incoming(ours)
        with pytest.raises(ProtocolError, match="too long"):
            incoming.next()
        incoming.close()


@given(before=st.lists(st.binary(max_size=50).filter(lambda line: b"begins" not in line), max_size=5), piece=st.integers(1, 80))
def test_lines_before_the_first_message_are_skipped(before, piece):
    data = b"".join(line + b"\n" for line in before) + b"begins\r\n" + b"".join(map(bytes, encoded(Message("x"))))
    begun = []
    with detached(b"begins", begun=lambda: begun.append(1)) as (ours, theirs):
        incoming, received = Incoming(ours), []
        for start in range(0, len(data), piece):
            theirs.sendall(data[start : start + piece])
            received += taken(incoming)
        assert [message.kind for message in received] == ["x"]
        assert begun == [1]
        incoming.close()


@pytest.mark.parametrize("line", [b"x\n", b"x"])
def test_lines_before_the_first_message_are_bounded(line):
    block = line * (2**17 // len(line))
    with detached(b"begins") as (ours, theirs):
        incoming = Incoming(ours)

        def flood():
            with suppress(OSError):
                while True:
                    theirs.sendall(block)

        flooding = threading.Thread(target=flood, daemon=True)
        flooding.start()

        def read():
            while True:
                incoming.fill()
                incoming.next()

        with pytest.raises(ProtocolError, match="too much before"):
            read()
        assert incoming.arrived_bytes < 2 * MAX_PREFACE_BYTES
        incoming.close()
        flooding.join(5.0)
        assert not flooding.is_alive()


@pytest.mark.thorough
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(0, 400_000), min_size=1, max_size=12), reads=st.lists(st.integers(1, 300_000), min_size=1))
def test_slow_reader_gets_everything_without_blocking(sizes, reads):
    messages = [Message(str(number), {}, {"a": np.full(size, number, np.uint8)}) for number, size in enumerate(sizes)]
    expected = b"".join(bytes(part) for message in messages for part in encoded(message))
    with detached() as (ours, theirs):
        outgoing, received = Outgoing(ours), bytearray()
        for message in messages:
            outgoing.send(message)
        theirs.setblocking(False)
        turn = 0
        while len(received) < len(expected):
            with suppress(BlockingIOError):
                received += theirs.recv(reads[turn % len(reads)])
            outgoing.flush()
            turn += 1
        assert received == expected
        assert not outgoing.waiting
        os.close(ours.reading)


def test_closed_peer_does_not_block():
    with detached() as (ours, theirs):
        outgoing = Outgoing(ours)
        assert outgoing.send(Message("x", {}, {"a": np.zeros(10**7, np.uint8)}))
        theirs.close()
        assert outgoing.flush()
        assert outgoing.failed
        assert not outgoing.send(Message("x"))
        outgoing.wait(10.0)
        os.close(ours.reading)


def test_non_json_value_is_refused():
    with pytest.raises(TypeError, match="does not travel"):
        encoded(Sample(object()))


@contextmanager
def members(count):
    """Yield the driver's connections, and the streams of their nodes."""
    with ExitStack() as ends:
        channels, nodes = [], []
        for node in range(count):
            ours, theirs = (ends.enter_context(end) for end in socket.socketpair())
            stream, peer = (Stream(end.makefile("rb"), end.makefile("wb")) for end in (ours, theirs))
            ends.callback(stream.close)
            ends.callback(peer.close)
            ends.callback(peer.cut)
            channels.append(NodeChannel(node, stream, "127.0.0.1", None, None, False))
            nodes.append(peer)
        yield NodeConnections(channels), nodes


def test_one_thread_serves_200_nodes_and_reports_losses():
    count, rounds, before = 200, 5, threading.active_count()
    with members(count) as (driver, nodes):
        assert threading.active_count() <= before + 1
        gone = set(random.Random(7).sample(range(count), 50))
        for number in range(rounds):
            for node, stream in enumerate(nodes):
                stream.send(Message("said", {"node": node, "number": number}, {"a": RawArray("|u1", [node], bytes(node))}))
        for node in gone:
            nodes[node].cut()
        heard, lost = {node: [] for node in range(count)}, []
        while len(lost) < len(gone) or sum(map(len, heard.values())) < count * rounds:
            node, message = driver.next(10.0)
            if message is None:
                lost.append(node)
            else:
                assert (fields_of(message)["node"], len(array_of(message, "a"))) == (node, node)
                heard[node].append(fields_of(message)["number"])
        assert all(numbers == list(range(rounds)) for numbers in heard.values())
        assert (set(lost), len(lost), set(driver.lost)) == (gone, len(gone), gone)
        for node in range(count):
            driver.send(node, Message("told", {"node": node}))
        driver.flush(10.0)
        assert all(fields_of(nodes[node].receive())["node"] == node for node in set(range(count)) - gone)
        assert driver.next(0.1) is None


def test_flooding_and_unread_nodes_block_nobody():
    size = FILE_PIECE_BYTES
    with members(3) as (driver, (_, flooding, live)):
        driver.watch(3600.0)

        def flood():
            with suppress(OSError, ValueError):
                while True:
                    flooding.send(Message("log", {}, {"text": RawArray("|u1", [size], bytes(size))}))

        threading.Thread(target=flood, daemon=True).start()
        began = time.monotonic()
        for _ in range(20):
            driver.send(0, Message("state", {}, {"a": np.zeros(10**7, np.uint8)}))
        assert time.monotonic() - began < 5.0
        wait_until(lambda: driver._inbox.qsize() >= MAX_WAITING_BYTES // size - 1, 20, "what may wait")
        for number in range(50):
            live.send(Message("said", {"number": number}))
            driver.send(2, Message("told", {"number": number}))
            while (item := live.receive()).kind == "alive":
                pass
            assert fields_of(item)["number"] == number
        numbers = []
        while len(numbers) < 50:
            node, message = driver.next(10.0)
            numbers += [fields_of(message)["number"]] if node == 2 else []
        assert numbers == list(range(50))
        assert driver.lost == []


def test_child_over_pipes_ends_with_its_input():
    process, stream = start_over_stdio(subprocess.Popen, ["cat"])
    driver = NodeConnections([NodeChannel(0, stream, "127.0.0.1", False, None, True, process)])
    text = "x" * 10**6
    for number in range(5):
        driver.send(0, Message("said", {"number": number, "text": text}))
    assert [fields_of(driver.next(10.0)[1])["number"] for _ in range(5)] == list(range(5))
    driver.end_sending(10.0)
    driver.send(0, Message("said", {"number": 5}))
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(10.0) == 0
    assert driver.next(10.0) == (0, None)
    stream.close()


def test_message_read_with_the_previous_one_is_kept():
    """A node's next message may arrive with its greeting, which the launcher reads."""
    with ExitStack() as ends:
        ours, theirs = (ends.enter_context(end) for end in socket.socketpair())
        stream, peer = (Stream(end.makefile("rb"), end.makefile("wb")) for end in (ours, theirs))
        ends.callback(stream.close)
        ends.callback(peer.close)
        ends.callback(peer.cut)
        for kind in ("join", "hello", "sample"):
            peer.send(Message(kind))
        assert stream.receive().kind == "join"
        driver = NodeConnections([NodeChannel(0, stream, "127.0.0.1", None, None, False)])
        assert [driver.next(10.0)[1].kind for _ in range(2)] == ["hello", "sample"]


def test_closed_channel_is_lost():
    with members(2) as (_, _), ExitStack() as ends:
        ours, theirs = (ends.enter_context(end) for end in socket.socketpair())
        stream = Stream(ours.makefile("rb"), ours.makefile("wb"))
        stream.close()
        del theirs
        driver = NodeConnections([NodeChannel(0, stream, "127.0.0.1", None, None, False)])
        assert driver.next(10.0) == (0, None)
        driver.send(0, Message("x"))
        driver.flush(1.0)
        assert driver.alive == set()
