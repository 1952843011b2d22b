"""The control protocol: messages round-trip, and invalid ones are refused."""

import os
import socket
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from untyped import Message, array_of, fields_of

from crosstrain.backends.base import EvalResult, Plan, State, StepResult
from crosstrain.core.listener import Exchange
from crosstrain.engine.protocol.messages import Message as RawMessage
from crosstrain.engine.protocol.messages import MessageParser, ProtocolError, RawArray, ReusableBuffer, Stream
from crosstrain.engine.protocol.state_transfer import StateReceiver, load_messages
from crosstrain.engine.protocol.task_messages import Evaluated, Predicted, Steps, TaskReport, ToTask, Train
from crosstrain.engine.protocol.transport import HandshakeError, accept, connect

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3)
)
ARRAYS = hnp.arrays(st.sampled_from(["<f4", "<f8", "<i8", "<i4", "|u1"]), hnp.array_shapes(min_dims=0, min_side=0, max_side=5))


def typed(message):
    """Encode and decode a typed message."""
    return MessageParser(ToTask, TaskReport).parse(through_pipe(message))


def through_pipe(message):
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
        sender = threading.Thread(target=Stream(reader, writer).send, args=(message,))
        sender.start()
        received = Stream(reader, writer).receive()
        sender.join()
    return received


@given(
    st.dictionaries(st.text(max_size=8).filter(lambda key: key not in ("kind", "arrays")), JSON, max_size=4), st.lists(ARRAYS, max_size=3)
)
def test_message_round_trips(fields, arrays):
    named = {f"array {number}": array for number, array in enumerate(arrays)}
    received = through_pipe(Message("anything", fields, named))
    assert received.kind == "anything"
    assert fields_of(received) == fields
    assert list(received.arrays) == list(named)
    for name, array in named.items():
        assert array_of(received, name).dtype == array.dtype
        assert array_of(received, name).tobytes() == array.tobytes()
        assert array_of(received, name).shape == array.shape


def test_forwarded_message_is_unchanged():
    first = through_pipe(Message("steps", {"from": "worker-1"}, {"losses": np.arange(7, dtype=np.float32)}))
    second = through_pipe(first)
    np.testing.assert_array_equal(array_of(second, "losses"), np.arange(7, dtype=np.float32))


def test_forwarding_through_one_buffer_changes_nothing():
    """Each message overwrites the previous one, whatever their sizes."""
    generator = np.random.default_rng(5)
    sent = [[generator.integers(0, 255, size, np.uint8) for size in sizes] for sizes in ([5], [], [0, 300_000], [7, 9, 11], [300_001])]
    ends = socket.socketpair(), socket.socketpair()
    streams = [Stream(end.makefile("rb"), end.makefile("wb")) for pair in ends for end in pair]

    def send():
        for arrays in sent:
            streams[0].send(Message("part", {}, {str(number): array for number, array in enumerate(arrays)}))

    def pass_on():
        room = ReusableBuffer()
        for _ in sent:
            message = streams[1].receive(room)
            streams[2].send(message.sent_by("worker-0"))

    threads = [threading.Thread(target=work) for work in (send, pass_on)]
    for thread in threads:
        thread.start()
    for arrays in sent:
        received = streams[3].receive()
        assert fields_of(received) == {"from": "worker-0"}
        assert [array_of(received, name).tolist() for name in received.arrays] == [array.tolist() for array in arrays]
    for thread in threads:
        thread.join()
    for stream in streams:
        stream.close()
    for end in (end for pair in ends for end in pair):
        end.close()


@pytest.mark.parametrize("line", [b"hello\n", b"[]\n", b'{"no":"kind"}\n', b'{"kind":"x","arrays":[["a"]]}\n'])
def test_invalid_message_is_refused(line):
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
        writer.write(line)
        writer.flush()
        with pytest.raises(ProtocolError):
            Stream(reader, writer).receive()


