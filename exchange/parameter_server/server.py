"""Parameter servers: their listener, and leases of connections.

Only a worker's newest connection (generation) may push.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ...core.cluster import Task, split_evenly
from ...core.errors import RunFailedError
from ...core.job import Job
from ...core.listener import AuthenticatingListener, Exchange
from ...models.base import ModelSpec
from ..authentication import accept, tune
from .shards import MakeRule, Shard, Vector, bind_rule, bytes_of
from .wire_protocol import AVERAGED, NO_STEP, OVERFLOWED, Connection, Frame, Hello, Kind, admit


class Lease:
    """Right of a connection to push.

    It is held while a push is applied, so that none is in progress when `end` returns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._ended:
            self._lock.release()
            raise ConnectionError("it pushed after its lease had ended")

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def end(self) -> None:
        """Refuse later pushes; waits for the current one."""
        with self._lock:
            self._ended = True


class Leases:
    """The leases of a shard's workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: dict[int, tuple[int, Lease]] = {}
        self._ended: dict[int, int] = {}

    def begin(self, worker: int, generation: int) -> Lease:
        """Return the lease of a worker's new connection, and end earlier ones.

        Raises ConnectionError if it is not the newest.
        """
        with self._lock:
            newest, before = self._current.get(worker, (0, None))
            if generation <= max(newest, self._ended.get(worker, 0)):
                raise ConnectionError(f"it joined as generation {generation} of its worker, which has ended")
            lease = Lease()
            self._current[worker] = generation, lease
        if before is not None:
            before.end()
        return lease

    def end(self, worker: int, generation: int) -> None:
        """End a worker's leases up to this generation, also of a connection that has not joined yet."""
        with self._lock:
            self._ended[worker] = max(generation, self._ended.get(worker, 0))
            newest, lease = self._current.get(worker, (0, None))
        if lease is not None and newest <= generation:
            lease.end()


log = logging.getLogger(__name__)
WARM_ELEMENTS = 2**16  # runs the kernels of large shards, on all threads


def shard_bounds(model: ModelSpec, shards: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard in the vector of parameters and buffers.

    Shards are equal shares, cut across variables.
    """
    return split_evenly(model.size + model.buffers_size, shards)


def initial_shard(job: Job, model: ModelSpec, index: int, make_rule: MakeRule) -> Shard:
    """Return shard `index` at the model's initial values."""
    start, stop = shard_bounds(model, job.ps)[index]
    parameters, buffers = model.initial(job.seed), model.initial_buffers(job.seed)
    pieces, position = [], 0
    for spec, values in ((spec, values) for specs, values in ((model.parameters, parameters), (model.buffers, buffers)) for spec in specs):
        pieces.append(values[spec.name].ravel()[max(0, start - position) : max(0, stop - position)])
        position += spec.size
    sizes = {parameter.name: parameter.size for parameter in model.parameters}
    bound: MakeRule = lambda job, vector: bind_rule(job, vector, make_rule, sizes, start)  # noqa: E731
    return Shard(np.concatenate(pieces), max(0, min(stop, model.size) - start), job, bound)


def warm_rule(shard: Shard, job: Job, make_rule: MakeRule) -> None:
    """Run the update's kernels once on throw-away values."""
    elements = min(shard.elements, WARM_ELEMENTS)
    scratch = Shard(np.zeros(elements, np.float32), elements, job, make_rule)
    scratch.update(np.zeros(elements, np.float32), job.lr, 0, np.empty(elements, np.float32), step=None)


def pushed_step(frame: Frame) -> int | None:
    """Return the step of a PUSH, None for one outside training."""
    return None if frame.examples == NO_STEP else frame.examples


class Listener:
    """Listener that admits peers until closed.

    `serve` runs in a thread for each, with its time of arrival, and the end disconnects.
    """

    def __init__(self, task: Task, elements: int, serve: Callable[[Connection, Hello, float], None]) -> None:
        """Listen on the task's address.

        Raises OSError with errno EADDRINUSE if the port was taken.
        """
        self._secret, self._elements, self._serve = task.cluster.secret, elements, serve
        self._changed = threading.Condition()
        self._links: set[Connection] = set()
        self._closing = False
        listening = socket.create_server((task.address, task.port), backlog=128)
        self._door = AuthenticatingListener(listening, self._prove, self._admit, log.warning)

    def _prove(self, exchange: Exchange) -> tuple[socket.socket, Hello, float]:
        return exchange.connection, admit(exchange, self._secret, self._elements), exchange.deadline

    def _admit(self, peer: tuple[socket.socket, Hello, float], _host: str) -> None:
        connection, hello, arrival = peer
        if not accept(connection):
            return
        link = Connection(connection)
        with self._changed:
            self._links.add(link)
        try:
            tune(connection)
            if not self._closing:
                self._serve(link, hello, arrival)
        finally:
            with self._changed:
                self._links.discard(link)
                self._changed.notify_all()
            link.close()

    def close(self, timeout: float) -> None:
        """Stop listening, give peers `timeout` seconds to end, then cut them off."""
        self._closing = True
        self._door.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._links, timeout)
            for link in self._links:
                link.abort()
            self._changed.wait_for(lambda: not self._links, 1.0)


