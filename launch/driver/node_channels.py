"""The driver's channels to its nodes: messages of all nodes arrive in one queue, and sending to a node never blocks the driver.

Whether a node can be reached is a state, set once its channel's end has been read, so that no later wait can miss it. A node that is
silent for too long is cut off, and is then lost like any other.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from ...engine.protocol.heartbeat import ALIVE, INTERVAL_SECONDS, TICK_SECONDS, SilenceCounter
from ...engine.protocol.messages import Message, ProtocolError
from ..launchers.base import NodeChannel

__all__ = ["DRIVER", "Members"]

DRIVER = -1
"""The number that messages of the driver to itself carry."""

MOST_WAITING_BYTES = 64 * 2**20
"""Memory of what a node has said and the driver has not come to. A node that says more waits; one message may wait whatever it weighs."""


class _Waiting:
    """What a node has said and the driver has not come to, in bytes. `held_up`: the node waits for the driver, and not the other way."""

    def __init__(self) -> None:
        self.held_up = False
        self._changed = threading.Condition()
        self._bytes = 0
        self._over = False

    def add(self, weight: int) -> bool:
        """Wait until there is room for a message; return False where nobody will take it any more."""
        with self._changed:
            self.held_up = True
            self._changed.wait_for(lambda: self._over or not self._bytes or self._bytes + weight <= MOST_WAITING_BYTES)
            self.held_up = False
            self._bytes += weight
            return not self._over

    def remove(self, weight: int) -> None:
        """The driver has come to a message."""
        with self._changed:
            self._bytes -= weight
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more of the node is taken."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Members:
    """The nodes behind `channels`. `lost` are those whose channel has ended, in the order in which that was read.

    `broken` says of some of them what they sent that nobody sends: they have been cut off, and nothing more of them is heard. `silent`:
    after how many seconds without a sign of life others have been.
    """

    def __init__(self, channels: Sequence[NodeChannel]) -> None:
        self.lost: list[int] = []
        self.broken: dict[int, str] = {}
        self.silent: dict[int, float] = {}
        self._ended: set[int] = set()
        self._awaited: set[int] = set()
        self._watching = threading.Lock()
        self._watcher = False
        self._watched = threading.Event()
        self._channels: dict[int, NodeChannel] = {}
        self._limit_seconds: float | None = None
        self._inbox: queue.SimpleQueue[tuple[NodeChannel | None, Message | None, int]] = queue.SimpleQueue()
        self._waiting: dict[int, _Waiting] = {}
        self._outboxes: dict[int, queue.Queue[Message]] = {}
        for channel in channels:
            self._attend(channel)

    def _attend(self, channel: NodeChannel) -> None:
        """Hear a node, and send it what it is told, from now on."""
        node = channel.node
        self._channels[node] = channel
        self._waiting[node], self._outboxes[node] = _Waiting(), queue.Queue()
        for work, name in ((self._read, "from"), (self._write, "to")):
            arguments = (channel, self._waiting[node], self._outboxes[node])
            threading.Thread(target=work, args=arguments, name=f"{name}-node-{node}", daemon=True).start()

    def admit(self, channel: NodeChannel) -> None:
        """Take the agent behind `channel` for that of its node, which was lost. It is not lost for its silence before `listen_to` it."""
        node = channel.node
        self.lost.remove(node)
        self.silent.pop(node, None)
        self._awaited.add(node)
        self._ended.discard(node)
        self._attend(channel)

    def listen_to(self, node: int) -> None:
        """From now on a node that was admitted is lost when it is silent for too long."""
        with self._watching:
            self._awaited.discard(node)
            if self._limit_seconds is not None and not self._watcher:
                self._start_watch(self._limit_seconds)

    @property
    def present(self) -> set[int]:
        """The nodes that are not lost."""
        return self._channels.keys() - set(self.lost)

    def watch(self, limit_seconds: float) -> None:
        """From now on give every node a sign of life each second, and give up those of which nothing arrives for so long."""
        self._watched.set()
        self._limit_seconds = limit_seconds
        self._start_watch(limit_seconds)

    def _start_watch(self, limit_seconds: float) -> None:
        self._watcher = True
        threading.Thread(target=self._watch, args=(limit_seconds,), name="silence", daemon=True).start()

    @property
    def arrivals(self) -> dict[int, tuple[int, int]]:
        """Figures of each node that is present, which change whenever something arrives from it."""
        return {node: self._channels[node].stream.arrivals for node in self.present}

    def next(self, timeout_seconds: float) -> tuple[int, Message | None] | None:
        """Return the next message and its node, None after the time. None instead of a message, once a node: it is among the lost now."""
        try:
            channel, message, weight = self._inbox.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        if channel is None:
            return DRIVER, message
        node = channel.node
        if channel is not self._channels[node]:
            return None  # it is of an agent that was lost, in whose place is another
        if weight:
            self._waiting[node].remove(weight)
        if node in self.lost:
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
        self._waiting[node].end()
        self.give_up(node)
        if node not in self.lost:
            self.lost.append(node)

    def say(self, message: Message) -> None:
        """Put a message of the driver's own into the queue; safe in a signal handler."""
        self._inbox.put((None, message, 0))

    def tell(self, node: int, message: Message) -> None:
        """Have a message sent, after those before it; one to a node that is lost goes nowhere. Safe from any thread."""
        self._outboxes[node].put(message)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all that was told has been sent, or cannot be."""
        deadline = time.monotonic() + timeout_seconds
        for box in (self._outboxes[node] for node in self.present):
            with box.all_tasks_done:
                box.all_tasks_done.wait_for(lambda box=box: not box.unfinished_tasks, max(0.0, deadline - time.monotonic()))  # type: ignore[misc]

    def give_up(self, node: int) -> None:
        """Cut a node off that does not answer: its agent is killed where it is our child, and loses its channel where it is not."""
        self._channels[node].cut_off()

    def _read(self, channel: NodeChannel, waiting: _Waiting, _outbox: queue.Queue[Message]) -> None:
        while True:
            try:
                message = channel.stream.receive()
            except ProtocolError as error:
                if channel is self._channels[channel.node]:
                    self.broken.setdefault(channel.node, str(error))
                message = None
            except (OSError, ValueError, MemoryError):
                message = None
            if message == ALIVE:
                continue
            if message is None:
                if channel is self._channels[channel.node]:
                    self._ended.add(channel.node)
                self._inbox.put((channel, None, 0))
                return
            weight = channel.stream.weight
            if not waiting.add(weight):
                return
            self._inbox.put((channel, message, weight))

    def _watch(self, limit_seconds: float) -> None:
        counter = SilenceCounter(limit_seconds, time.monotonic())
        while watched := self._watched_channels():
            time.sleep(TICK_SECONDS)
            heard = {node: (id(channel), channel.stream.arrivals) for node, channel in watched.items() if not self._waiting[node].held_up}
            silent = counter.tick(time.monotonic(), heard)
            self.silent |= dict.fromkeys(silent, limit_seconds)  # all of them before any is told of, as each is described with the others
            for node in silent:
                self._inbox.put((watched[node], None, 0))  # its reader may not come back, where a process cannot even be killed
                watched[node].cut_off()

    def _watched_channels(self) -> dict[int, NodeChannel]:
        """Return the channels of the nodes whose silence counts; where there are none, the watch ends."""
        with self._watching:
            nodes = self._channels.keys() - self._ended - self.silent.keys() - self._awaited
            self._watcher = bool(nodes)
            return {node: self._channels[node] for node in nodes}

    def _write(self, channel: NodeChannel, _waiting: _Waiting, box: queue.Queue[Message]) -> None:
        """Send what the node is told: a node that does not read, because it is frozen, would hold up the driver for ever."""
        reachable = True
        while True:
            told = None
            with suppress(queue.Empty):
                told = box.get(timeout=INTERVAL_SECONDS)
            if channel is not self._channels[channel.node]:
                return  # another agent is in its place
            try:
                if reachable and (told is not None or self._watched.is_set()):
                    channel.stream.send(ALIVE if told is None else told)
            except (OSError, ValueError):
                reachable = False
                self._inbox.put((channel, None, 0))
            if told is not None:
                box.task_done()
