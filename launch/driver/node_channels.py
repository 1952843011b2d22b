"""The driver's channels to its nodes: messages of all nodes arrive in one queue, and sending to a node never blocks the driver.

One thread serves them all, however many there are. Whether a node can be reached is a state, set once its channel's end has been read, so
that no later wait can miss it. A node that is silent for too long is cut off, and is then lost like any other.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

from ...core.liveness.silence import TICK_SECONDS, SilenceCounter
from ...engine.protocol.heartbeat import ALIVE, INTERVAL_SECONDS
from ...engine.protocol.messages import Message, ProtocolError
from ...engine.protocol.nonblocking import Incoming, Outgoing
from ..launchers.base import NodeChannel

__all__ = ["DRIVER", "Members"]

DRIVER = -1
"""The number that messages of the driver to itself carry."""

MOST_WAITING_BYTES = 64 * 2**20
"""Memory of what a node has said and the driver has not come to. A node that says more waits; one message may wait whatever it weighs."""


class _Peer:
    """One node's channel. `held_up` is a message for which the driver has to make room first: the node waits for it."""

    def __init__(self, channel: NodeChannel) -> None:
        self.channel = channel
        self.node = channel.node
        lent = channel.stream.lend()
        self.incoming = Incoming(lent)
        self.outgoing = Outgoing(lent)
        self.told_at = time.monotonic()
        self.waiting_bytes = 0
        self.held_up: tuple[Message, int] | None = None
        self.over = False

    @property
    def has_room(self) -> bool:
        """Whether the message that is held up may wait for the driver now."""
        return self.held_up is not None and (not self.waiting_bytes or self.waiting_bytes + self.held_up[1] <= MOST_WAITING_BYTES)

    @property
    def arrivals(self) -> Hashable:
        """Figures that change whenever something arrives, also while nothing is read."""
        return id(self), self.incoming.arrived_bytes, self.channel.stream.unread_bytes if self.held_up else 0