class ShardServer:
    """Parameter server beyond the first.

    Workers push to its shard, the chief reads and replaces its state.
    """

    def __init__(self, task: Task, job: Job, model: ModelSpec, make_rule: MakeRule) -> None:
        self._shard = initial_shard(job, model, task.placed.index, make_rule)
        warm_rule(self._shard, job, make_rule)
        self._leases = Leases()
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._listener = Listener(task, self._shard.elements, self._serve_peer)

    def _serve_peer(self, link: Connection, hello: Hello, arrival: float) -> None:
        try:
            if hello.role == "chief":
                self._serve_chief(link)
            else:
                self._serve_worker(link, hello.place)
        except OSError as error:
            log.warning("lost %s-%d: %s", hello.role, hello.place, error)
            if hello.role == "chief" and not self._ended.is_set():
                self._fail(RunFailedError(f"lost the chief: {error}"))
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._ended.set()

    def _serve_worker(self, link: Connection, worker: int) -> None:
        lease: Lease | None = None
        gradient, values = (np.empty(self._shard.elements, np.float32) for _ in range(2))
        incoming, outgoing = bytes_of(gradient), bytes_of(values)
        while (frame := link.receive(incoming)).kind != Kind.END:
            if frame.kind == Kind.ECHO:
                link.send(Kind.DONE)
                continue
            if frame.kind == Kind.JOIN:
                lease = self._leases.begin(worker, frame.version)
            link.send(Kind.PARAMETERS, outgoing, version=self._answer(frame, lease, gradient, values))

    def _answer(self, frame: Frame, lease: Lease | None, gradient: Vector, values: Vector) -> int:
        if frame.kind == Kind.PUSH and lease is not None:
            with lease:
                return self._shard.update(
                    gradient, frame.lr, frame.version, values, step=pushed_step(frame), skip=bool(frame.flags & OVERFLOWED)
                )[1]
        if frame.kind in (Kind.JOIN, Kind.PULL):
            return self._shard.read(values, averaged=bool(frame.flags & AVERAGED))
        raise ConnectionError(f"it sent a frame of kind {frame.kind}, which was not agreed")

    def _serve_chief(self, link: Connection) -> None:
        def send(pieces: Sequence[Vector], version: int) -> None:
            link.send(Kind.STATE, version=version)
            link.send_buffers([bytes_of(piece) for piece in pieces])

        while True:
            frame = link.receive()
            if frame.kind == Kind.FETCH:
                self._shard.export(send)
                continue
            if frame.kind == Kind.STORE:
                self._shard.replace(lambda pieces: link.receive_buffers([bytes_of(piece) for piece in pieces]), frame.version)
            link.send(Kind.DONE, version=self._end_lease(link, frame) if frame.kind == Kind.END_LEASE else 0)
            if frame.kind == Kind.END:
                self._ended.set()
                return

    def _end_lease(self, link: Connection, frame: Frame) -> int:
        step = int.from_bytes(link.receive_trailer(frame), "little", signed=True)
        self._leases.end(frame.examples, frame.version)
        return int(self._shard.has_applied(step))

    def serve(self, stop: threading.Event) -> None:
        """Serve until `stop` is set or the chief ends it.

        Raises RunFailedError if the chief is lost.
        """
        while not self._ended.wait(0.1) and not stop.is_set():
            pass
        self._listener.close(1.0 if self._failure is None else 0.0)
        if self._failure is not None and not stop.is_set():
            raise self._failure
