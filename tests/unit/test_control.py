"""The driver's view of the cluster, over a real socket whose other end speaks as an agent does."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from crosstrain.core.errors import InterruptedRunError
from crosstrain.engine.messages import Message, Stream
from crosstrain.launch.control import Control
from crosstrain.launch.local import NodeChannel


@pytest.fixture
def control_and_agent() -> Iterator[tuple[Control, Stream]]:
    driver, agent = socket.socketpair()
    with driver, agent, ExitStack() as files:
        ours, theirs = (Stream(*(files.enter_context(end.makefile(mode)) for mode in ("rb", "wb"))) for end in (driver, agent))
        channel = NodeChannel(0, ours, "127.0.0.1", None, None, shares_files=False)
        yield Control([channel], on_sample=lambda record: None, on_log=lambda *part: None), theirs
        agent.shutdown(socket.SHUT_RDWR)  # the thread that reads for the driver ends


def test_an_interrupt_ends_what_is_awaited(control_and_agent):
    control, agent = control_and_agent
    control.interrupt()
    agent.send(Message("sampled"))
    with pytest.raises(InterruptedRunError):
        control.sample_now()


def test_a_deferred_interrupt_ends_what_is_awaited_next(control_and_agent):
    control, agent = control_and_agent
    with control.interrupts_deferred():
        control.interrupt()
        agent.send(Message("sampled"))
        control.sample_now()
    with pytest.raises(InterruptedRunError):
        control.receive(0.01)
