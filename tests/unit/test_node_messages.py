"""Invalid messages of a joined node cost the driver nothing but that node."""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from untyped import Message, fields_of

from crosstrain.backends.base import CalibrationResult, EvalResult, Plan, State, StepResult
from crosstrain.core.cluster import TaskSpec
from crosstrain.core.errors import RunFailedError
from crosstrain.engine.protocol.answer_checks import read_node_message
from crosstrain.engine.protocol.messages import MAX_ARRAY_BYTES, MAX_STACK_CHARACTERS, PROTOCOL, ProtocolError, RawArray, Stream
from crosstrain.engine.protocol.node_messages import Death, FromNode
from crosstrain.engine.protocol.state_transfer import StateSender
from crosstrain.engine.protocol.task_messages import Calibrated, Evaluate, Evaluated, SendState, Steps, Train
from crosstrain.engine.task import _report_error
from crosstrain.launch.driver.nodes import Nodes
from crosstrain.launch.driver.outstanding_requests import OutstandingRequests
from crosstrain.launch.driver.task_group import TaskGroup
from crosstrain.launch.launchers.base import NodeChannel
from crosstrain.launch.node.supervisor import tail
from crosstrain.monitor.collector import NodeSampler
from crosstrain.monitor.host import describe_host

NODE_OF = {"worker-0": 0, "worker-1": 1}
FROM_WORKER = {"from": "worker-1"}
GPU = {
    "name": "A", "utilization": 0.5, "memory_bytes": 2**20, "memory_total_bytes": 2**30, "power_watts": 70.5, "tasks": ["worker-1"]
}  # fmt: skip


def sample():
    sampler = NodeSampler(1, isolated=False, interval_seconds=1.0, emit=lambda record: None, cores_available=None)
    sampler.watch("worker-1", os.getpid())
    try:
        return json.loads(json.dumps({**asdict(sampler.sample()), "gpus": [GPU]}))
    finally:
        sampler.stop()


def host():
    listed = [{"name": "A", "memory_total_bytes": 2**30, "uuid": "GPU-a"}]
    return json.loads(json.dumps({**describe_host({}), "gpus": listed, "visible_gpus": [{"visible_as": "0", "uuid": "GPU-a", "gpu": 0}]}))


SUMS = {"loss_sum": "nan", "correct": 1.0, "examples": 4.0}

SOUND = {
    message.kind: message
    for message in [
        Message(
            "hello",
            {
                "protocol": PROTOCOL, "node": 1, "pid": 7, "identity": {"boot": "b", "network": "n"},
                "host": host(), "scratch": b64encode(b"/tmp/x").decode(), "address": None,
            },
        ),
        Message("ports", {"ports": [4000]}),
        Message("sample", {"record": sample()}),
        Message("alive"),
        Message("sampled"),
        Message("states", {"states": {"worker-1": "S"}}),
        Message("stacks", {"number": 1, "stacks": {"worker-1": {"text": "File", "problem": None}}}),
        Message("probe_port", {"number": 1, "port": 21001}),
        Message("peers_probed", {"number": 1, "reached": [0, 2], "heard": []}),
        Message("stopped"),
        Message("log", {"task": "worker-1"}, {"text": RawArray("|u1", [2], b"ab")}),
        Message("trace", {"path": "worker-1/a"}, {"data": RawArray("|u1", [2], b"ab")}),
        Message(
            "death",
            {
                "task": "worker-1", "pid": 7, "code": 1, "signal": None, "order": 1, "cpu_seconds": 0.1, "max_rss_bytes": 1,
                "tail": ["a line"],
            },
        ),
        Message("ready", {**FROM_WORKER, "precision_used": None, "device_used": "gpu"}),
        Message("compile_timed", {**FROM_WORKER, "plain_seconds": 0.1, "compiled_seconds": None, "reason": "no compiler", "tasks": 2}),
        Message("phase", {**FROM_WORKER, "name": "importing"}),
        Message("error", {**FROM_WORKER, "type": "E", "message": "m", "errno": None, "exit_code": None, "peer_lost": False}),
        Message("done", {**FROM_WORKER, "sequence": 1, "command": "train", "seconds": 0.1, "drain_seconds": 0.0}),
        Message(
            "steps",
            {
                **FROM_WORKER, "first_step": 0, "examples": 8, "seconds": 0.1, "data_wait_seconds": None, "network_wait_seconds": 0.0,
                "worker": None, "profiled_seconds": None,
            },
            {"losses": np.array([float("nan"), 1.0], "<f4")},
        ),
        Message(
            "evaluated",
            {**FROM_WORKER, "sequence": 2, "split": "test", "sums": SUMS, "seconds": 0.1, "updates_applied": 2},
        ),
        Message("predicted", {**FROM_WORKER, "start": 0}, {"logits": np.zeros((2, 3), "<f4")}),
        Message("decoded", {**FROM_WORKER, "start": 0, "sums": {"exact": 1.0}, "without_numbers": 0, "seconds": 0.1, "complete": True}),
        Message("calibrated", {**FROM_WORKER, "result": {"worker": 0, "count": 1, "seconds": 0.1, "native": {"a": 1.0}, "refused": None}}),
        Message(
            "state_begin",
            {
                **FROM_WORKER, "sequence": 1, "entries": [["parameters/w", "<f4", [2]]], "updates": 1, "scalars": {"s": 1.0},
                "memory": {"pid": 1, "mark_address": 2, "mark": "00"}, "addresses": [64],
            },
        ),
        Message("state_part", {**FROM_WORKER, "sequence": 1}, {"data": RawArray("|u1", [2], b"ab")}),
        Message("state_end", {**FROM_WORKER, "sequence": 1}),
    ]
}  # fmt: skip


