"""The driver's view of the cluster: one queue of everything the agents say, with deaths, samples and logs sorted out on the way."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ...backends.base import State
from ...core.cluster import Task
from ...core.errors import InterruptedRunError, RunFailedError, TrainerError, UsageError
from ...core.startup import REPORT_SECONDS
from ...engine.protocol.heartbeat import TICK_SECONDS
from ...engine.protocol.messages import PROTOCOL, Message
from ...engine.protocol.node_messages import wrong_with
from ...engine.protocol.state_transfer import load_messages
from ...engine.task import task_to_fields
from ..launchers.base import NodeChannel
from .first_failure import Fall, first_cause, is_victim
from .node_channels import DRIVER, Members
from .outstanding_requests import Asked

__all__ = ["AddressInUseError", "ClusterState", "TaskGroup", "load_state"]

CAUSE_WINDOW_SECONDS = 1.0
"""How long after a death further deaths are awaited, so that the first cause is told from its victims."""

FLUSH_SECONDS = 2.0
"""How long the last words to the agents may take."""


class AddressInUseError(TrainerError):
    """A reserved port was taken by another program before the task could listen on it."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """How the cluster stands: the kernel's state letter of each task that is known, and what is wrong with each node that said nothing."""

    states: Mapping[str, str]
    silent: Mapping[int, str]


@dataclass
class _Fallen:
    """The tasks and nodes that a failing run has lost, as they arrived (a death is None for a whole node), and what tasks said of it.

    `phases`: what each task that is not ready yet said last that it was doing.
    """

    falls: list[tuple[int, Message | None]] = field(default_factory=list)
    errors: dict[str, Message] = field(default_factory=dict)
    phases: dict[str, str] = field(default_factory=dict)


