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
        self._watched = threading.Event()
        self._channels = {channel.node: channel for channel in channels}
        self._inbox: queue.SimpleQueue[tuple[int, Message | None, int]] = queue.SimpleQueue()
        self._waiting = {node: _Waiting() for node in self._channels}
        self._outboxes: dict[int, queue.Queue[Message]] = {node: queue.Queue() for node in self._channels}
        for channel in channels:
            for work, name in ((self._read, "from"), (self._write, "to")):
                threading.Thread(target=work, args=(channel,), name=f"{name}-node-{channel.node}", daemon=True).start()

    @property
    def present(self) -> set[int]:
        """The nodes that are not lost."""
        return self._channels.keys() - set(self.lost)

    def watch(self, limit_seconds: float) -> None:
        """From now on give every node a sign of life each second, and give up those of which nothing arrives for so long."""
        self._watched.set()
        threading.Thread(target=self._watch, args=(limit_seconds,), name="silence", daemon=True).start()

    @property
    def arrivals(self) -> dict[int, tuple[int, int]]:
        """Figures of each node that is present, which change whenever something arrives from it."""
        return {node: self._channels[node].stream.arrivals for node in self.present}

    def next(self, timeout_seconds: float) -> tuple[int, Message | None] | None:
        """Return the next message and its node, None after the time. None instead of a message, once a node: it is among the lost now."""
        try:
            node, message, weight = self._inbox.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
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
        self._waiting[node].end()
        self.give_up(node)
        if node not in self.lost:
            self.lost.append(node)

    def say(self, message: Message) -> None:
        """Put a message of the driver's own into the queue; safe in a signal handler."""
        self._inbox.put((DRIVER, message, 0))

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

    def _read(self, channel: NodeChannel) -> None:
        while True:
            try:
                message = channel.stream.receive()
            except ProtocolError as error:
                self.broken.setdefault(channel.node, str(error))
                message = None
            except (OSError, ValueError, MemoryError):
                message = None
            if message == ALIVE:
                continue
            if message is None:
                self._ended.add(channel.node)
                self._inbox.put((channel.node, None, 0))
                return
            weight = channel.stream.weight
            if not self._waiting[channel.node].add(weight):
                return
            self._inbox.put((channel.node, message, weight))

    def _watch(self, limit_seconds: float) -> None:
        counter = SilenceCounter(limit_seconds, time.monotonic())
        while watched := self._channels.keys() - self._ended - self.silent.keys():
            time.sleep(TICK_SECONDS)
            heard = {node: self._channels[node].stream.arrivals for node in watched if not self._waiting[node].held_up}
            for node in counter.tick(time.monotonic(), heard):
                self.silent[node] = limit_seconds
                self._inbox.put((node, None, 0))  # its reader may not come back, where a process cannot even be killed
                self.give_up(node)

    def _write(self, channel: NodeChannel) -> None:
        """Send what the node is told: a node that does not read, because it is frozen, would hold up the driver for ever."""
        box = self._outboxes[channel.node]
        reachable = True
        while True:
            told = None
            with suppress(queue.Empty):
                told = box.get(timeout=INTERVAL_SECONDS if reachable else None)
            try:
                if reachable and (told is not None or self._watched.is_set()):
                    channel.stream.send(ALIVE if told is None else told)
            except (OSError, ValueError):
                reachable = False
                self._inbox.put((channel.node, None, 0))
            if told is not None:
                box.task_done()
