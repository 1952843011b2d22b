"""The probe: a process that describes its host, opens ports, and tries those of others.

Started as ``python -m crosstrain.launch.preflight.probe``, with the control protocol on its standard input and output; ends with its input.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...core.errors import TrainerError, UsageError
from ...core.process import ignore_interrupts, wake_when_parent_ends
from ...engine.protocol.messages import MAX_ERROR_CHARACTERS, PROTOCOL, Message, Stream
from ...engine.protocol.transport import AGENT_BEGINS
from ..node.scratch import PortBlock, address_for_others, node_identity

CONNECT_SECONDS = 3.0  # time limit for a peer's port to answer
MAX_CONNECTIONS = 16  # concurrent tries
_ports: list[socket.socket] = []
_blocks: list[PortBlock] = []  # listening sockets and reserved ports, which this process keeps until it ends


def main() -> None:
    """Answer the queries on standard input; end with it, also while answering."""
    ignore_interrupts()
    wake_when_parent_ends()
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    writer.write(b"\n" + AGENT_BEGINS + b"\n")
    writer.flush()
    stream = Stream(sys.stdin.buffer, writer)
    asked: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(stream, asked), name="questions", daemon=True).start()
    while True:
        stream.send(answer(asked.get()))


def _listen(stream: Stream, asked: queue.SimpleQueue[Message]) -> None:
    try:
        while (message := stream.receive()) is not None:
            asked.put(message)
    finally:
        os._exit(0)  # nobody waits for an answer


def answer(question: Message) -> Message:
    """Answer a query: ``found`` with its result, or ``problem`` with a sentence."""
    try:
        return Message("found", _ANSWERS[question.kind](question.fields))
    except (TrainerError, OSError) as error:
        return Message("problem", {"text": str(error).encode(errors="backslashreplace").decode()[:MAX_ERROR_CHARACTERS]})


def _describe(asked: Mapping[str, Any]) -> dict[str, Any]:
    from ...backends.loading import recorded_packages
    from ...monitor.host import describe_host

    host = describe_host(recorded_packages(asked["backend"]))
    return {"protocol": PROTOCOL, "identity": node_identity(), "host": host, "address": address_for_others(os.environ)}


def _open_data(asked: Mapping[str, Any]) -> dict[str, Any]:
    from ...data.store.stored_dataset import open_dataset

    data_dir = None if asked["data_dir"] is None else Path(asked["data_dir"])
    return {"digest": open_dataset(asked["data"], data_dir).digest}


def _import_model(asked: Mapping[str, Any]) -> dict[str, Any]:
    from .model_source import import_problem, model_source

    source = model_source(asked["model"])
    if (problem := import_problem(asked["model"], asked["backend"])) is not None:
        raise UsageError(problem)
    return {"digest": None, "package": None} if source is None else asdict(source)


def _open_ports(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Listen on a task's port and on a free one, as gloo does. Raises RunFailedError."""
    block = PortBlock()
    _blocks.append(block)
    ports = []
    for wanted in (*block.take(1), 0):
        server = socket.create_server(("", wanted), backlog=128)
        _ports.append(server)
        threading.Thread(target=_greet_all, args=(server,), name="port", daemon=True).start()
        ports.append(server.getsockname()[1])
    return {"ports": ports}


def _greet_all(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        connection.close()


def _connect(asked: Mapping[str, Any]) -> dict[str, Any]:
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        return {"problems": list(pool.map(_problem_with, asked["peers"]))}


def _problem_with(peer: tuple[str, int]) -> str | None:
    try:
        socket.create_connection((peer[0], peer[1]), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


_ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "describe": _describe,
    "time": lambda asked: {"seconds": time.time()},
    "data": _open_data,
    "model": _import_model,
    "listen": _open_ports,
    "connect": _connect,
}


if __name__ == "__main__":
    main()