def leaves(kind):
    below = kind.__subclasses__()
    return [leaf for kind_below in below for leaf in leaves(kind_below)] if below else [kind]


def test_node_messages_declare_when_they_arrive():
    assert [kind for kind in leaves(FromNode) if kind.__module__.startswith("crosstrain") and kind.ARRIVES == 0] == []


def test_state_of_a_task_that_has_just_ended_is_accepted():
    for state in ("S", "t", "gone"):
        assert read_node_message(1, Message("states", {"states": {"worker-1": state}}), NODE_OF).states == {"worker-1": state}
    for state in ("", "SS", "S\n", "going", "-"):
        with pytest.raises(ProtocolError, match="'states' that is none"):
            read_node_message(1, Message("states", {"states": {"worker-1": state}}), NODE_OF)


def test_undeclared_message_is_refused():
    class Undeclared(FromNode):
        pass

    assert OutstandingRequests([0]).violation_in(0, Undeclared()) == "more messages 'undeclared' of 0 than there can be"


STRANGE = st.recursive(
    st.sampled_from([None, True, -1, 1.5, 2**70, 10**400, float("nan"), float("inf"), "", "\ud800", "worker-0", "x" * 5000])
    | st.integers()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def travelled(message):
    """Encode and decode the message, as the driver receives it."""
    with ExitStack() as ends:
        ours, theirs = (ends.enter_context(end) for end in socket.socketpair())
        reader, writer = (ends.enter_context(ours.makefile(mode)) for mode in ("rb", "wb"))
        sender = threading.Thread(target=Stream(reader, ends.enter_context(theirs.makefile("wb"))).send, args=(message,))
        sender.start()
        received = Stream(reader, writer).receive()
        sender.join()
        return received


def read(message, node=1):
    """Parse the message as the driver does."""
    return read_node_message(node, message, NODE_OF)


def wrong_with(node, message, node_of):
    """Return the driver's objection to a message, or None."""
    try:
        read_node_message(node, message, node_of)
    except ProtocolError as error:
        return str(error)
    return None


@contextmanager
def cluster():
    """A control of two nodes with known tasks, and the nodes' sockets."""
    with ExitStack() as ends:
        ours, theirs = zip(*(map(ends.enter_context, socket.socketpair()) for _ in range(2)), strict=True)
        streams = [Stream(end.makefile("rb"), end.makefile("wb")) for end in ours]
        for end in streams:
            ends.callback(end.close)
        for end in theirs:
            ends.callback(end.shutdown, socket.SHUT_RDWR)  # first, so that the driver's threads end
        channels = [NodeChannel(node, stream, "127.0.0.1", None, None, False) for node, stream in enumerate(streams)]
        placed = [TaskSpec("worker", number, number, leading=True) for number in (1, 0)]
        control = TaskGroup(Nodes(channels), placed)
        yield control, theirs


def send(end, message):
    with end.makefile("rb") as reader, end.makefile("wb") as writer:
        Stream(reader, writer).send(message)


@pytest.mark.parametrize("kind", SOUND)
def test_valid_node_message_is_accepted(kind):
    assert wrong_with(1, travelled(SOUND[kind]), NODE_OF) is None


@pytest.mark.parametrize("kind", SOUND)
def test_message_with_missing_or_extra_field_is_refused(kind):
    sound = SOUND[kind]
    for name in sound.fields:
        less = {key: value for key, value in sound.fields.items() if key != name}
        assert wrong_with(1, travelled(Message(kind, less, sound.arrays)), NODE_OF)
    assert wrong_with(1, travelled(Message(kind, {**sound.fields, "more": 1}, sound.arrays)), NODE_OF)
    for name in sound.arrays:
        less = {key: value for key, value in sound.arrays.items() if key != name}
        assert wrong_with(1, travelled(Message(kind, sound.fields, less)), NODE_OF)
    assert wrong_with(1, travelled(Message(kind, sound.fields, {**sound.arrays, "more": np.zeros(1)})), NODE_OF)


@st.composite
def damaged(draw):
    """A message with one value, anywhere in it, replaced by a strange one."""
    sound = SOUND[draw(st.sampled_from(sorted(SOUND)))]
    fields = json.loads(json.dumps(dict(sound.fields)))
    into = fields
    while into:
        key = draw(st.sampled_from(sorted(into) if isinstance(into, dict) else range(len(into))))
        if not isinstance(into[key], dict | list) or not into[key] or draw(st.booleans()):
            into[key] = draw(STRANGE)
            break
        into = into[key]
    arrays = dict(sound.arrays)
    if arrays and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(arrays)))
        arrays[name] = draw(
            st.sampled_from([np.zeros(3), np.zeros((2, 2), "<f4"), RawArray("nonsense", [2], b"ab"), RawArray("|O", [], b"")])
        )
    return Message(sound.kind, fields, arrays)


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_damaged_message_is_refused_or_harmless(message):
    """Never a traceback: the node is cut off, or the message has the form that readers expect."""
    received = travelled(message)
    if (wrong := wrong_with(1, received, NODE_OF)) is not None:
        assert message.kind in wrong
        wrong.encode()
        return
    schema = SOUND[message.kind]
    received = fields_of(received)
    assert received.keys() == schema.fields.keys()
    if message.kind != "evaluated":
        json.dumps(received, allow_nan=False)
    if "from" in schema.fields:
        assert received["from"] == "worker-1"