class TaskGroup:
    """Talks to every node. `on_sample`, `on_log` and `on_trace` are called from the caller's thread, within `receive`.

    So is `check`, at least once a second: it raises where something else than a node has failed. A node that has greeted and says nothing
    for `node_timeout_seconds` is lost; without a limit none is for that.
    """

    def __init__(
        self,
        channels: Sequence[NodeChannel],
        on_sample: Callable[[Mapping[str, Any]], None],
        on_log: Callable[[int, str, bytes], None],
        on_trace: Callable[[int, str, bytes], None] | None = None,
        check: Callable[[], None] | None = None,
        node_timeout_seconds: float | None = None,
    ) -> None:
        self.channels = channels
        self._on_sample = on_sample
        self._on_log = on_log
        self._on_trace = on_trace
        self._check = check
        self._node_timeout_seconds = node_timeout_seconds
        self._members = Members(channels)
        self._silent: set[int] = set()
        self._hosts: dict[int, str | None] = {}
        self._interrupted = threading.Event()
        self._deferring = False
        self._fallen = _Fallen()
        self._node_of: dict[str, int] = {}
        self._leaders: dict[str, int] = {}
        self._asked = Asked(channel.node for channel in channels)
        self._ending = False

    def __len__(self) -> int:
        return len(self._leaders)

    def interrupt(self) -> None:
        """Make the next `receive` raise InterruptedRunError; safe to call from a signal handler."""
        self._interrupted.set()
        self._members.say(Message("interrupt"))

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
        self._members.say(Message("wake"))

    # Starting -------------------------------------------------------------------------------------------------------

    def hello(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """Await every agent's greeting; return the nodes' descriptions in node order."""
        hosts: dict[int, dict[str, Any]] = {}
        greetings = self._collect("hello", [channel.node for channel in self.channels], timeout_seconds, "agents", "--start-timeout")
        for node, message in greetings.items():
            if message["protocol"] != PROTOCOL:
                raise RunFailedError(
                    f"node {node} speaks protocol {message['protocol']}, this driver {PROTOCOL}: install the same version everywhere"
                )
            hosts[node] = {**message["host"], "identity": message["identity"]}
            self._hosts[node] = message["host"]["hostname"]
            if self.channels[node].process is not None:
                self.channels[node].scratch = Path(message["scratch"])
        if self._node_timeout_seconds is not None:
            self._members.watch(self._node_timeout_seconds)
        return [hosts[channel.node] for channel in self.channels]

    def reserve_ports(self, counts: Mapping[int, int], timeout_seconds: float) -> dict[int, list[int]]:
        """Ask each node's agent for ports."""
        for node, count in counts.items():
            self._ask(node, Message("reserve", {"count": count}), "ports")
        reserved = {node: message["ports"] for node, message in self._collect("ports", counts, timeout_seconds, "ports").items()}
        for node, ports in reserved.items():
            if len(set(ports)) != counts[node]:
                self._refuse(node, f"{len(set(ports))} ports, where {counts[node]} were asked for")
        return reserved

    def start_tasks(self, tasks: Sequence[Task], request: Callable[[int], dict[str, Any]]) -> None:
        """Have every node start its tasks. `request` gives the fields of a node's ``start`` message beside its tasks."""
        self._expect_tasks({task.name: task.placed.node for task in tasks}, [task.name for task in tasks if task.placed.leading])
        for channel in self.channels:
            own = [task_to_fields(task) for task in tasks if task.placed.node == channel.node]
            fields = request(channel.node)
            self._asked.of_samples(channel.node, fields["sample_interval_seconds"])
            self._members.tell(channel.node, Message("start", {**fields, "tasks": own}))

    def _expect_tasks(self, node_of: Mapping[str, int], leaders: Sequence[str]) -> None:
        """From now on there are these tasks, each on its node, and no others; `leaders` lead, in this order."""
        self._node_of = dict(node_of)
        self._leaders = {name: number for number, name in enumerate(leaders)}
        self._asked.started(node_of, leaders)

    def await_ready(self, timeout_seconds: float) -> dict[str, str | None]:
        """Await every task's report that it is warm; return the precision that each says it computes in.

        Raises AddressInUseError, UsageError or RunFailedError where one cannot be.
        """
        ready: dict[str, str | None] = {}
        deadline = time.monotonic() + timeout_seconds
        reported = deadline + 2 * REPORT_SECONDS  # a task that is stuck says first where, and ends
        while len(ready) < len(self._node_of):
            missing = sorted(set(self._node_of) - set(ready))
            _, message = self._expect("ready", reported, partial(self._described_starts, missing), "--start-timeout")
            if time.monotonic() > deadline:
                raise RunFailedError(f"{message['from']} was ready only after --start-timeout, which says how long a start may take")
            ready[message["from"]] = message.get("precision_used")
            self._fallen.phases.pop(message["from"], None)
        return ready

    def _described_starts(self, tasks: Sequence[str]) -> str:
        phases = self._fallen.phases
        return ", ".join(f"{name} ({phases[name]})" if name in phases else name for name in tasks) + " to be ready"

    def _collect(self, kind: str, nodes: Iterable[int], timeout_seconds: float, what: str, option: str | None = None) -> dict[int, Message]:
        """Await one message of a kind from each of the nodes."""
        answers: dict[int, Message] = {}
        deadline = time.monotonic() + timeout_seconds
        while missing := sorted(set(nodes) - answers.keys()):
            node, message = self._expect(kind, deadline, partial("{} of nodes {}".format, what, missing), option)
            answers[node] = message
        return answers

    def _expect(self, kind: str, deadline: float, what: Callable[[], str], option: str | None = None) -> tuple[int, Message]:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RunFailedError(f"waited too long for {what()}{f'; {option} sets how long' if option else ''}")
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
            self._asked.of_leader(name, message)
            self._send_to(name, message)

    def send_to_first(self, message: Message) -> None:
        """Send a message to the first leading task; safe from any thread."""
        self._send_to(next(iter(self._leaders)), message)

    def receive(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Return the next message of a leading task with the task's number, or None after the time."""
        answer = self._next(timeout_seconds)
        if answer is None or answer[1].get("from") not in self._leaders:
            return None
        fields = dict(answer[1].fields)
        return self._leaders[fields.pop("from")], Message(answer[1].kind, fields, answer[1].arrays)

    def _next(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Return the next message that concerns the caller. Samples, logs, errors and deaths are dealt with here."""
        left = self._sorted(self._members.next(timeout_seconds))
        if self._interrupted.is_set() and not (self._ending or self._deferring):
            raise InterruptedRunError("interrupted by the user")
        if self._fallen.falls and not self._ending:
            raise self.first_failure()
        if self._check is not None and not self._ending:
            self._check()
        return left

    def _sorted(self, answer: tuple[int, Message | None] | None) -> tuple[int, Message] | None:
        """Keep what the agents report on the side, and the end of one; return what is none of that, if anything."""
        if answer is None:
            return None
        node, message = answer
        if message is not None and node != DRIVER:
            wrong = wrong_with(node, message, self._node_of) or self._asked.wrong_with(node, message)
            if wrong is not None:
                self._cut_off(node, wrong)
                return None
        if message is None or message.kind == "death":
            self._fallen.falls.append((node, message))
        elif message.kind == "error":
            self._fallen.errors[message["from"]] = message
        elif message.kind == "phase":
            self._fallen.phases[message["from"]] = message["name"]
        elif message.kind == "sample":
            self._on_sample({**message["record"], "node": node})  # whatever node it says it is of
        elif message.kind == "log":
            self._on_log(node, message.get("task"), message.array("text").tobytes())
        elif message.kind == "trace":
            if self._on_trace is not None:
                self._on_trace(node, message.get("path"), message.array("data").tobytes())
        else:
            return node, message
        return None

    def _cut_off(self, node: int, wrong: str) -> None:
        if node not in self._members.lost:
            self._members.cut_off(node, wrong)
            self._fallen.falls.append((node, None))

    def _refuse(self, node: int, wrong: str) -> NoReturn:
        """Cut a node off for what it has sent. Raises RunFailedError, which says so, or names what had ended before."""
        self._cut_off(node, wrong)
        raise self.first_failure()

    def refuse(self, leader: int, wrong: str) -> NoReturn:
        """Cut the node of a leading task off, whose answer cannot be. Raises RunFailedError."""
        self._refuse(self._node_of[list(self._leaders)[leader]], f"an answer that cannot be: {wrong}")

    def _ask(self, node: int, message: Message, kind: str) -> None:
        """Send a node a request that it answers by one message of a kind."""
        self._asked.of_node(node, kind)
        self._members.tell(node, message)

    def sample_now(self, timeout_seconds: float = 5.0) -> None:
        """Have every node take a sample now and await it, so that figures of the run clock begin and end with it."""
        nodes = [channel.node for channel in self.channels]
        for node in nodes:
            self._ask(node, Message("sample_now"), "sampled")
        self._collect("sampled", nodes, timeout_seconds, "samples")

    def standing(self, timeout_seconds: float = 0.75) -> ClusterState:
        """Ask how the tasks are, for the report of a stall, and return what is heard of it in the time. Raises nothing.

        A node that does not answer is not waited for any more when the run ends.
        """
        states: dict[str, str] = {}
        waiting = self._members.present
        for node in waiting:
            self._ask(node, Message("inspect"), "states")
        deadline = time.monotonic() + timeout_seconds
        while (waiting := waiting & self._members.present) and (remaining := deadline - time.monotonic()) > 0:
            answer = self._sorted(self._members.next(remaining))
            if answer is not None and answer[1].kind == "states":
                node, message = answer
                states |= {task: state for task, state in message["states"].items() if self._node_of.get(task) == node}
                waiting = waiting - {node}
        self._silent |= waiting
        lost = {node: self._describe_loss(node) for node in self._members.lost}
        silent = {node: f"the agent of {self._place(node)} does not answer" for node in sorted(waiting)}
        return ClusterState({**{death["task"]: "gone" for death in self.deaths}, **states}, {**lost, **silent})

    # How it ends ----------------------------------------------------------------------------------------------------

    def end_tasks(self, grace_seconds: float, *, politely: bool) -> None:
        """End every task and await it: with ``close`` first where the cluster is in order, then by force. Bounded."""
        self._ending = True
        for node in self._silent:
            self._members.give_up(node)
        waiting = self._members.present - self._silent
        for node in waiting:
            if politely:
                for name in (name for name, place in self._node_of.items() if place == node):
                    self._members.tell(node, Message("close", {"to": name}))
            self._ask(node, Message("stop", {"grace_seconds": grace_seconds if politely else 0.0}), "stopped")
        deadline = time.monotonic() + grace_seconds + 15.0
        while (waiting := waiting & self._members.present) and time.monotonic() < deadline:
            answer = self._sorted(self._members.next(0.5))
            if answer is not None and answer[1].kind == "stopped":
                waiting = waiting - {answer[0]}
        for node in waiting & self._members.present:
            self._silent.add(node)
            self._members.give_up(node)  # closing its channel would wait for what it does not read

    @property
    def breach(self) -> RunFailedError | None:
        """What a node did that none does, whenever it did, so that nothing of the run can be relied on; None where none did."""
        broken = next(iter(self._members.broken), None)
        return None if broken is None else RunFailedError(self._describe_loss(broken), f"agent-{broken}")

    @property
    def deaths(self) -> list[Message]:
        """The deaths reported so far, in order of arrival; after `end_tasks` those of all tasks."""
        return [death for _, death in self._fallen.falls if death is not None]

    def reset(self) -> None:
        """Forget the end of the tasks, so that the agents can be asked to start others; a node that is lost stays lost."""
        self._fallen = _Fallen([(node, None) for node in self._members.lost])
        self._ending = False

    def finish(self, exit_code: int) -> None:
        """Tell the agents that the run is over, and how it went."""
        self._ending = True
        for node in self._members.present - self._silent:
            self._members.tell(node, Message("finish", {"exit_code": exit_code}))
        self._members.flush(FLUSH_SECONDS)

    def first_failure(self) -> TrainerError:
        """Await further deaths for a moment, then return the error that names the first cause."""
        arrived = self._members.arrivals
        deadline = time.monotonic() + CAUSE_WINDOW_SECONDS
        while (remaining := deadline - time.monotonic()) > 0:
            self._sorted(self._members.next(remaining))
        self._await_silent_cause(arrived)
        asked = next((error for error in self._fallen.errors.values() if error["exit_code"] == UsageError.exit_code), None)
        if asked is not None:
            return UsageError(asked["message"])
        in_use = next((error for error in self._fallen.errors.values() if error["errno"] == errno.EADDRINUSE), None)
        if in_use is not None:
            return AddressInUseError(in_use["message"])
        first = first_cause(self._falls())
        if first.death is None:
            return RunFailedError(self._describe_loss(first.node), f"agent-{first.node}")
        return self._describe_death(first.node, first.death)

    def _falls(self) -> list[Fall]:
        errors = self._fallen.errors
        return [Fall(node, death, death is not None and is_victim(death, errors.get(death["task"]))) for node, death in self._fallen.falls]

    def _await_silent_cause(self, before: Mapping[int, tuple[int, int]]) -> None:
        """Where only victims have fallen, wait until each node has said something since `before`, or is lost: then that is the cause."""
        if self._node_timeout_seconds is None:
            return
        deadline = time.monotonic() + self._node_timeout_seconds + CAUSE_WINDOW_SECONDS
        while time.monotonic() < deadline and all(fall.victim for fall in self._falls()):
            now = self._members.arrivals
            if all(now[node] != mark for node, mark in before.items() if node in now):
                return
            self._sorted(self._members.next(TICK_SECONDS))

    def _describe_death(self, node: int, death: Message) -> RunFailedError:
        task: str = death["task"]
        how = f"was killed by {death['signal']}" if death["signal"] else f"ended with exit code {death['code']}"
        doing = f" while {self._fallen.phases[task]}" if task in self._fallen.phases else ""
        error = self._fallen.errors.get(task)
        why = f" ({error['type']}: {error['message'].splitlines()[0] if error['message'] else ''})" if error else ""
        log = "\n".join(f"  {line}" for line in death["tail"])
        text = f"task {task} on {self._place(node)} {how}{doing}{why}"
        return RunFailedError(f"{text}\nlast lines of its log:\n{log}" if log else text, task)

    def _describe_loss(self, node: int) -> str:
        if node in self._members.broken:
            return f"{self._place(node)} sent {self._members.broken[node]}: it is broken, or hostile, and has been cut off"
        if node in self._members.silent:
            places = " and ".join(self._place(each) for each in sorted(self._members.silent))
            have = "have" if len(self._members.silent) > 1 else "has"
            return f"{places} {have} not been heard of for {self._members.silent[node]:g} s (--node-timeout)"
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
            else "has gone: the connection to it has ended"
        )
        return f"the agent of {self._place(node)} {how}"

    def _place(self, node: int) -> str:
        """Name a node, with its host where the run has nodes on others than this."""
        if all(channel.process is not None for channel in self.channels):
            return f"node {node}"
        host, address = self._hosts.get(node), self.channels[node].address
        return f"node {node} (host {address})" if host is None else f"node {node} (host {host}, {address})"

    def _send_to(self, task: str, message: Message) -> None:
        self._members.tell(self._node_of[task], Message(message.kind, {**message.fields, "to": task}, message.arrays))


def load_state(control: TaskGroup, state: State, timeout_seconds: float) -> None:
    """Have every leading task take over a state, which travels to the first of them.

    Raises RunFailedError where a task dies of it, or after the time.
    """
    for message in load_messages(state):
        control.send_to_first(message)
    control.send(Message("load", {"sequence": 0}))
    deadline = time.monotonic() + timeout_seconds
    waiting = len(control)
    while waiting:
        if time.monotonic() > deadline:
            raise RunFailedError(f"the tasks did not take over the checkpoint's state within {timeout_seconds:.0f} s")
        answer = control.receive(1.0)
        if answer is not None and answer[1].kind == "done":
            waiting -= 1