@pytest.mark.parametrize("cut", [1, 30, -1])
def test_truncated_message_is_never_delivered(cut):
    """Truncated in its header it is the end of the stream, in an array an error."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader:
        data = b'{"kind":"x","arrays":[["a","<f4",[2],8]]}\n' + bytes(8)
        os.write(write, data[:cut])
        os.close(write)
        if data[:cut].count(b"\n"):
            with pytest.raises(ConnectionError) as raised:  # not a protocol error: the sender was ended in the middle
                Stream(reader, reader).receive()
            assert not isinstance(raised.value, ProtocolError)
        else:
            assert Stream(reader, reader).receive() is None


def test_objects_are_refused():
    with pytest.raises(ProtocolError):
        Predicted(1, arrays={"logits": RawArray("|O", [1], bytes(8))}).array("logits")


def test_plans_results_and_states_round_trip():
    plan = Plan(10, 3, 2, 4, np.array([0.1, 0.1, 0.1]))
    again = typed(Train.from_plan(plan)).plan()
    assert (again.first_step, again.count, again.epoch, again.first_in_epoch) == (10, 3, 2, 4)
    np.testing.assert_array_equal(again.learning_rates, plan.learning_rates)
    result = StepResult(4, np.array([0.5, 0.25], np.float32), 20, 0.125, None, 0.5, 2, np.array([0, 3]))
    back = typed(Steps.from_result(result)).result()
    assert (back.first_step, back.examples, back.seconds, back.data_wait_seconds, back.network_wait_seconds, back.worker) == (
        4,
        20,
        0.125,
        None,
        0.5,
        2,
    )
    np.testing.assert_array_equal(back.staleness, [0, 3])
    evaluation = EvalResult("test", {"loss_sum": 12.5, "correct": 300.0, "examples": 360.0}, 0.5, 99)
    assert typed(Evaluated.from_result(evaluation, 3)).result() == evaluation
    state = State({"a/b": np.ones((2, 3), np.float32)}, {"momentum": {"a/b": np.zeros((2, 3), np.float32)}}, 7)
    begin, *chunks = map(typed, load_messages(state))
    receiver = StateReceiver(begin)
    for chunk in chunks:
        receiver.add(chunk)
    restored = receiver.state()
    assert restored.updates == 7
    np.testing.assert_array_equal(restored.parameters["a/b"], state.parameters["a/b"])
    np.testing.assert_array_equal(restored.slots["momentum"]["a/b"], state.slots["momentum"]["a/b"])


def shake_hands(driver_secret, agent_secret):
    """Run both ends of the handshake over a real connection; return both results."""
    results = {}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def agent():
            try:
                results["agent"] = connect(server.getsockname(), agent_secret, 5.0)
            except OSError as error:
                results["agent"] = error

        thread = threading.Thread(target=agent)
        thread.start()
        connection, _ = server.accept()
        try:
            results["driver"] = accept(Exchange(connection, time.monotonic() + 5.0), driver_secret)
        except OSError as error:
            results["driver"] = error
        thread.join()
    return results["driver"], results["agent"]


def test_handshake_accepts_equal_secrets():
    driver, agent = shake_hands(b"the same secret for both", b"the same secret for both")
    driver.send(Message("welcome", {"n": 1}))
    assert agent.receive() == Message("welcome", {"n": 1})
    driver.close()
    agent.close()


def test_handshake_refuses_another_secret():
    driver, agent = shake_hands(b"the secret of the driver", b"the secret of a stranger")
    assert isinstance(driver, HandshakeError)
    assert isinstance(agent, OSError)


def test_reflected_proof_is_refused():
    """A client cannot reuse our challenge and proof, as the roles are part of the proof."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ours, _ = server.accept()

        def reflect():
            client.sendall(_read(client, 32))
            client.sendall(_read(client, 32))

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(HandshakeError):
            accept(Exchange(ours, time.monotonic() + 5.0), b"the secret of the driver")
        thread.join()


def _read(connection, count):
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        assert piece
        data += piece
    return data


class SlowFile:
    """A socket's file that delays the first caller of `fileno` before its next step."""

    def __init__(self, file):
        self.file, self.numbered = file, threading.Event()

    def fileno(self):
        number, first = self.file.fileno(), not self.numbered.is_set()
        self.numbered.set()
        if first:
            time.sleep(0.3)
        return number

    def close(self):
        self.file.close()


def test_concurrent_cut_spares_a_new_connection():
    """The next opened connection gets the number of the closed descriptor."""
    with ExitStack() as files:
        ours, _ = map(files.enter_context, socket.socketpair())
        reader = SlowFile(ours.makefile("rb"))
        stream = Stream(reader, ours.makefile("wb"))
        number = ours.fileno()
        ours.close()  # the stream's files keep the descriptor
        cutting = threading.Thread(target=stream.cut)
        cutting.start()
        assert reader.numbered.wait(10.0)
        stream.close()
        opened = [*map(files.enter_context, socket.socketpair())]
        cutting.join()
        opened[0].sendall(b"!")
        assert opened[1].recv(1) == b"!"
        assert number in {end.fileno() for end in opened}


def test_nested_greeting_names_no_protocol():
    """The thread that reads the header may have more room on its stack."""
    line = b'{"kind":"hello","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert RawMessage("hello", line).protocol is None
    assert RawMessage("hello", b'{"kind":"hello","protocol":' + b"9" * 4000 + b"}").protocol is None