BROKEN = [
    Message("death", {**SOUND["death"].fields, "task": "worker-0"}),
    Message("error", {**SOUND["error"].fields, "from": "worker-0"}),
    Message("done", {**SOUND["done"].fields, "from": ["worker-1"]}),
    Message("log", {"task": "worker-1"}, {"text": RawArray("nonsense", [2], b"ab")}),
    Message("sample", {"record": {**SOUND["sample"]["record"], "more": 1}}),
    Message("sample", {"record": {**SOUND["sample"]["record"], "gpus": [{**GPU, "tasks": ["worker-0"]}]}}),
    Message("sample", {"record": {**SOUND["sample"]["record"], "gpus": [{**GPU, "utilization": "much"}]}}),
    Message("hello", {**SOUND["hello"].fields, "node": 0}),
    Message("stacks", {"number": 1, "stacks": {"worker-0": {"text": "File", "problem": None}}}),
    Message("stacks", {"number": 1, "stacks": {"worker-1": {"text": "x" * (MAX_STACK_CHARACTERS + 1), "problem": None}}}),
    Message("nobody sends this", {}),
    Message("leaving"),
    Message("hello", {**SOUND["hello"].fields, "\udc80": 0}),
    Message("hello", {**SOUND["hello"].fields, "scratch": "\udc80"}),
    Message("evaluated", {**SOUND["evaluated"].fields, "sums": {"loss_sum": float("nan")}}),
    Message("done", {**SOUND["done"].fields, "sequence": "1"}),
    Message("done", {**SOUND["done"].fields, "seconds": "0.1"}),
    Message("evaluated", {**SOUND["evaluated"].fields, "sums": {"loss_sum": "\udc80"}}),
    *(SOUND[kind] for kind in ("done", "steps", "evaluated", "predicted", "calibrated", "state_begin", "state_part", "state_end")),
    *(SOUND[kind] for kind in ("ports", "probe_port", "peers_probed", "states", "stacks", "sampled", "stopped")),  # not requested
]
RAW = [
    b"[" * 200_000 + b"\n",
    json.dumps({"kind": "log", "task": "worker-1", "arrays": [["text", "|u1", [10**15], 10**15]]}).encode() + b"\n",
    *(
        json.dumps({"kind": "log", "task": "worker-1", "arrays": arrays}).encode() + b"\n"
        for arrays in (7, [7], [["text"]], [["text", "|u1", [1], -1]], [[["text"], "|u1", [1], 1]], [["text", "|u1", None, 1]])
    ),
    b'{"kind": 7}\n',
    b"no message\n",
]


