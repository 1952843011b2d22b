"""The driver's channels to its nodes, served by one thread, so that the driver never blocks.

A node's loss is a state, set once its channel's end is read, so no later wait can miss it.
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

from ...core.liveness import TICK_SECONDS, SilenceCounter
from ...engine.protocol.messages import ALIVE, ALIVE_LINE, INTERVAL_SECONDS, Message, ProtocolError, WireMessage
from ...engine.protocol.transport import Incoming, Outgoing
from ..launchers.base import NodeChannel

DRIVER = -1  # node number of `wake`
MAX_WAITING_BYTES = 64 * 2**20  # unprocessed messages of a node, which then waits; a single message may be larger


class _Peer:
    def __init__(self, channel: NodeChannel) -> None:
        self.channel = channel
        self.node = channel.node
        detached = channel.stream.detach()
        self.incoming = Incoming(detached)
        self.outgoing = Outgoing(detached)
        self.last_sent_at = time.monotonic()
        self.waiting_bytes = 0
        self.blocked: tuple[Message, int] | None = None  # waits until the driver has room
        self.over = False

    @property
    def has_room(self) -> bool:
        return self.blocked is not None and (not self.waiting_bytes or self.waiting_bytes + self.blocked[1] <= MAX_WAITING_BYTES)

    @property
    def arrivals(self) -> Hashable:
        return id(self), self.incoming.arrived_bytes, self.channel.stream.unread_bytes if self.blocked else 0


class NodeConnections:
    """The nodes behind `channels`; `lost` in the order in which their end was read."""

    def __init__(self, channels: Sequence[NodeChannel]) -> None:
        self.lost: list[int] = []
        self.rejected: dict[int, str] = {}  # protocol violations of nodes, which were cut off
        self.silent: dict[int, float] = {}  # seconds without a heartbeat after which nodes were lost
        self._channels = {channel.node: channel for channel in channels}
        self._peers: dict[int, _Peer] = {}
        self._inbox: queue.SimpleQueue[tuple[int, _Peer | None, Message | None, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._returning: set[int] = set()
        self._counter: SilenceCounter | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._alarm: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._masks: dict[int, int] = {}
        self._served: set[_Peer] = set()
        for channel in channels:
            self._connect(channel)

    def _connect(self, channel: NodeChannel) -> None:
        before = self._peers.pop(channel.node, None)
        self._channels[channel.node] = channel
        channel.stream.when_open(lambda: self._open(channel, before))

    def _open(self, channel: NodeChannel, before: _Peer | None) -> None:
        node = channel.node
        if channel is not self._channels[node]:
            return
        try:
            peer = self._peers[node] = _Peer(channel)
        except (OSError, ValueError):  # closed
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
        """Use `channel` for its lost node. Its silence has no effect until `listen_to`."""
        self.lost.remove(channel.node)
        self.silent.pop(channel.node, None)
        self._returning.add(channel.node)
        self._connect(channel)

    def listen_to(self, node: int) -> None:
        """From now on treat an admitted node as lost when it is silent for too long."""
        self._returning.discard(node)

    @property
    def alive(self) -> set[int]:
        """The nodes that are not lost."""
        return self._channels.keys() - set(self.lost)

    def watch(self, limit_seconds: float) -> None:
        """From now on send heartbeats every second, and give up nodes that are silent for this long."""
        self._counter = SilenceCounter(limit_seconds, time.monotonic())
        self._order(lambda: None)

    @property
    def arrivals(self) -> dict[int, Hashable]:
        """A value for each present node that changes with every arrival."""
        return {node: self._peers[node].arrivals if node in self._peers else None for node in self.alive}

    def next(self, timeout_seconds: float) -> tuple[int, Message | None] | None:
        """Return the next message and its node, or None; a lost node has a message None, once."""
        try:
            node, peer, message, weight = self._inbox.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        if peer is not None and weight:
            self._make_room(peer, weight)
        if node == DRIVER or node in self.lost or peer is not self._peers.get(node):  # or from a replaced agent
            return None
        if message is not None:
            return node, message
        self.lost.append(node)
        return node, None

    def cut_off(self, node: int, why: str) -> None:
        """Give up a node that broke the protocol; it is lost."""
        self.rejected.setdefault(node, why)
        self.lose(node)

    def lose(self, node: int) -> None:
        """Give up a node; it is lost."""
        if (peer := self._peers.get(node)) is not None:
            peer.over = True
            self._order(lambda: self._take(peer))
        self.disconnect(node)
        if node not in self.lost:
            self.lost.append(node)

    def wake(self) -> None:
        """Make a waiting `next` return None; safe in a signal handler."""
        self._inbox.put((DRIVER, None, None, 0))

    def send(self, node: int, message: WireMessage) -> None:
        """Send a message without waiting, unless the node is lost; thread-safe."""
        if (peer := self._peers.get(node)) is None:
            return
        peer.last_sent_at = time.monotonic()
        if peer.outgoing.send(message) or peer.outgoing.failed:
            self._order(lambda: self._send(peer))

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all messages have been sent, or cannot be."""
        deadline = time.monotonic() + timeout_seconds
        for peer in (self._peers[node] for node in self.alive & self._peers.keys()):
            peer.outgoing.wait(deadline - time.monotonic())

    def end_sending(self, timeout_seconds: float) -> None:
        """Stop sending, so that closing a channel's own files ends it; messages still arrive."""
        ended = threading.Event()

        def end() -> None:
            for peer in self._peers.values():
                peer.outgoing.stop()
                self._select(peer)
                peer.outgoing.close()
            ended.set()

        if self._order(end):
            ended.wait(timeout_seconds)

    def disconnect(self, node: int) -> None:
        """Cut off a node: kill its agent if it is our child, else close its channel."""
        self._channels[node].cut_off()

    def _make_room(self, peer: _Peer, weight: int) -> None:
        with self._lock:
            peer.waiting_bytes -= weight
            may_continue = peer.has_room
        if may_continue:
            self._order(lambda: self._take(peer))

    def _order(self, work: Callable[[], None], *, start: bool = False) -> bool:
        """Run `work` in the serving thread, which may be started; return whether there is one."""
        with self._lock:
            if self._alarm is None:
                if not start:
                    return False
                wakeup, self._alarm = socket.socketpair()
                for end in (wakeup, self._alarm):
                    end.setblocking(False)
                threading.Thread(target=self._serve, args=(wakeup, self._alarm), name="nodes", daemon=True).start()
            self._orders.append(work)
            with suppress(BlockingIOError):  # enough wake-ups are pending
                self._alarm.send(b"!")
            return True

    def _serve(self, wakeup: socket.socket, alarm: socket.socket) -> None:
        """Serve all channels until none is left; bytes at `wakeup`, from `alarm`, wake the thread."""
        self._selector.register(wakeup, selectors.EVENT_READ)
        next_tick = time.monotonic()
        try:
            while self._has_work():
                timeout = None if self._counter is None else max(0.0, next_tick - time.monotonic())
                for key, events in self._selector.select(timeout):
                    if key.data is None:
                        wakeup.recv(4096)
                    else:
                        self._serve_peer(key.data, events)
                while self._orders:
                    self._orders.popleft()()
                if self._counter is not None and time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self._tick(self._counter)
        finally:
            with self._lock:
                failed = self._alarm is alarm  # else another thread may have started since
                if failed:
                    self._alarm = None
            for peer in [*self._served] if failed else ():  # an error here loses every node
                self._end(peer)
            self._selector.unregister(wakeup)
            wakeup.close()
            alarm.close()

    def _has_work(self) -> bool:
        """Return whether there is something to serve; if not, the next order starts another thread."""
        with self._lock:
            if not self._served and not self._orders:
                self._alarm = None
            return self._alarm is not None

    def _serve_peer(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.outgoing.flush()
            self._send(peer)
        if events & selectors.EVENT_READ and peer in self._served and peer.blocked is None:
            try:
                peer.incoming.fill()
            except (OSError, MemoryError):
                peer.incoming.ended = True
            self._take(peer)

    def _take(self, peer: _Peer) -> None:
        try:
            while not peer.over and (peer.blocked is None or self._admitted(peer)):
                if (received := peer.incoming.next()) is None:
                    break
                if received[0].line != ALIVE_LINE:
                    peer.blocked = received
        except ProtocolError as error:
            if peer is self._peers[peer.node]:
                self.rejected.setdefault(peer.node, str(error))
            self._end(peer)
            peer.channel.cut_off()
        except MemoryError:
            self._end(peer)
        if peer.over or (peer.incoming.ended and peer.blocked is None):
            self._end(peer)
        self._select(peer)

    def _admitted(self, peer: _Peer) -> bool:
        with self._lock:
            if peer.blocked is None or not peer.has_room:
                return False
            message, weight = peer.blocked
            peer.blocked = None
            peer.waiting_bytes += weight
        self._inbox.put((peer.node, peer, message, weight))
        return True

    def _send(self, peer: _Peer) -> None:
        if peer.outgoing.failed and peer in self._served:
            self._inbox.put((peer.node, peer, None, 0))
        self._select(peer)

    def _select(self, peer: _Peer) -> None:
        reading, writing = peer.incoming.descriptor, peer.outgoing.descriptor
        wanted: dict[int, int] = {reading: 0, writing: 0}
        if peer in self._served:
            wanted[reading] |= selectors.EVENT_READ if peer.blocked is None else 0
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
        if peer not in self._served:
            return
        self._served.remove(peer)
        self._inbox.put((peer.node, peer, None, 0))
        self._select(peer)
        peer.outgoing.close()
        peer.incoming.close()

    def _tick(self, counter: SilenceCounter) -> None:
        now = time.monotonic()
        arrivals = {}
        for peer in [*self._served]:
            node = peer.node
            if peer.blocked is None and node not in self.silent and node not in self._returning:
                arrivals[node] = peer.arrivals
            if now - peer.last_sent_at >= INTERVAL_SECONDS and not peer.outgoing.waiting:
                self.send(node, ALIVE)
        silent = counter.tick(now, arrivals)
        self.silent |= dict.fromkeys(silent, counter.limit_seconds)  # first, as the error of each names all
        for node in silent:
            self._inbox.put((node, self._peers[node], None, 0))  # the channel of an unkillable process may not end
            self.disconnect(node)
