"""The nodes of a run as its driver sees them: what they say comes in one queue, and what they are told never makes the driver wait.

Whether a node can still be talked to is a state, known from the moment its end was read on: no later wait can miss it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from ...engine.protocol.messages import Message, ProtocolError
from ..launchers.base import NodeChannel

__all__ = ["DRIVER", "Members"]

DRIVER = -1
"""The number that messages of the driver to itself carry."""


class Members:
    """The nodes behind `channels`. `lost` are those whose channel has ended, in the order in which that was read.

    `broken` says of some of them what they sent that nobody sends: they have been cut off.
    """

    def __init__(self, channels: Sequence[NodeChannel]) -> None:
        self.lost: list[int] = []
        self.broken: dict[int, str] = {}
        self._channels = {channel.node: channel for channel in channels}
        self._inbox: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._outboxes: dict[int, queue.Queue[Message]] = {node: queue.Queue() for node in self._channels}
        for channel in channels:
            for work, name in ((self._read, "from"), (self._write, "to")):
                threading.Thread(target=work, args=(channel,), name=f"{name}-node-{channel.node}", daemon=True).start()

    @property
    def present(self) -> set[int]:
        """The nodes that are not lost."""
        return self._channels.keys() - set(self.lost)

    def next(self, timeout_seconds: float) -> tuple[int, Message | None] | None:
        """Return the next message and its node, None after the time. None instead of a message, once a node: it is among the lost now."""
        try:
            node, message = self._inbox.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None
        if message is not None:
            return node, message
        if node in self.lost:
            return None
        self.lost.append(node)
        return node, None

    def cut_off(self, node: int, why: str) -> None:
        """Give a node up for what it has sent; from now on it is lost."""
        self.broken.setdefault(node, why)
        self.give_up(node)
        if node not in self.lost:
            self.lost.append(node)

    def say(self, message: Message) -> None:
        """Put a message of the driver's own into the queue; safe in a signal handler."""
        self._inbox.put((DRIVER, message))

    def tell(self, node: int, message: Message) -> None:
        """Have a message sent, after those before it; one to a node that is lost goes nowhere. Safe from any thread."""
        self._outboxes[node].put(message)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all that was told has been sent, or cannot be."""
        deadline = time.monotonic() + timeout_seconds
        for box in self._outboxes.values():
            with box.all_tasks_done:
                box.all_tasks_done.wait_for(lambda box=box: not box.unfinished_tasks, max(0.0, deadline - time.monotonic()))  # type: ignore[misc]

    def give_up(self, node: int) -> None:
        """Cut a node off that does not answer: its agent is killed where it is our child, and loses its channel where it is not."""
        channel = self._channels[node]
        if channel.process is not None:
            channel.process.kill()
        else:
            channel.stream.cut()

    def _read(self, channel: NodeChannel) -> None:
        while True:
            try:
                message = channel.stream.receive()
            except ProtocolError as error:
                self.broken.setdefault(channel.node, str(error))
                message = None
            except (OSError, ValueError, MemoryError):
                message = None
            self._inbox.put((channel.node, message))
            if message is None:
                return

    def _write(self, channel: NodeChannel) -> None:
        """Send what the node is told: a node that does not read, because it is frozen, would hold up the driver for ever."""
        box = self._outboxes[channel.node]
        reachable = True
        while True:
            message = box.get()
            try:
                if reachable:
                    channel.stream.send(message)
            except (OSError, ValueError):
                reachable = False
                self._inbox.put((channel.node, None))
            box.task_done()
