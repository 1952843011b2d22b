"""How the mesh comes about: each rank listens on its own port, and connects to every rank before it, by two connections.

One carries vectors, the other signs of life. Whoever has all of its connections gives each other rank the word, and goes on when it has
the word of all: so nobody is taken for silent that is still being joined by others.
"""

from __future__ import annotations

import logging
import queue
import socket
import struct
import time
from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from ...core.cluster import Task
from ...core.direct_exchange import MOST_RANKS
from ...core.errors import RunFailedError
from ...core.untrusted.listener import AuthenticatingListener, Exchange
from ..authentication import accept, admit_client, connect, tune
from .peers import PeerLostError, names_of

__all__ = ["Channel", "Connections", "join"]

log = logging.getLogger(__name__)

PROTOCOL = 1

_LAYOUT = struct.Struct("<4sHBxII")
_MAGIC = b"ctmx"
_WORD = b"w"


class Channel(IntEnum):
    """What a connection is for."""

    VECTORS = 0
    LIFE = 1


class _Hello(NamedTuple):
    """Who connects: a rank of how many, and for what."""

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


Connections = Mapping[Channel, Mapping[int, socket.socket]]
"""The connections by purpose and by the other side's rank."""

Place = tuple[int, Channel]
Arrivals = queue.Queue[tuple[Place, socket.socket]]


def join(task: Task, seconds: float, listening: socket.socket | None = None) -> Connections:
    """Return the connections to all other ranks, when all ranks have theirs. The caller closes them.

    `listening` is a socket that listens on our port, where there is one already; it is closed.

    Raises RunFailedError where a rank does not come within `seconds`, PeerLostError where one goes meanwhile, OSError with errno EADDRINUSE
    where our port was taken.
    """
    deadline = time.monotonic() + seconds
    ranks = range(task.cluster.workers)
    connected: dict[Place, socket.socket] = {}
    arrivals: Arrivals = queue.Queue()
    listening = listening or socket.create_server((task.address, task.port), backlog=2 * MOST_RANKS)
    try:
        with AuthenticatingListener(listening, partial(_prove, task), partial(_arrive, arrivals), log.warning):
            for place in ((peer, channel) for peer in range(task.rank) for channel in Channel):
                connected[place] = _connect(task, place, deadline)
            _await(task, {(peer, channel) for peer in ranks[task.rank + 1 :] for channel in Channel}, arrivals, connected, deadline)
        _exchange_words(task, connected, deadline)
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
    """Let in a rank after ours of the same run."""
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
    """Wait until every rank after ours has both connections; of two that claim to be the same, the later one is."""
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
    """Connect to a rank before ours, which may not be listening yet. Raises RunFailedError after the deadline, or where it refuses."""
    peer, channel = place
    placed = task.cluster.of_role("worker")[peer]
    hello = _Hello(channel, task.rank, task.cluster.workers)
    return connect(task.cluster.endpoint(placed), task.cluster.secret, hello.packed(), deadline, placed.name)


def _exchange_words(task: Task, connected: Mapping[Place, socket.socket], deadline: float) -> None:
    """Tell all other ranks that this one has all of its connections, and wait until they have told the same."""
    names = names_of(task)
    for step in (lambda exchange: exchange.send(_WORD), lambda exchange: _hear_word(exchange)):
        for (peer, _channel), connection in connected.items():
            try:
                step(Exchange(connection, deadline))
            except TimeoutError as error:
                waits = f"start_timeout: {task.name} still waits for {names[peer]}, or for one that it waits for."
                raise (RunFailedError(waits) if time.monotonic() >= deadline else PeerLostError(names[peer], error)) from error
            except OSError as error:
                raise PeerLostError(names[peer], error) from error


def _hear_word(exchange: Exchange) -> None:
    if exchange.receive(1) != _WORD:
        raise ConnectionError("it sent what was not agreed")
