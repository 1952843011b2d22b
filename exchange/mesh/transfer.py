"""One frame from each rank to each other one at the same time: whoever can take bytes gets some, whoever has some is heard."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from .links import Links

__all__ = ["Stream", "transfer"]

_NOW = socket.MSG_DONTWAIT


class Stream:
    """What this rank and another one send each other: buffers, whose bytes follow one another.

    Of `out` no more than the first `ready` bytes are sent yet. `sent` and `received` count bytes. Everything is of one frame.
    """

    __slots__ = ("_into", "_out", "ready", "received", "sent", "to_receive", "to_send")

    def __init__(self, out: Sequence[memoryview], into: Sequence[memoryview], ready: int | None = None) -> None:
        self._out, self._into = out, into
        self.to_send, self.to_receive = sum(map(len, out)), sum(map(len, into))
        self.ready = self.to_send if ready is None else ready
        self.sent = self.received = 0

    @property
    def waits_to_send(self) -> bool:
        """Whether there are bytes that can be sent."""
        return self.sent < self.ready

    @property
    def waits_to_receive(self) -> bool:
        """Whether there are bytes that have not come."""
        return self.received < self.to_receive

    def send(self, connection: socket.socket) -> None:
        """Send what the system takes without waiting. Raises OSError."""
        try:
            self.sent += connection.sendmsg(_between(self._out, self.sent, self.ready), (), _NOW)
        except BlockingIOError:
            return

    def receive(self, connection: socket.socket, flags: int = _NOW) -> bool:
        """Take what is there, or with MSG_WAITALL wait for the rest, up to the receiving time-out; False where the other side has closed.

        Raises OSError.
        """
        try:
            got = connection.recvmsg_into(_between(self._into, self.received, self.to_receive), 0, flags)[0]
        except BlockingIOError:
            return True
        self.received += got
        return got > 0


def transfer(links: Links, streams: Mapping[int, Stream], advance: Callable[[], None] | None = None) -> None:
    """Send and receive everything. `advance` is called whenever something has arrived, and may make more bytes ready.

    Raises PeerLostError where a rank has gone, or is waited for and gives no sign of life.
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
    """Receive where nothing is left to send: with one call for each rank, as long as none keeps the others waiting."""
    until = time.monotonic() + links.WAIT_SECONDS
    for peer, stream in streams.items():
        _receive(links, peer, stream, socket.MSG_WAITALL)
        if stream.waits_to_receive or time.monotonic() > until:
            return


def _move_side_by_side(links: Links, streams: Mapping[int, Stream], advance: Callable[[], None] | None) -> None:
    """Send and receive wherever that is possible; now and then look whether those of whom nothing comes still live."""
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
            links.check_life(peer for descriptor, peer in peers.items() if masks[descriptor] and peer not in heard)
            heard.clear()
            look_at = now + links.WAIT_SECONDS
        if advance is not None:
            advance()


def _between(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return views of the bytes start … stop − 1 of buffers that follow one another."""
    found, position = [], 0
    for buffer in buffers:
        first, last = max(start - position, 0), min(stop - position, len(buffer))
        if first < last:
            found.append(buffer[first:last])
        position += len(buffer)
    return found
