"""Mesh of the direct exchange: each rank connects to every earlier one.

There is a connection for vectors and one for heartbeats; all are ready before any is used.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import MAX_RANKS, Task
from ..core.errors import RunFailedError
from ..core.listener import AuthenticatingListener, Exchange
from .all_reduce import AllReduce, BucketSums
from .authentication import accept, admit_client, connect, refuse_too_many, tune
from .peer_links import Heartbeat, Links, PeerLostError, rank_names

log = logging.getLogger(__name__)
PROTOCOL = 1
_LAYOUT = struct.Struct("<4sHBxII")
_MAGIC = b"ctmx"
_CONFIRMATION = b"w"


class Channel(IntEnum):
    """The purpose of a connection."""

    VECTORS = 0
    HEARTBEAT = 1


class _Hello(NamedTuple):
    channel: Channel
    rank: int
    ranks: int

    def packed(self) -> bytes:
        return _LAYOUT.pack(_MAGIC, PROTOCOL, *self)

    @classmethod
    def read(cls, data: bytes) -> _Hello:
        magic, protocol, channel, rank, ranks = _LAYOUT.unpack(data)
        if magic != _MAGIC or protocol != PROTOCOL or channel not in iter(Channel):
            raise ConnectionError(f"it does not speak protocol {PROTOCOL} of the direct exchange")
        return cls(Channel(channel), rank, ranks)


Place = tuple[int, Channel]
Arrivals = queue.Queue[tuple[Place, socket.socket]]


def join(task: Task, seconds: float, listening: socket.socket | None = None) -> Mapping[Channel, Mapping[int, socket.socket]]:
    """Return the connections to all other ranks, by purpose and rank; the caller closes them.

    `listening`, if given, already listens on our port; it is closed. Raises RunFailedError for a rank that does not join within
    `seconds`, PeerLostError for one that is lost, OSError with errno EADDRINUSE if our port was taken.
    """
    deadline = time.monotonic() + seconds
    ranks = range(task.cluster.workers)
    connected: dict[Place, socket.socket] = {}
    arrivals: Arrivals = queue.Queue()
    listening = listening or socket.create_server((task.address, task.port), backlog=2 * MAX_RANKS)
    try:
        with AuthenticatingListener(listening, partial(_prove, task), partial(_arrive, arrivals), log.warning):
            for place in ((peer, channel) for peer in range(task.rank) for channel in Channel):
                connected[place] = _connect(task, place, deadline)
            _await(task, {(peer, channel) for peer in ranks[task.rank + 1 :] for channel in Channel}, arrivals, connected, deadline)
        _confirm_all(task, connected, deadline)
    except BaseException:
        for connection in connected.values():
            connection.close()
        raise
    finally:
        while not arrivals.empty():
            arrivals.get()[1].close()
    for connection in connected.values():
        tune(connection)
    return {channel: {peer: connected[peer, channel] for peer in ranks if peer != task.rank} for channel in Channel}


def _prove(task: Task, exchange: Exchange) -> tuple[Place, socket.socket]:
    ranks = task.cluster.workers

    def check(hello: _Hello) -> None:
        if hello.ranks != ranks or not task.rank < hello.rank < ranks:
            raise ConnectionError(f"it is rank {hello.rank} of {hello.ranks}, and here are the ranks from {task.rank} on of {ranks}")

    hello = admit_client(exchange, task.cluster.secret, _LAYOUT.size, _Hello.read, check)
    return (hello.rank, hello.channel), exchange.connection


def _arrive(arrivals: Arrivals, arrival: tuple[Place, socket.socket], _host: str) -> None:
    if accept(arrival[1]):
        arrivals.put(arrival)


def _await(task: Task, awaited: set[Place], arrivals: Arrivals, connected: dict[Place, socket.socket], deadline: float) -> None:
    """Wait for both connections of every later rank; a newer connection replaces an older one."""
    while missing := awaited - connected.keys():
        try:
            place, connection = arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            names = ", ".join(f"worker-{rank}" for rank in sorted({rank for rank, _ in missing}))
            raise RunFailedError(f"start_timeout: {task.name} still waits for {names} to join the direct exchange.") from None
        if place in connected:
            connected[place].close()
        connected[place] = connection


def _connect(task: Task, place: Place, deadline: float) -> socket.socket:
    peer, channel = place
    placed = task.cluster.tasks_with_role("worker")[peer]
    hello = _Hello(channel, task.rank, task.cluster.workers)
    return connect(task.cluster.endpoint(placed), task.cluster.secret, hello.packed(), deadline, placed.name)


def _confirm_all(task: Task, connected: Mapping[Place, socket.socket], deadline: float) -> None:
    names = rank_names(task)
    for step in (lambda exchange: exchange.send(_CONFIRMATION), lambda exchange: _receive_confirmation(exchange)):
        for (peer, _channel), connection in connected.items():
            try:
                step(Exchange(connection, deadline))
            except TimeoutError as error:
                waits = f"start_timeout: {task.name} still waits for {names[peer]}, or for one that it waits for."
                raise (RunFailedError(waits) if time.monotonic() >= deadline else PeerLostError(names[peer], error)) from error
            except OSError as error:
                raise PeerLostError(names[peer], error) from error


def _receive_confirmation(exchange: Exchange) -> None:
    if exchange.receive(1) != _CONFIRMATION:
        raise ConnectionError("it sent what was not agreed")


MAX_SUMS = 64  # more lengths than a step's buckets, while plans have losses of any number
BROADCAST_ELEMENTS = 1 << 18  # broadcasts need no memory of a model's size


class Mesh:
    """Connections of a rank to all others.

    All ranks call the same methods in order, from one thread. Raises PeerLostError for a lost rank.
    """

    def __init__(self, task: Task, start_seconds: float, silence_seconds: float, listening: socket.socket | None = None) -> None:
        self.rank, self.ranks = task.rank, task.cluster.workers
        refuse_too_many(self.ranks)
        connections = join(task, start_seconds, listening)
        self._sum_for = lru_cache(MAX_SUMS)(lambda elements, kind: AllReduce(self._links, elements, kind))
        self._background: BucketSums | None = None
        try:
            self._heartbeat = Heartbeat(connections[Channel.HEARTBEAT], silence_seconds)
            self._links = Links(task, connections[Channel.VECTORS], self._heartbeat)
        except BaseException:
            for connection in (connection for peers in connections.values() for connection in peers.values()):
                connection.close()
            raise

    def all_reduce(self, vector: NDArray[Any]) -> None:
        """Replace a contiguous vector by its sum over all ranks, bit-identical on each."""
        if vector.size:
            self._sum_for(vector.size, vector.dtype).all_reduce(vector)

    def submit(self, vector: NDArray[Any]) -> None:
        """Sum a vector in the background.

        Neither it nor the mesh may be used before `wait` has returned.
        """
        if self._background is None:
            self._background = BucketSums(self.all_reduce)
        self._background.submit(vector)

    def wait(self) -> None:
        """Wait for all submitted vectors."""
        if self._background is not None:
            self._background.wait()

    def broadcast(self, array: NDArray[Any] | None, shape: tuple[int, ...], kind: Any = np.float32) -> NDArray[Any]:
        """Broadcast the first rank's array; others give None.

        Adding −0 changes no number, not even a −0.
        """
        vector = np.full(shape, -0.0, kind) if array is None else np.array(array, kind).reshape(shape)
        flat = vector.reshape(-1)
        for first in range(0, flat.size, BROADCAST_ELEMENTS):
            self.all_reduce(flat[first : first + BROADCAST_ELEMENTS])
        return vector

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce(np.zeros(1))

    def leave(self, *, healthy: bool = True) -> None:
        """Close the connections, after a barrier unless this rank has failed."""
        try:
            if healthy:
                self.barrier()
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections, which other ranks notice; a second call does nothing."""
        for connection in self._links.sockets.values():
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RDWR)
        if self._background is not None:
            self._background.close()
            self._background = None
        self._heartbeat.close()
        for connection in self._links.sockets.values():
            connection.close()