class Members:
    """The nodes behind `channels`. `lost` are those whose channel has ended, in the order in which that was read.

    `broken` says of some of them what they sent that nobody sends: they have been cut off, and nothing more of them is heard. `silent`:
    after how many seconds without a sign of life others have been.
    """

    def __init__(self, channels: Sequence[NodeChannel]) -> None:
        self.lost: list[int] = []
        self.broken: dict[int, str] = {}
        self.silent: dict[int, float] = {}
        self._channels = {channel.node: channel for channel in channels}
        self._peers: dict[int, _Peer] = {}
        self._inbox: queue.SimpleQueue[tuple[int, _Peer | None, Message | None, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._awaited: set[int] = set()
        self._counter: SilenceCounter | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._alarm: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._masks: dict[int, int] = {}
        self._served: set[_Peer] = set()
        for channel in channels:
            self._attend(channel)

    def _attend(self, channel: NodeChannel) -> None:
        """Hear a node, and send it what it is told, from now on."""
        before = self._peers.pop(channel.node, None)
        self._channels[channel.node] = channel
        channel.stream.when_open(lambda: self._open(channel, before))

    def _open(self, channel: NodeChannel, before: _Peer | None) -> None:
        """Serve a channel from now on, behind which there is a connection, or was one; and that `before` it no more."""
        node = channel.node
        if channel is not self._channels[node]:
            return
        try:
            peer = self._peers[node] = _Peer(channel)
        except (OSError, ValueError):  # it has been closed
            self._peers.pop(node, None)
            self._inbox.put((node, None, None, 0))
            return

        def begin() -> None:
            if before is not None:
                self._end(before)
            self._served.add(peer)
            self._take(peer)  # what was read with its greeting

        self._order(begin, start=True)

    def admit(self, channel: NodeChannel) -> None:
        """Take the agent behind `channel` for that of its node, which was lost. It is not lost for its silence before `listen_to` it."""
        self.lost.remove(channel.node)
        self.silent.pop(channel.node, None)
        self._awaited.add(channel.node)
        self._attend(channel)

    def listen_to(self, node: int) -> None:
        """From now on a node that was admitted is lost when it is silent for too long."""
        self._awaited.discard(node)

    @property
    def present(self) -> set[int]:
        """The nodes that are not lost."""
        return self._channels.keys() - set(self.lost)

    def watch(self, limit_seconds: float) -> None:
        """From now on give every node a sign of life each second, and give up those of which nothing arrives for so long."""
        self._counter = SilenceCounter(limit_seconds, time.monotonic())
        self._order(lambda: None)

    @property
    def arrivals(self) -> dict[int, Hashable]:
        """Figures of each node that is present, which change whenever something arrives from it."""
        return {node: self._peers[node].arrivals if node in self._peers else None for node in self.present}

    def next(self, timeout_seconds: float) -> tuple[int, Message | None] | None:
        """Return the next message and its node, None after the time. None instead of a message, once a node: it is among the lost now."""
        try:
            node, peer, message, weight = self._inbox.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        if peer is not None and weight:
            self._make_room(peer, weight)
        if node == DRIVER:
            return node, message
        if node in self.lost or peer is not self._peers.get(node):  # the second: of an agent in whose place is another
            return None
        if message is not None:
            return node, message
        self.lost.append(node)
        return node, None

    def cut_off(self, node: int, why: str) -> None:
        """Give a node up for what it has sent; from now on it is lost."""
        self.broken.setdefault(node, why)
        self.lose(node)

    def lose(self, node: int) -> None:
        """Give a node up; from now on it is lost."""
        if (peer := self._peers.get(node)) is not None:
            peer.over = True
            self._order(lambda: self._take(peer))
        self.give_up(node)
        if node not in self.lost:
            self.lost.append(node)

    def say(self, message: Message) -> None:
        """Put a message of the driver's own into the queue; safe in a signal handler."""
        self._inbox.put((DRIVER, None, message, 0))

    def tell(self, node: int, message: Message) -> None:
        """Have a message sent, after those before it; one to a node that is lost goes nowhere. Safe from any thread."""
        if (peer := self._peers.get(node)) is None:
            return
        peer.told_at = time.monotonic()
        if peer.outgoing.tell(message) or peer.outgoing.failed:
            self._order(lambda: self._send(peer))

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all that was told has been sent, or cannot be."""
        deadline = time.monotonic() + timeout_seconds
        for peer in (self._peers[node] for node in self.present & self._peers.keys()):
            peer.outgoing.wait(deadline - time.monotonic())

    def end_sending(self, timeout_seconds: float) -> None:
        """Tell nothing more, so that whoever closes a channel's own files ends it; what nodes say is still heard."""
        ended = threading.Event()

        def end() -> None:
            for peer in self._peers.values():
                peer.outgoing.stop()
                self._select(peer)
                peer.outgoing.close()
            ended.set()

        if self._order(end):
            ended.wait(timeout_seconds)

    def give_up(self, node: int) -> None:
        """Cut a node off that does not answer: its agent is killed where it is our child, and loses its channel where it is not."""
        self._channels[node].cut_off()

    def _make_room(self, peer: _Peer, weight: int) -> None:
        """The driver has come to a message."""
        with self._lock:
            peer.waiting_bytes -= weight
            goes_on = peer.has_room
        if goes_on:
            self._order(lambda: self._take(peer))

    def _order(self, work: Callable[[], None], *, start: bool = False) -> bool:
        """Have the serving thread do something soon; return False where there is none, as no channel is open, and none is to be started."""
        with self._lock:
            if self._alarm is None:
                if not start:
                    return False
                heard, self._alarm = socket.socketpair()
                for end in (heard, self._alarm):
                    end.setblocking(False)
                threading.Thread(target=self._serve, args=(heard, self._alarm), name="nodes", daemon=True).start()
            self._orders.append(work)
            with suppress(BlockingIOError):  # it has been woken so often that it is awake
                self._alarm.send(b"!")
            return True

    # In the thread that serves all channels -------------------------------------------------------------------------

    def _serve(self, heard: socket.socket, alarm: socket.socket) -> None:
        """Serve all channels until none is left. `heard` tells that there are orders, which are announced at `alarm`."""
        self._selector.register(heard, selectors.EVENT_READ)
        next_tick = time.monotonic()
        try:
            while self._goes_on():
                timeout = None if self._counter is None else max(0.0, next_tick - time.monotonic())
                for key, events in self._selector.select(timeout):
                    if key.data is None:
                        heard.recv(4096)
                    else:
                        self._attend_to(key.data, events)
                while self._orders:
                    self._orders.popleft()()
                if self._counter is not None and time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self._tick(self._counter)
        finally:
            with self._lock:
                failed = self._alarm is alarm  # else nothing was left to serve, and another thread may have begun since
                if failed:
                    self._alarm = None
            for peer in [*self._served] if failed else ():  # something here is wrong: then nothing is waited for
                self._end(peer)
            self._selector.unregister(heard)
            heard.close()
            alarm.close()

    def _goes_on(self) -> bool:
        """Whether there is something to serve; if not, the next that is ordered needs another thread."""
        with self._lock:
            if not self._served and not self._orders:
                self._alarm = None
            return self._alarm is not None

    def _attend_to(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.outgoing.flush()
            self._send(peer)
        if events & selectors.EVENT_READ and peer in self._served and peer.held_up is None:
            try:
                peer.incoming.fill()
            except (OSError, MemoryError):
                peer.incoming.ended = True
            self._take(peer)

    def _take(self, peer: _Peer) -> None:
        """Put what a peer has said into the queue, as far as there is room."""
        try:
            while not peer.over and (peer.held_up is None or self._admitted(peer)):
                if (said := peer.incoming.next()) is None:
                    break
                if said[0] != ALIVE:
                    peer.held_up = said
        except ProtocolError as error:
            if peer is self._peers[peer.node]:
                self.broken.setdefault(peer.node, str(error))
            self._end(peer)
            peer.channel.cut_off()
        except MemoryError:
            self._end(peer)
        if peer.over or (peer.incoming.ended and peer.held_up is None):
            self._end(peer)
        self._select(peer)

    def _admitted(self, peer: _Peer) -> bool:
        """Whether there was room for what is held up."""
        with self._lock:
            if peer.held_up is None or not peer.has_room:
                return False
            message, weight = peer.held_up
            peer.held_up = None
            peer.waiting_bytes += weight
        self._inbox.put((peer.node, peer, message, weight))
        return True

    def _send(self, peer: _Peer) -> None:
        """See to what a peer could not be sent at once; one that takes nothing any more is lost."""
        if peer.outgoing.failed and peer in self._served:
            self._inbox.put((peer.node, peer, None, 0))
        self._select(peer)

    def _select(self, peer: _Peer) -> None:
        """Have the selector look for what a peer is awaited for: something to read, room to write, or nothing."""
        reading, writing = peer.incoming.descriptor, peer.outgoing.descriptor
        wanted: dict[int, int] = {reading: 0, writing: 0}
        if peer in self._served:
            wanted[reading] |= selectors.EVENT_READ if peer.held_up is None else 0
            wanted[writing] |= selectors.EVENT_WRITE if peer.outgoing.waiting else 0
        for descriptor, mask in wanted.items():
            before = self._masks.get(descriptor, 0)
            if descriptor < 0 or mask == before:
                continue
            if not mask:
                self._selector.unregister(descriptor)
            elif before:
                self._selector.modify(descriptor, mask, peer)
            else:
                self._selector.register(descriptor, mask, peer)
            self._masks[descriptor] = mask

    def _end(self, peer: _Peer) -> None:
        """A channel has ended; nothing is read from it any more, nor sent."""
        if peer not in self._served:
            return
        self._served.remove(peer)
        self._inbox.put((peer.node, peer, None, 0))
        self._select(peer)
        peer.outgoing.close()
        peer.incoming.close()

    def _tick(self, counter: SilenceCounter) -> None:
        """Give signs of life, and give up who has given none."""
        now = time.monotonic()
        heard = {}
        for peer in [*self._served]:
            node = peer.node
            if peer.held_up is None and node not in self.silent and node not in self._awaited:
                heard[node] = peer.arrivals
            if now - peer.told_at >= INTERVAL_SECONDS and not peer.outgoing.waiting:
                self.tell(node, ALIVE)
        silent = counter.tick(now, heard)
        self.silent |= dict.fromkeys(silent, counter.limit_seconds)  # before any is told of: each is described with the others
        for node in silent:
            self._inbox.put((node, self._peers[node], None, 0))  # its channel may not end, where a process cannot even be killed
            self.give_up(node)