FORBIDDEN = [*BROKEN, *RAW]


def failure_after(sent):
    """Return the driver's failure after node 1 sends this."""
    with cluster() as (control, (_, node)):
        node.sendall(sent) if isinstance(sent, bytes) else send(node, sent)
        with pytest.raises(RunFailedError) as raised:
            control.receive(5.0)
        return raised.value


@pytest.fixture(scope="module")
def failures():
    """The failure after each violation, concurrently, as each driver waits a second."""
    with ThreadPoolExecutor(len(FORBIDDEN)) as pool:
        return [pool.submit(failure_after, sent) for sent in FORBIDDEN]


@pytest.mark.parametrize("number", range(len(FORBIDDEN)), ids=lambda number: getattr(FORBIDDEN[number], "kind", f"raw {number}"))
def test_node_that_violates_the_protocol_is_cut_off(failures, number):
    failure = failures[number].result()
    assert re.search(r"node 1.* sent .*: it is broken, or hostile, and has been cut off", str(failure)), failure
    assert failure.task == "agent-1"


TRAIN = Train.from_plan(Plan(0, 2, 0, 0, np.ones(2)))
EVALUATE = Evaluate("test")
STATE = SendState()
for number, command in enumerate((TRAIN, EVALUATE, STATE), 1):
    command.sequence = number


def done(command, **more):
    return Message("done", {**SOUND["done"].fields, "sequence": command.sequence, "command": command.kind, **more})


STATE_ANSWERS = [
    Message(f"state_{part}", {**SOUND[f"state_{part}"].fields, "sequence": 3}, SOUND[f"state_{part}"].arrays)
    for part in ("begin", "part", "end")
]
IN_ORDER = [SOUND["steps"], done(TRAIN), SOUND["steps"], SOUND["evaluated"], done(EVALUATE), done(STATE), *STATE_ANSWERS]


def test_answers_in_order_are_accepted():
    with cluster() as (control, (_, node)):
        for command in (TRAIN, EVALUATE, STATE):
            control.send(command)
        for message in IN_ORDER:
            send(node, message)
        assert [control.receive(5.0)[1].kind for _ in IN_ORDER] == [message.kind for message in IN_ORDER]


@given(st.permutations(range(len(IN_ORDER))))
@example([1, 0, *range(2, len(IN_ORDER))])
@example([*range(2, 5), 0, 1, *range(5, len(IN_ORDER))])
def test_answers_out_of_order_are_refused(order):
    """Steps may come during any command; everything else has its place."""
    places = [place for place in order if place not in (0, 2)]
    possible = places == sorted(places) and max(order.index(0), order.index(2)) < order.index(5)
    outstanding = OutstandingRequests([0, 1])
    outstanding.started(NODE_OF, ["worker-1", "worker-0"])
    for command in (TRAIN, EVALUATE, STATE):
        outstanding.add_command("worker-1", command)

    assert all(outstanding.violation_in(1, read(IN_ORDER[place])) is None for place in order) == possible


def test_violation_is_noticed_while_the_run_ends():
    with cluster() as (control, (first, node)):
        send(node, Message("nobody sends this"))
        answering = threading.Thread(target=lambda: (first.recv(2**16), send(first, Message("stopped"))))
        answering.start()
        control.end_tasks(0.0, graceful=True)
        answering.join()
        assert control.nodes.violation is not None
        assert control.nodes.violation.task == "agent-1"
        assert "node 1 (host 127.0.0.1) sent a message 'nobody sends this'" in str(control.nodes.violation)


