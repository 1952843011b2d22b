"""The driver's view of the cluster: one queue of everything the agents say, with deaths, samples and logs sorted out on the way."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.cluster import Task
from ..core.errors import InterruptedRunError, RunFailedError, TrainerError, UsageError
from ..core.starting import REPORT_SECONDS
from ..engine.messages import PROTOCOL, Message
from ..engine.task import task_to_fields
from .local import NodeChannel

__all__ = ["AddressInUseError", "Control"]

CAUSE_WINDOW_SECONDS = 1.0
"""How long after a death further deaths are awaited, so that the first cause is told from its victims."""


class AddressInUseError(TrainerError):
    """A reserved port was taken by another program before the task could listen on it."""


@dataclass
class _Fallen:
    """The task deaths and task errors of a failing run."""

    deaths: list[Message] = field(default_factory=list)
    errors: dict[str, Message] = field(default_factory=dict)


class Control:
    """Talks to every node. `on_sample`, `on_log` and `on_trace` are called from the caller's thread, within `receive`."""

    def __init__(
        self,
        channels: Sequence[NodeChannel],
        on_sample: Callable[[Mapping[str, Any]], None],
        on_log: Callable[[int, str, bytes], None],
        on_trace: Callable[[int, str, bytes], None] | None = None,
    ) -> None:
        self.channels = channels
        self._on_sample = on_sample
        self._on_log = on_log
        self._on_trace = on_trace
        self._queue: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._interrupted = threading.Event()
        self._deferring = False
        self._fallen = _Fallen()
        self._node_of: dict[str, int] = {}
        self._leaders: dict[str, int] = {}
        self._ending = False
        for channel in channels:
            threading.Thread(target=self._read, args=(channel,), name=f"node-{channel.node}", daemon=True).start()

    def __len__(self) -> int:
        return len(self._leaders)

    def interrupt(self) -> None:
        """Make the next `receive` raise InterruptedRunError; safe to call from a signal handler."""
        self._interrupted.set()
        self._queue.put((-1, Message("interrupt")))

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """Within the block an interrupt is only remembered: the first `receive` after it raises."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def wake(self) -> None:
        """Make a `receive` that waits return None; safe to call from a signal handler."""
        self._queue.put((-1, Message("wake")))

    # Starting -------------------------------------------------------------------------------------------------------

    def hello(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """Await every agent's greeting; return the nodes' descriptions in node order."""
        hosts: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(hosts) < len(self.channels):
            missing = [channel.node for channel in self.channels if channel.node not in hosts]
            node, message = self._expect("hello", deadline, f"agents of nodes {missing}", "--start-timeout")
            if message["protocol"] != PROTOCOL:
                raise RunFailedError(
                    f"node {node} speaks protocol {message['protocol']}, this driver {PROTOCOL}: install the same version everywhere"
                )
            hosts[node] = {**message["host"], "identity": message["identity"]}
            if self.channels[node].process is not None:
                self.channels[node].scratch = Path(message["scratch"])
        return [hosts[channel.node] for channel in self.channels]

    def reserve_ports(self, counts: Mapping[int, int], timeout_seconds: float) -> dict[int, list[int]]:
        """Ask each node's agent for ports."""
        for node, count in counts.items():
            self.channels[node].stream.send(Message("reserve", {"count": count}))
        ports: dict[int, list[int]] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(ports) < len(counts):
            node, message = self._expect("ports", deadline, "ports")
            ports[node] = message["ports"]
        return ports

    def start_tasks(self, tasks: Sequence[Task], request: Callable[[int], dict[str, Any]]) -> None:
        """Have every node start its tasks. `request` gives the fields of a node's ``start`` message beside its tasks."""
        self._fallen = _Fallen()
        self._node_of = {task.name: task.placed.node for task in tasks}
        self._leaders = {task.name: number for number, task in enumerate(task for task in tasks if task.placed.leading)}
        for channel in self.channels:
            own = [task_to_fields(task) for task in tasks if task.placed.node == channel.node]
            channel.stream.send(Message("start", {**request(channel.node), "tasks": own}))

    def await_ready(self, timeout_seconds: float) -> dict[str, str | None]:
        """Await every task's report that it is warm; return the precision that each says it computes in.

        Raises AddressInUseError, UsageError or RunFailedError where one cannot be.
        """
        ready: dict[str, str | None] = {}
        deadline = time.monotonic() + timeout_seconds + 2 * REPORT_SECONDS  # a task that is stuck says first where, and ends
        while len(ready) < len(self._node_of):
            missing = sorted(set(self._node_of) - set(ready))
            _, message = self._expect("ready", deadline, f"{', '.join(missing)} to join the cluster", "--start-timeout")
            ready[message["from"]] = message.get("precision_used")
        return ready

    def _expect(self, kind: str, deadline: float, what: str, option: str | None = None) -> tuple[int, Message]:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RunFailedError(f"waited too long for {what}{f'; {option} sets how long' if option else ''}")
            answer = self._next(min(remaining, 1.0))
            if answer is None:
                continue
            node, message = answer
            if message.kind == kind:
                return node, message

    # While it runs --------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a command to every leading task."""
        for name in self._leaders:
            self._forward(name, message)

    def send_to_first(self, message: Message) -> None:
        """Send a message to the first leading task; safe from any thread."""
        self._forward(next(iter(self._leaders)), message)

    def receive(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Return the next message of a leading task with the task's number, or None after the time."""
        answer = self._next(timeout_seconds)
        if answer is None or answer[1].get("from") not in self._leaders:
            return None
        fields = dict(answer[1].fields)
        return self._leaders[fields.pop("from")], Message(answer[1].kind, fields, answer[1].arrays)

    def _next(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Return the next message that concerns the caller. Samples, logs, errors and deaths are dealt with here."""
        try:
            answer = self._queue.get(timeout=timeout_seconds)
        except queue.Empty:
            answer = None
        if self._interrupted.is_set() and not (self._ending or self._deferring):
            raise InterruptedRunError("interrupted by the user")
        if answer is None:
            return None
        node, message = answer
        if message is None:
            if self._ending:
                return None
            raise self._lost_node(node)
        if not self._absorbed(node, message):
            return node, message
        if message.kind == "death" and not self._ending:
            raise self._cause()
        return None

    def _absorbed(self, node: int, message: Message) -> bool:
        """Keep what the agents report on the side; return whether the message was of that sort."""
        if message.kind == "sample":
            self._on_sample(message["record"])
        elif message.kind == "log":
            self._on_log(node, message["task"], message.array("text").tobytes())
        elif message.kind == "trace":
            if self._on_trace is not None:
                self._on_trace(node, message["path"], message.array("data").tobytes())
        elif message.kind == "error":
            self._fallen.errors[message["from"]] = message
        elif message.kind == "death":
            self._fallen.deaths.append(message)
        else:
            return False
        return True

    def sample_now(self, timeout_seconds: float = 5.0) -> None:
        """Have every node take a sample now and await it, so that figures of the run clock begin and end with it."""
        for channel in self.channels:
            channel.stream.send(Message("sample_now", {}))
        deadline = time.monotonic() + timeout_seconds
        for _ in self.channels:
            self._expect("sampled", deadline, "samples of the nodes")

    def states(self, timeout_seconds: float = 2.0) -> dict[str, str]:
        """Return the kernel's state letter of each living task, for the report of a stall."""
        for channel in self.channels:
            channel.stream.send(Message("inspect", {}))
        states: dict[str, str] = {}
        deadline = time.monotonic() + timeout_seconds
        for _ in self.channels:
            _, message = self._expect("states", deadline, "the states of the tasks")
            states.update(message["states"])
        return states

    # How it ends ----------------------------------------------------------------------------------------------------

    def end_tasks(self, grace_seconds: float, *, politely: bool) -> None:
        """End every task and await it: with ``close`` first where the cluster is in order, then by force. Bounded."""
        self._ending = True
        deadline = time.monotonic() + grace_seconds + 15.0
        stopped = 0
        for channel in self.channels:
            try:
                if politely:
                    for name, node in self._node_of.items():
                        if node == channel.node:
                            channel.stream.send(Message("close", {"to": name}))
                channel.stream.send(Message("stop", {"grace_seconds": grace_seconds if politely else 0.0}))
            except OSError:
                stopped += 1
        while stopped < len(self.channels) and time.monotonic() < deadline:
            try:
                node, message = self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
            if message is None or message.kind == "stopped":
                stopped += 1
            else:
                self._absorbed(node, message)

    @property
    def deaths(self) -> list[Message]:
        """The deaths reported so far, in order of arrival; after `end_tasks` those of all tasks."""
        return self._fallen.deaths

    def restartable(self) -> None:
        """Forget the end of the tasks, so that the agents can be asked to start others."""
        self._ending = False

    def finish(self, exit_code: int) -> None:
        """Tell the agents that the run is over, and how it went."""
        self._ending = True
        for channel in self.channels:
            try:
                channel.stream.send(Message("finish", {"exit_code": exit_code}))
            except OSError:
                continue

    def _cause(self) -> TrainerError:
        """Await further deaths for a moment, then blame the first cause: what a signal killed, else what died first."""
        deadline = time.monotonic() + CAUSE_WINDOW_SECONDS
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                node, message = self._queue.get(timeout=remaining)
            except queue.Empty:
                break
            if message is not None:
                self._absorbed(node, message)
        asked = next((error for error in self._fallen.errors.values() if error["exit_code"] == UsageError.exit_code), None)
        if asked is not None:
            return UsageError(asked["message"])
        in_use = next((error for error in self._fallen.errors.values() if error["errno"] == errno.EADDRINUSE), None)
        if in_use is not None:
            return AddressInUseError(in_use["message"])
        first = min(self._fallen.deaths, key=lambda death: (death["signal"] is None, death["monotonic_seconds"]))
        return self._describe(first)

    def _describe(self, death: Message) -> RunFailedError:
        task: str = death["task"]
        how = f"was killed by {death['signal']}" if death["signal"] else f"ended with exit code {death['code']}"
        error = self._fallen.errors.get(task)
        why = f" ({error['type']}: {error['message'].splitlines()[0] if error['message'] else ''})" if error else ""
        log = "\n".join(f"  {line}" for line in death["tail"])
        text = f"task {task} on node {self._node_of.get(task, '?')} {how}{why}"
        return RunFailedError(f"{text}\nlast lines of its log:\n{log}" if log else text, task)

    def _lost_node(self, node: int) -> RunFailedError:
        process = self.channels[node].process
        code = process.poll() if process is not None else None
        if process is not None and code is None:
            time.sleep(0.1)
            code = process.poll()
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
            if code is not None
            else "has gone"
        )
        return RunFailedError(f"the agent of node {node} {how}", f"agent-{node}")

    def _forward(self, task: str, message: Message) -> None:
        channel = self.channels[self._node_of[task]]
        try:
            channel.stream.send(Message(message.kind, {**message.fields, "to": task}, message.arrays))
        except OSError:
            return  # the node's end of stream is on its way through the queue and says why

    def _read(self, channel: NodeChannel) -> None:
        while True:
            try:
                message = channel.stream.receive()
            except (OSError, ValueError):
                message = None
            self._queue.put((channel.node, message))
            if message is None:
                return
