"""Connections of a rank to the others: heartbeats, frame heads, and transfers."""

from __future__ import annotations

import contextlib
import hmac
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..core.cluster import Task
from ..core.errors import RunFailedError
from ..core.liveness import TICK_SECONDS, SilenceCounter


class PeerLostError(ConnectionError):
    """Another rank has ended or is silent; the message names it."""

    def __init__(self, name: str, why: object) -> None:
        super().__init__(f"lost {name}: {why}")


def rank_names(task: Task) -> Mapping[int, str]:
    """Return each rank's name, node and address for messages."""
    addresses = task.cluster.addresses
    return {
        placed.index: f"{placed.name} on node {placed.node} ({addresses[placed.node]})" for placed in task.cluster.tasks_with_role("worker")
    }


# A byte a second on other connections distinguishes a long computation, unless it holds the interpreter's lock, from a lost rank.

INTERVAL_SECONDS = 1.0
_BEAT = b"."
_MAX_BYTES = 4096


class Heartbeat:
    """Heartbeats in a thread until `close`.

    `silent` are ranks not heard of for the limit, or with a closed connection.
    """

    def __init__(self, connections: Mapping[int, socket.socket], limit_seconds: float) -> None:
        self.silent: frozenset[int] = frozenset()
        self._connections = dict(connections)
        self.limit_seconds = limit_seconds
        self._wake, self._woken = socket.socketpair()
        for connection in self._connections.values():
            connection.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        heard = dict.fromkeys(self._connections, 0)
        counter = SilenceCounter(self.limit_seconds, time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            next_beat = 0.0
            while True:
                for key, _ in selector.select(TICK_SECONDS):
                    if key.data is None:
                        return
                    if _is_connected(self._connections[key.data]):
                        heard[key.data] += 1
                    else:
                        selector.unregister(key.fileobj)
                if (now := time.monotonic()) >= next_beat:
                    next_beat = now + INTERVAL_SECONDS
                    for peer in heard:
                        with contextlib.suppress(OSError):  # it is frozen or gone, and so not heard of either
                            self._connections[peer].send(_BEAT)
                self.silent = frozenset(counter.tick(now, heard))

    def close(self) -> None:
        """End the thread and the connections; a second call does nothing."""
        self._wake.close()
        self._thread.join()
        self._woken.close()
        for connection in self._connections.values():
            connection.close()


def _is_connected(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(_MAX_BYTES))
    except BlockingIOError:
        return True
    except OSError:
        return False


_HEAD = struct.Struct("<QQQ")
HEAD_BYTES = _HEAD.size  # attempt, number on the connection, size in bytes


class Links:
    """A rank's connections to the others. Used by one thread at a time."""

    WAIT_SECONDS = 0.5  # between checks of heartbeats

    def __init__(self, task: Task, connections: Mapping[int, socket.socket], heartbeat: Heartbeat) -> None:
        self.rank, self.ranks = task.rank, task.cluster.workers
        self.sockets = dict(connections)
        self._names, self._heartbeat = rank_names(task), heartbeat
        wait = struct.pack("ll", *divmod(round(self.WAIT_SECONDS * 1e6), 1_000_000))
        for connection in self.sockets.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        key = bytes.fromhex(task.cluster.secret)
        self._attempt = int.from_bytes(hmac.digest(key, b"frames of the direct exchange", "sha256")[:8], "little")
        self._frames = 0

    def next_head(self, size: int) -> bytes:
        """Return the head of the next frame, of `size` bytes.

        All ranks send the same frames in the same order.
        """
        self._frames += 1
        return _HEAD.pack(self._attempt, self._frames, size)

    def check_heartbeats(self, awaited: Iterable[int]) -> None:
        """Raise PeerLostError for an awaited rank that is silent."""
        silent = self._heartbeat.silent
        for peer in awaited:
            if peer in silent:
                raise self.lost(peer, f"it has not been heard of for {self._heartbeat.limit_seconds:g} s (--node-timeout)")

    def lost(self, peer: int, why: object) -> PeerLostError:
        """Return the error about a lost rank."""
        return PeerLostError(self._names[peer], why)

    def check_head(self, peer: int, head: memoryview, expected: bytes) -> None:
        """Raise RunFailedError for another frame than the expected one: a rank out of step."""
        if bytes(head) != expected:
            got, due = _HEAD.unpack(head), _HEAD.unpack(expected)
            what = (
                "of another attempt" if got[0] != due[0] else f"number {got[1]} of {got[2]} bytes, and number {due[1]} of {due[2]} was due"
            )
            raise RunFailedError(f"exchange: {self._names[peer]} sent a frame {what}; the workers are out of step")


_NOW = socket.MSG_DONTWAIT


class Stream:
    """Bytes of a frame between two ranks, in consecutive buffers.

    Only the first `ready` of `out` may be sent yet.
    """

    __slots__ = ("_into", "_out", "ready", "received", "sent", "to_receive", "to_send")

    def __init__(self, out: Sequence[memoryview], into: Sequence[memoryview], ready: int | None = None) -> None:
        self._out, self._into = out, into
        self.to_send, self.to_receive = sum(map(len, out)), sum(map(len, into))
        self.ready = self.to_send if ready is None else ready
        self.sent = self.received = 0

    @property
    def waits_to_send(self) -> bool:
        """Whether bytes can be sent."""
        return self.sent < self.ready

    @property
    def waits_to_receive(self) -> bool:
        """Whether bytes are missing."""
        return self.received < self.to_receive

    def send(self, connection: socket.socket) -> None:
        """Send what the system takes without waiting. Raises OSError."""
        try:
            self.sent += connection.sendmsg(_buffers_between(self._out, self.sent, self.ready), (), _NOW)
        except BlockingIOError:
            return

    def receive(self, connection: socket.socket, flags: int = _NOW) -> bool:
        """Receive the available bytes, or all until the timeout with MSG_WAITALL.

        Return False if the peer has closed. Raises OSError.
        """
        try:
            got = connection.recvmsg_into(_buffers_between(self._into, self.received, self.to_receive), 0, flags)[0]
        except BlockingIOError:
            return True
        self.received += got
        return got > 0


def transfer(links: Links, streams: Mapping[int, Stream], advance: Callable[[], None] | None = None) -> None:
    """Send and receive everything.

    `advance` runs after each arrival and may make more bytes ready. Raises PeerLostError.
    """
    for peer, stream in streams.items():
        _send(links, peer, stream)
    if advance is None and all(stream.sent == stream.to_send for stream in streams.values()):
        _receive_in_turn(links, streams)
    if advance is not None or any(stream.waits_to_receive or stream.waits_to_send for stream in streams.values()):
        _move_side_by_side(links, streams, advance)


def _send(links: Links, peer: int, stream: Stream) -> None:
    try:
        stream.send(links.sockets[peer])
    except OSError as error:
        raise links.lost(peer, error) from error


def _receive(links: Links, peer: int, stream: Stream, flags: int) -> None:
    try:
        open_still = stream.receive(links.sockets[peer], flags)
    except OSError as error:
        raise links.lost(peer, error) from error
    if not open_still:
        raise links.lost(peer, "it closed the connection")


def _receive_in_turn(links: Links, streams: Mapping[int, Stream]) -> None:
    """Receive when nothing is left to send, with one call per rank.

    It ends when a rank makes the others wait.
    """
    until = time.monotonic() + links.WAIT_SECONDS
    for peer, stream in streams.items():
        _receive(links, peer, stream, socket.MSG_WAITALL)
        if stream.waits_to_receive or time.monotonic() > until:
            return


def _move_side_by_side(links: Links, streams: Mapping[int, Stream], advance: Callable[[], None] | None) -> None:
    poll = select.poll()
    peers = {links.sockets[peer].fileno(): peer for peer in streams}
    masks = dict.fromkeys(peers, 0)
    heard: set[int] = set()
    look_at = time.monotonic() + links.WAIT_SECONDS
    while True:
        for descriptor, peer in peers.items():
            stream = streams[peer]
            mask = (select.POLLIN if stream.waits_to_receive else 0) | (select.POLLOUT if stream.waits_to_send else 0)
            if mask != masks[descriptor]:
                poll.register(descriptor, mask) if mask else poll.unregister(descriptor)
                masks[descriptor] = mask
        if not any(masks.values()):
            return
        for descriptor, events in poll.poll(1000 * links.WAIT_SECONDS):
            peer = peers[descriptor]
            stream = streams[peer]
            heard.add(peer)
            if stream.waits_to_send and events & ~select.POLLIN:
                _send(links, peer, stream)
            if stream.waits_to_receive and events & ~select.POLLOUT:
                _receive(links, peer, stream, _NOW)
        if (now := time.monotonic()) > look_at:
            links.check_heartbeats(peer for descriptor, peer in peers.items() if masks[descriptor] and peer not in heard)
            heard.clear()
            look_at = now + links.WAIT_SECONDS
        if advance is not None:
            advance()


def _buffers_between(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    pieces, position = [], 0
    for buffer in buffers:
        first, last = max(start - position, 0), min(stop - position, len(buffer))
        if first < last:
            pieces.append(buffer[first:last])
        position += len(buffer)
    return pieces
