"""Agents that dial back: a command with a connection to the driver as its standard streams."""

import socket
import subprocess
import threading
import time
from contextlib import closing
from functools import partial

import pytest
from untyped import Message, fields_of

from crosstrain.core.listener import AuthenticatingListener
from crosstrain.core.process import python
from crosstrain.engine.protocol.join_messages import CommandJoin
from crosstrain.engine.protocol.messages import MessageParser
from crosstrain.engine.protocol.transport import AGENT_BEGINS, over_socket
from crosstrain.launch.launchers.dial_back import LateStream, prove
from crosstrain.launch.node.dialled import Summons

SECRET = "a secret of a test, long enough"
PROBE = python("crosstrain.launch.preflight.probe")


@pytest.fixture
def door():
    """Accept agents; yield the address and the awaited channels by number."""
    waiting = {}

    def arrive(joiner, host):
        late = waiting.get(joiner.message.number)
        if late is None or not late.connect(joiner.stream):
            joiner.stream.close()

    proof = partial(prove, secret=SECRET.encode(), joins=MessageParser(CommandJoin))
    with socket.create_server(("127.0.0.1", 0)) as listening, AuthenticatingListener(listening, proof, arrive, print):
        yield listening.getsockname(), waiting


def dial(address, number, secret=SECRET, command=PROBE):
    process = subprocess.Popen(
        python("crosstrain.launch.node.dialled", *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdin.write(Summons(*address, secret, number, 20.0).line())
    process.stdin.close()
    return process


def test_dialled_command_behaves_like_any_other(door):
    """Earlier messages are queued; it ends with the connection and shows no secret."""
    address, waiting = door
    waiting[7] = late = LateStream(AGENT_BEGINS)
    late.send(Message("time"))
    heard = []
    listener = threading.Thread(target=lambda: heard.append(late.receive()))
    listener.start()
    with dial(address, 7) as probe, closing(late):
        listener.join(20)
        assert abs(fields_of(heard[0])["seconds"] - time.time()) < 20
        late.send(Message("time"))
        assert late.receive().kind == "found"
        for file in ("cmdline", "environ"):
            with open(f"/proc/{probe.pid}/{file}", "rb") as seen:
                assert SECRET.encode() not in seen.read()
        late.close()
        assert probe.wait(10) == 0
        assert probe.stdout.read() == ""


def test_driver_without_secret_is_refused(door, tmp_path):
    address, waiting = door
    waiting[1] = LateStream()
    with dial(address, 1, "the secret of another run, long enough", ["touch", str(tmp_path / "obeyed")]) as command:
        assert command.wait(20) == 1
        assert f"cannot be reached at 127.0.0.1, port {address[1]}" in command.stderr.read()
    assert not list(tmp_path.iterdir())


def test_number_is_assigned_once(door):
    address, waiting = door
    waiting[1] = late = LateStream(AGENT_BEGINS)
    late.send(Message("time"))
    with dial(address, 1), closing(late):
        assert late.receive().kind == "found"
        with dial(address, 1) as second, dial(address, 2) as unknown:
            assert second.wait(20) == unknown.wait(20) == 0  # their input has ended
        late.send(Message("time"))
        assert late.receive().kind == "found"


@pytest.mark.parametrize("end", [LateStream.cut, LateStream.close, LateStream.give_up_waiting])
def test_wait_for_agent_can_be_ended(end):
    late = LateStream()
    raised = threading.Event()

    def listen():
        with pytest.raises(ConnectionError, match="before the agent had dialled"):
            late.receive()
        raised.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert late.arrivals == (0, 0)
    end(late)
    listener.join(5)
    assert raised.is_set()
    with pytest.raises(BrokenPipeError):
        late.send(Message("time"))
    ours, theirs = socket.socketpair()
    with theirs:
        assert not late.connect(over_socket(ours))
