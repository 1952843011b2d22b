"""Whatever a joined node sends, the driver loses nothing but that node."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import RunFailedError
from crosstrain.engine.messages import MAX_ARRAY_BYTES, Message, ProtocolError, RawArray, Stream
from crosstrain.launch.control import Control
from crosstrain.launch.incoming import wrong_with
from crosstrain.launch.local import NodeChannel

NODE_OF = {"worker-0": 0, "worker-1": 1}
DEATH = {"task": "worker-1", "pid": 1, "code": 1, "signal": None, "order": 1, "cpu_seconds": 0.1, "max_rss_bytes": 1, "tail": []}
SOUND = [
    Message("death", DEATH),
    Message("log", {"task": "../x"}, {"text": RawArray("|u1", [2], b"ab")}),
    Message("error", {"from": "worker-1", "type": "E", "message": "m", "errno": None, "exit_code": None}),
    Message("done", {"from": "worker-1", "sequence": 1}),
    Message("sampled"),
]
BROKEN = [
    *(Message("death", {key: value for key, value in DEATH.items() if key != left_out}) for left_out in DEATH),
    Message("death", {**DEATH, "task": "worker-0"}),
    Message("error", {"type": "E", "message": "m", "errno": None, "exit_code": None}),
    Message("error", {"from": "worker-0", "type": "E", "message": "m", "errno": None, "exit_code": 2}),
    Message("done", {"from": ["worker-1"]}),
    Message("state_begin", {"from": "worker-0"}),
    Message("log", {"task": "worker-1"}),
    Message("log", {"task": "worker-1"}, {"text": RawArray("nonsense", [2], b"ab")}),
    Message("sample", {"record": 2}),
    Message("nobody sends this", {}),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)


def test_what_nodes_say_is_let_through():
    assert [wrong_with(1, message, NODE_OF) for message in SOUND] == [None] * len(SOUND)


@given(
    st.sampled_from([message.kind for message in (*SOUND, *BROKEN)]), st.dictionaries(st.sampled_from([*DEATH, "from", "record"]), VALUES)
)
def test_whatever_is_let_through_is_of_the_nodes_own_tasks(kind, fields):
    message = Message(kind, fields)
    if wrong_with(1, message, NODE_OF) is None and kind in ("death", "error", "done", "state_begin"):
        assert fields["task" if kind == "death" else "from"] == "worker-1"


@pytest.fixture
def pair():
    """A control of two nodes, whose tasks are known, and the sockets of the nodes."""
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    streams = [Stream(each.makefile("rb"), each.makefile("wb")) for each in ours]
    channels = [NodeChannel(node, stream, "127.0.0.1", None, None, False) for node, stream in enumerate(streams)]
    control = Control(channels, lambda sample: None, lambda *log: None)
    control._node_of, control._leaders = dict(NODE_OF), {"worker-0": 0, "worker-1": 1}
    yield control, theirs
    for each in (*ours, *theirs):
        each.close()


RAW = [
    b"[" * 200_000 + b"\n",
    json.dumps({"kind": "log", "task": "worker-1", "arrays": [["text", "|u1", [10**15], 10**15]]}).encode() + b"\n",
    json.dumps({"kind": "log", "arrays": [["text", "|u1", [1], -1]]}).encode() + b"\n",
    b'{"kind": 7}\n',
    b"no message\n",
]


@pytest.mark.parametrize("sent", [*BROKEN, *RAW])
def test_a_node_that_sends_what_nobody_sends_is_cut_off_and_blamed(pair, sent):
    control, (_, node) = pair
    if isinstance(sent, bytes):
        node.sendall(sent)
    else:
        with node.makefile("rb") as reader, node.makefile("wb") as writer:
            Stream(reader, writer).send(sent)
    with pytest.raises(RunFailedError, match=r"node 1.* sent .*: it is broken, or hostile, and has been cut off"):
        control.receive(5.0)


def test_arrays_of_a_message_are_bounded():
    reader, writer = socket.socketpair()
    header = {"kind": "x", "arrays": [["a", "|u1", [1], MAX_ARRAY_BYTES // 2 + 1]] * 2}
    with reader, writer, reader.makefile("rb") as file, writer.makefile("wb") as other:
        other.write(json.dumps(header).encode() + b"\n")
        other.flush()
        with pytest.raises(ProtocolError, match="more bytes"):
            Stream(file, other).receive()