OPEN_SECONDS = 5.0  # a blocked port is not worth a longer wait after a run
Vector = NDArray[np.float32]


def open_trial_mesh(
    task: Task, all_reduce: Callable[[Vector], Vector], silence_seconds: float, open_seconds: float = OPEN_SECONDS
) -> tuple[Mesh | None, str | None]:
    """Open a second mesh on all ranks or none.

    Return it, or the reason, empty if another rank has it. Raises `all_reduce`'s errors.
    """
    listening, problem = _listen(task)
    ports = np.zeros(task.cluster.workers, np.float32)  # a port is below 2¹⁶, and such a number is exact in a float32
    ports[task.rank] = 0 if listening is None else listening.getsockname()[1]
    ports = all_reduce(ports)
    mesh = None
    if listening is not None and ports.all():
        named = {placed.name: int(ports[placed.index]) for placed in task.cluster.tasks_with_role("worker")}
        trial = replace(task, cluster=replace(task.cluster, ports={**task.cluster.ports, **named}))
        try:
            mesh = Mesh(trial, open_seconds, silence_seconds, listening)
        except (OSError, RunFailedError) as error:
            problem = f"{task.name} could not join it: {error}"
    elif listening is not None:
        listening.close()
    joined = all_reduce(np.array([mesh is not None], np.float32))
    if mesh is not None and joined[0] < task.cluster.workers:
        mesh.close()
        mesh = None
    return mesh, None if mesh is not None else problem or ""


def _listen(task: Task) -> tuple[socket.socket | None, str | None]:
    try:
        return socket.create_server((task.address, 0), backlog=2 * task.cluster.workers), None
    except OSError as error:
        return None, f"{task.name} could not listen on {task.address}: {error}"
