"""The probe: a process that describes its host, opens ports, and tries those of others.

Started as ``python -m crosstrain.launch.preflight.probe``, with the control protocol on its standard input and output; ends with its input.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...core.errors import TrainerError, UsageError
from ...core.process import ignore_interrupts, wake_when_parent_ends
from ...engine.protocol import probe_messages as messages
from ...engine.protocol.messages import MAX_ERROR_CHARACTERS, PROTOCOL, Message, Stream, WireMessage
from ...engine.protocol.transport import take_stdio
from ..node.scratch import PortBlock, address_for_others, node_identity

CONNECT_SECONDS = 3.0  # time limit for a peer's port to answer
MAX_CONNECTIONS = 16  # concurrent tries
_ports: list[socket.socket] = []
_blocks: list[PortBlock] = []  # listening sockets and reserved ports, which this process keeps until it ends


def main() -> None:
    """Answer the queries on standard input; end with it, also while answering."""
    ignore_interrupts()
    wake_when_parent_ends()
    stream = take_stdio(announce=True)
    received: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(stream, received), name="questions", daemon=True).start()
    while True:
        stream.send(answer(messages.QUESTIONS.parse(received.get())))


def _listen(stream: Stream, received: queue.SimpleQueue[Message]) -> None:
    try:
        while (message := stream.receive()) is not None:
            received.put(message)
    finally:
        os._exit(0)  # nobody waits for an answer


def answer(question: messages.Question) -> WireMessage:
    """Return the result of a question, or a problem in a sentence."""
    try:
        return _ANSWERS[type(question)](question)
    except (TrainerError, OSError) as error:
        return messages.Problem(str(error).encode(errors="backslashreplace").decode()[:MAX_ERROR_CHARACTERS])


def _describe(question: messages.Describe) -> messages.Description:
    from ...backends.loading import recorded_packages
    from ...monitor.host import describe_host

    identity: Any = node_identity()
    host: Any = describe_host(recorded_packages(question.backend))
    return messages.Description(PROTOCOL, identity, host, address_for_others(os.environ))


def _open_data(question: messages.Data) -> messages.DataDigest:
    from ...data.store.stored_dataset import open_dataset

    data_dir = None if question.data_dir is None else Path(question.data_dir)
    return messages.DataDigest(open_dataset(question.data, data_dir).digest)


def _import_model(question: messages.Model) -> messages.ModelDigest:
    from .model_source import import_problem, model_source

    source = model_source(question.model)
    if (problem := import_problem(question.model, question.backend)) is not None:
        raise UsageError(problem)
    return messages.ModelDigest(None, None) if source is None else messages.ModelDigest(source.digest, source.package)


def _open_ports(question: messages.Listen) -> messages.OpenPorts:
    """Listen on a task's port and on a free one, as gloo does. Raises RunFailedError."""
    block = PortBlock()
    _blocks.append(block)
    ports = []
    for wanted in (*block.take(1), 0):
        server = socket.create_server(("", wanted), backlog=128)
        _ports.append(server)
        threading.Thread(target=_greet_all, args=(server,), name="port", daemon=True).start()
        ports.append(server.getsockname()[1])
    return messages.OpenPorts(ports)


def _greet_all(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        connection.close()


def _connect(question: messages.Connect) -> messages.PeerProblems:
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        return messages.PeerProblems(list(pool.map(_problem_with, question.peers)))


def _problem_with(peer: tuple[str, int]) -> str | None:
    try:
        socket.create_connection((peer[0], peer[1]), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


_ANSWERS: Mapping[type[messages.Question], Callable[[Any], WireMessage]] = {
    messages.Describe: _describe,
    messages.Time: lambda question: messages.HostTime(time.time()),
    messages.Data: _open_data,
    messages.Model: _import_model,
    messages.Listen: _open_ports,
    messages.Connect: _connect,
}


if __name__ == "__main__":
    main()
