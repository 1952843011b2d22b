"""Meeting of the ranks before TensorFlow's server starts.

The server would wait an hour for a missing rank, with Python's lock held.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import time
from contextlib import suppress

from ....core.cluster import Task
from ....core.errors import RunFailedError
from ....core.listener import AuthenticatingListener, Exchange

log = logging.getLogger(__name__)
_CODE_BYTES = 32
_GO = b"g"
_RETRY_SECONDS = 0.05


def meet(task: Task, seconds: float) -> None:
    """Return when every rank has called this.

    Raises RunFailedError after `seconds`, OSError(EADDRINUSE) if the port was taken.
    """
    deadline = time.monotonic() + seconds
    try:
        if task.rank == 0:
            _gather(task, deadline)
        else:
            _report(task, deadline)
    except TimeoutError as error:
        raise RunFailedError(f"start_timeout: after {seconds:g} s {task.name} still waits for {error}.") from error


def _gather(task: Task, deadline: float) -> None:
    missing = {_code(task, placed.index): placed.name for placed in task.cluster.tasks_with_role("worker") if placed.index != 0}
    arrivals: queue.Queue[tuple[bytes, socket.socket]] = queue.Queue()

    def prove(exchange: Exchange) -> tuple[bytes, socket.socket]:
        code = exchange.receive(_CODE_BYTES)
        if code not in missing:
            raise ConnectionError("it is no task of this run")
        return code, exchange.connection

    arrived: dict[bytes, socket.socket] = {}
    listener = socket.create_server((task.address, task.port), backlog=128)
    try:
        with AuthenticatingListener(listener, prove, lambda arrival, _host: arrivals.put(arrival), log.warning):
            while len(arrived) < len(missing):
                try:
                    code, connection = arrivals.get(timeout=_left(deadline))
                except (TimeoutError, queue.Empty):
                    raise TimeoutError(", ".join(sorted(name for code, name in missing.items() if code not in arrived))) from None
                if code in arrived:
                    arrived[code].close()  # it tries again, so its first connection leads nowhere
                arrived[code] = connection
        for connection in arrived.values():
            connection.sendall(_GO)
            with suppress(TimeoutError, ConnectionError):  # the other side closes first, so that the port is free immediately
                Exchange(connection, deadline).receive(1)
    finally:
        while not arrivals.empty():
            arrivals.get()[1].close()
        for connection in arrived.values():
            connection.close()


def _report(task: Task, deadline: float) -> None:
    first = task.cluster.tasks_with_role("worker")[0]
    while True:
        try:
            with socket.create_connection(task.cluster.endpoint(first), timeout=_left(deadline, first.name)) as connection:
                connection.sendall(_code(task, task.rank))
                with suppress(TimeoutError):
                    if Exchange(connection, deadline).receive(1) == _GO:
                        return
        except ConnectionError:
            pass  # not there yet, or what listened was not rank 0: the deadline decides
        _left(deadline, f"{first.name} or one that it waits for")
        time.sleep(_RETRY_SECONDS)


def _left(deadline: float, waiting_for: str = "another rank") -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(waiting_for)
    return left


def _code(task: Task, rank: int) -> bytes:
    return hmac.digest(bytes.fromhex(task.cluster.secret), f"rank {rank} starts TensorFlow".encode(), "sha256")