def test_truncated_message_is_a_loss_and_no_violation():
    with cluster() as (control, (_, node)):
        node.sendall(json.dumps({"kind": "log", "task": "worker-1", "arrays": [["text", "|u1", [9], 9]]}).encode() + b"\nabc")
        node.shutdown(socket.SHUT_RDWR)
        with pytest.raises(RunFailedError, match="has gone: the connection to it has ended"):
            control.receive(5.0)
        assert control.nodes.violation is None


def test_arrays_of_a_message_are_bounded():
    reader, writer = socket.socketpair()
    header = {"kind": "x", "arrays": [["a", "|u1", [1], MAX_ARRAY_BYTES // 2 + 1]] * 2}
    with reader, writer, reader.makefile("rb") as file, writer.makefile("wb") as writing:
        writing.write(json.dumps(header).encode() + b"\n")
        writing.flush()
        with pytest.raises(ProtocolError, match="more bytes"):
            Stream(file, writing).receive()


def test_real_messages_of_tasks_and_agents_are_accepted():
    """Made by the functions that make them in a run."""
    state = State({"w": np.ones((2, 3), np.float32)}, {"momentum": {"w": np.zeros((2, 3), np.float32)}}, 4, {}, {"loss_scale": 8.0})
    sent = [
        Steps.from_result(StepResult(3, np.ones(2, np.float32), 8, 0.5, 0.1, None)),
        Steps.from_result(StepResult(3, np.ones(2, np.float32), 8, np.float64(0.5), 0.1, None, 1, np.zeros(2, np.int64))),
        Evaluated.from_result(EvalResult("test", {"loss_sum": float("inf"), "correct": 2.0, "examples": 5.0}, 0.1, 7), 2),
        Calibrated(CalibrationResult(1, 2, 0.3, {"busy": 0.5})),
        *brought(state),
    ]
    for message in sent:
        received = travelled(travelled(message).sent_by("worker-1"))
        assert wrong_with(1, received, NODE_OF) is None
    assert [message.kind for message in sent[4:]] == ["state_begin", "state_part", "state_part", "state_end"]
    death = Death("worker-1", 7, None, "SIGKILL", 1, 0.5, 4096, tail(Path("no such log")))
    assert wrong_with(1, travelled(death), NODE_OF) is None
    hello = Message("hello", {**SOUND["hello"].fields, "scratch": b64encode(b"/tmp/\xff").decode()})
    assert wrong_with(1, travelled(hello), NODE_OF) is None


def test_error_with_undecodable_file_name_is_accepted():
    sent = []

    class Channel:
        send = staticmethod(sent.append)

    _report_error(Channel, FileNotFoundError(2, "no such file", os.fsdecode(b"/data/\xff")))
    received = travelled(travelled(sent[0]).sent_by("worker-1"))
    assert wrong_with(1, received, NODE_OF) is None
    assert "no such file" in fields_of(received)["message"]


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(2, "no such file"), 2),
        (OSError("could not load", "/models/mine"), None),
        (OSError(2**40, "could not load"), None),
        (OSError(True, "could not load"), None),
        (OSError(np.int64(5), "could not load"), None),
        (OSError({"any": "thing"}, "could not load"), None),
        (type("Very" * 5000, (ValueError,), {})("could not load"), None),
        (type("É", (MemoryError,), {})("could not load\udcff" * 10_000), None),
    ],
)
def test_error_of_user_code_is_accepted(error, number):
    """The node is not blamed for it."""
    sent = []

    class Channel:
        send = staticmethod(sent.append)

    _report_error(Channel, error)
    received = travelled(travelled(sent[0]).sent_by("worker-1"))
    assert wrong_with(1, received, NODE_OF) is None
    assert fields_of(received)["errno"] == number
    assert any(text in fields_of(received)["message"] for text in ("could not load", "no such file"))


def test_agent_overrides_the_task_s_name():
    message = travelled(Message("phase", {"name": "importing", "from": "worker-0"}))
    assert read(travelled(message.sent_by("worker-1"))).task == "worker-1"
    assert fields_of(message.sent_by("worker-1"))["from"] == "worker-1"


def brought(state):
    """Return the messages of a task that sends a state to a driver that cannot read its memory."""
    sent = queue.SimpleQueue()

    class Channel:
        send = staticmethod(sent.put)

    sender = StateSender(Channel)
    sender.answer("send")
    sender.send(state, 3)
    sender.wait()
    return [sent.get() for _ in range(sent.qsize())]
