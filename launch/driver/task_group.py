"""The tasks of one attempt at a run, from their start to their end, as the driver sees them: what they are sent, what they answer.

One that has ended may be started anew by itself, where whoever has the group wants that (`on_loss`), and the others go on meanwhile.
Tasks of another attempt are another group's. None of them can be taken for one's own: each group hears its nodes until they have told
that all of its tasks have ended, which is the last that they say of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ...backends.base import State
from ...backends.compiling.choice import CompileChoice, Timing
from ...core.cluster import Role, Task, TaskSpec
from ...core.errors import RunFailedError, StalledRunError, TrainerError
from ...core.liveness.silence import TICK_SECONDS
from ...core.liveness.startup_watchdog import REPORT_SECONDS
from ...engine.protocol.messages import Message, PreparedJson
from ...engine.protocol.state_transfer import load_messages
from ...engine.task import task_to_fields
from ..links.inquiry import LinkInquiry
from ..links.verdict import cut_off
from ..replacement.absent_tasks import AbsentTasks
from ..stacks.collect import COLLECT_SECONDS
from ..stacks.inquiries import Inquiries
from ..stacks.places import TaskStack
from .first_failure import FORK_SERVER, Failures, NodeLostError, TaskDiedError, ended_with_fork_server, first_cause
from .nodes import Nodes

__all__ = ["ClusterState", "TaskGroup", "TaskReady", "load_state"]

CAUSE_WINDOW_SECONDS = 1.0
"""How long after a death further deaths are awaited, so that the first cause is told from its victims."""

KILL_SECONDS = 15.0
"""How long nodes may take to end their tasks by force and to send what these have left behind."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """How the cluster stands: the kernel's state letter of each task that is known, and what is wrong with each node that said nothing.

    `stacks`: where each task stands of which its node has told that.
    """

    states: Mapping[str, str]
    silent: Mapping[int, str]
    stacks: Mapping[str, TaskStack] = field(default_factory=dict)


class TaskReady(NamedTuple):
    """What a task that is warm says: the number format that it computes in, and the kind of device (``cpu``, ``gpu``); None: nothing."""

    precision_used: str | None
    device_used: str | None


class TaskGroup:
    """Talks to the tasks `placed` on `nodes`, those of them that lead in their order. It raises what ends them, until `end_tasks`.

    `survives`: the roles of those whose death, once they are ready, ends nothing, as their backend declares it. `places` are the numbers of
    the nodes that are used, all where none are named. The others are asked nothing, and their loss is none of the group's. What
    `find_stacks` has asked about comes to `inquiries.on_answer`, from within `receive`.

    `rejoins`: the roles of those that can be started anew by themselves. `on_loss` is asked, from within `receive`, about the end of one of
    them, or that the first leading task has found it stalled, where nothing else has failed; it has called `replace` when it returns True,
    else the error is raised. `on_rejoined` is called when such a task is ready again.
    """

    def __init__(
        self,
        nodes: Nodes,
        placed: Sequence[TaskSpec],
        survives: Collection[Role] = (),
        places: Collection[int] | None = None,
        rejoins: Collection[Role] = (),
    ) -> None:
        self.nodes = nodes
        self._places = frozenset((channel.node for channel in nodes.channels) if places is None else places)
        lost = (node for node in nodes.lost if node in self._places)
        self._failures = Failures(lost, {task.name for task in placed if task.role in survives})
        self.node_of = {task.name: task.node for task in placed}
        self._leaders = {task.name: number for number, task in enumerate(task for task in placed if task.leading)}
        self._rejoins = {task.name for task in placed if task.role in rejoins}
        self._tasks: dict[str, Task] = {}
        self._request: Callable[[int], dict[str, Any]] = lambda node: {}
        self._absent = AbsentTasks()
        self._timings: dict[str, Timing] = {}
        self.compile_choice: CompileChoice | None = None
        self._stalled: deque[str] = deque()
        self._unheard: deque[tuple[int, Message]] = deque()
        self.on_loss: Callable[[TrainerError], bool] = lambda error: False
        self.on_rejoined: Callable[[str], None] = lambda task: None
        self._ending = False
        self.inquiries = Inquiries(partial(nodes.ask, kind="stacks"))
        self._links = LinkInquiry(nodes.ask)
        self._heard_at = time.monotonic()
        nodes.asked.started(self.node_of, self._leaders)

    def __len__(self) -> int:
        return len(self._leaders)

    @property
    def first_is_on_this_machine(self) -> bool:
        """Whether the agent of the first leading task is a process of this machine, as its launcher has it; its own word is not asked."""
        first = next(iter(self._leaders), None)
        return first is not None and self.nodes.channels[self.node_of[first]].shares_files

    # Starting -------------------------------------------------------------------------------------------------------

    def reserve_ports(self, counts: Mapping[int, int], timeout_seconds: float) -> dict[int, list[int]]:
        """Ask each node's agent for ports."""
        for node, count in counts.items():
            self.nodes.ask(node, Message("reserve", {"count": count}), "ports")
        reserved = {node: message["ports"] for node, message in self._collect("ports", counts, timeout_seconds, "ports").items()}
        for node, ports in reserved.items():
            if len(set(ports)) != counts[node]:
                self._refuse(node, f"{len(set(ports))} ports, where {counts[node]} were asked for")
        return reserved

    def start_tasks(self, tasks: Sequence[Task], request: Callable[[int], dict[str, Any]]) -> None:
        """Have every node start its tasks. `request` gives the fields of a node's ``start`` message beside its tasks."""
        cluster = PreparedJson(tasks[0].cluster.to_json()) if tasks else None
        self._tasks, self._request = {task.name: task for task in tasks}, request
        own: dict[int, list[dict[str, Any]]] = {node: [] for node in self._places}
        for task in tasks:
            own[task.placed.node].append(task_to_fields(task, cluster))
        self._heard_at = time.monotonic()
        for node in sorted(self._places):
            fields = request(node)
            self.nodes.asked.of_samples(node, fields["sample_interval_seconds"])
            self.nodes.members.tell(node, Message("start", {**fields, "tasks": own[node]}))

    def keep_spares(self, job: Mapping[str, Any], places: Collection[int] | None = None) -> None:
        """Have every node, or those of these numbers, start spares until it has as many as tasks."""
        for node in sorted(self._places if places is None else places):
            self.nodes.members.tell(node, Message("spares", {"job": job}))

    def await_ready(self, timeout_seconds: float) -> dict[str, TaskReady]:
        """Await every task's report that it is warm; return what each says of itself.

        Raises AddressInUseError, UsageError or RunFailedError where one cannot be.
        """
        ready: dict[str, TaskReady] = {}
        deadline = time.monotonic() + timeout_seconds
        reported = deadline + 2 * REPORT_SECONDS  # a task that is stuck says first where, and ends
        while len(ready) < len(self.node_of):
            _, message = self._expect("ready", reported, partial(self._described_starts, ready), "--start-timeout")
            if time.monotonic() > deadline:
                raise RunFailedError(f"{message['from']} was ready only after --start-timeout, which says how long a start may take")
            ready[message["from"]] = TaskReady(message.get("precision_used"), message.get("device_used"))
            self._failures.mark_ready(message["from"])
        return ready

    @property
    def warming_up_seconds(self) -> float:
        """How long the task that took longest warmed up, with what it compiled."""
        return self._failures.warming_up_seconds

    def _described_starts(self, ready: Collection[str]) -> str:
        return ", ".join(map(self._described_start, sorted(set(self.node_of).difference(ready)))) + " to be ready"

    def _described_start(self, task: str) -> str:
        doing = self._failures.phase_of(task)
        return f"task {task} on {self.nodes.name(self.node_of[task])}" + (f" ({doing})" if doing else "")

    def _collect(self, kind: str, nodes: Iterable[int], timeout_seconds: float, what: str) -> dict[int, Message]:
        """Await one message of a kind from each of the nodes."""
        answers: dict[int, Message] = {}
        deadline = time.monotonic() + timeout_seconds
        missing = set(nodes)
        while missing:
            node, message = self._expect(kind, deadline, lambda: f"{what} of nodes {sorted(missing)}")
            answers[node] = message
            missing.discard(node)
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
            self.nodes.asked.of_leader(name, message)
            self._send_to(name, message)

    def send_to_first(self, message: Message) -> None:
        """Send a message to the first leading task, as long as the tasks are not being ended; safe from any thread."""
        if not self._ending:
            self._send_to(next(iter(self._leaders)), message)

    def _send_to(self, task: str, message: Message) -> None:
        self.nodes.members.tell(self.node_of[task], Message(message.kind, {**message.fields, "to": task}, message.arrays))

    def receive(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Return the next message of a leading task with the task's number, or None after the time."""
        answer = self._next(timeout_seconds)
        if answer is None or answer[1].get("from") not in self._leaders:
            return None
        fields = dict(answer[1].fields)
        return self._leaders[fields.pop("from")], Message(answer[1].kind, fields, answer[1].arrays)

    def _next(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Return the next message that concerns the caller; errors and deaths are dealt with here."""
        left = self._unheard.popleft() if self._unheard else self._sorted(timeout_seconds)
        if not self._ending:
            self.nodes.raise_if_interrupted()
            while self._failures:
                error = self.first_failure()
                if not (self._failures.only_of(self._rejoins) and self.on_loss(error)):
                    raise error
            self._bring_back()
            self._look_at_links()
            self.nodes.check()
        return left

    def _bring_back(self) -> None:
        """Deal with what was told of tasks that stand still, and start those anew whose time it is."""
        while self._stalled:
            if (task := self._stalled.popleft()) not in self._absent:
                error = StalledRunError(f"stalled: {task} has finished nothing for most of --stall-timeout, while others were idle", task)
                if not self.on_loss(error):
                    raise error
        now = time.monotonic()
        for task, seconds in self._absent.due(now):
            node = self.node_of[task]
            fields = {**self._request(node), "start_seconds": seconds, "tasks": [task_to_fields(self._tasks[task])]}
            self.nodes.asked.started_again(task)
            self.nodes.members.tell(node, Message("start_again", fields))
        if (late := self._absent.overdue(now - 2 * REPORT_SECONDS)) is not None:  # one that is stuck says first where, and ends
            raise StalledRunError(f"{self._described_start(late)} was restarted, but not ready within --start-timeout", late)

    def _look_at_links(self) -> None:
        """Where no task has said anything for the node time-out, ask whether the nodes reach each other. Raises NodeLostError where not."""
        limit = self.nodes.node_timeout_seconds
        if limit is not None and time.monotonic() - max(self._heard_at, self._links.ended_at) >= limit:
            self._ask_about_links()
        if (error := self._node_cut_off()) is not None:
            raise error

    def _ask_about_links(self) -> None:
        """Have the nodes that have tasks find out whether they reach each other, unless they are at it or all have the same address."""
        nodes = self.nodes.answering.intersection(self.node_of.values())
        if self._tasks and len({self.nodes.channels[node].address for node in nodes}) > 1:
            self._links.begin(nodes)

    def _node_cut_off(self) -> NodeLostError | None:
        """Return the error that names a node which others do not reach, where that has just been found."""
        found = self._links.fetch()
        cut = None if found is None else cut_off(found, self.nodes.name)
        return None if cut is None else self.nodes.isolate(cut.node, cut.described)

    def _sorted(self, timeout_seconds: float) -> tuple[int, Message] | None:
        """Await a message; keep what tells of an end, and return what does not, if anything."""
        answer = self.nodes.receive(timeout_seconds, self.node_of)
        if answer is None or (answer[1] is None and not self._concerns(answer[0])):
            return None
        if answer[1] is not None and "from" in answer[1].fields and answer[1].kind != "error":
            self._heard_at = time.monotonic()
        if self._failures.record(*answer) or answer[1] is None:
            return None
        if answer[1].kind == "stacks":
            self.inquiries.hear(answer[1])
        elif answer[1].kind in ("probe_port", "peers_probed"):
            self._links.hear(answer[0], answer[1])
        elif answer[1].kind == "compile_timed":
            self._hear_timing(answer[1])
        elif answer[1].kind == "worker_stalled":
            self._stalled.append(f"worker-{answer[1]['worker']}")
        elif answer[1].kind == "ready" and answer[1]["from"] in self._absent:
            self._absent.end(answer[1]["from"])
            self._failures.mark_ready(answer[1]["from"])
            self.on_rejoined(answer[1]["from"])
        else:
            return answer[0], answer[1]
        return None

    def _hear_timing(self, message: Message) -> None:
        """Take in what a task has timed; once all have that time it, tell them what follows."""
        self._timings[message["from"]] = Timing(message["plain_seconds"], message["compiled_seconds"], message["reason"])
        if len(self._timings) < message["tasks"] or self.compile_choice is not None:
            return
        self.compile_choice = CompileChoice.of(list(self._timings.values()))
        for task in self._timings:
            self._send_to(task, Message("compile", {"compile": self.compile_choice.compiled}))

    def can_replace(self, task: str) -> bool:
        """Whether a task can be started anew by itself: others that could be are there, and go on meanwhile, and so is its node."""
        others = (other for other in self._rejoins if other != task and self._failures.is_ready(other))
        return task in self._rejoins and any(others) and self.node_of[task] in self.nodes.answering and not self._ending

    def replace(self, task: str, after_seconds: float, start_seconds: float) -> None:
        """Start a task anew by itself after so many seconds; a start may take `start_seconds`. What is left of it is ended then."""
        self._failures.replaced(task)
        self._absent.begin(task, time.monotonic() + after_seconds, start_seconds)

    def _concerns(self, lost: int) -> bool:
        """Whether the loss of a node is one of this group: it is used, or was cut off for what it sent, which ends every run."""
        return lost in self._places or lost in self.nodes.members.broken

    def _refuse(self, node: int, wrong: str) -> NoReturn:
        """Cut a node off for what it has sent. Raises RunFailedError, which says so, or names what had ended before."""
        if self.nodes.cut_off(node, wrong):
            self._failures.record(node, None)
        raise self.first_failure()

    def refuse(self, leader: int, wrong: str) -> NoReturn:
        """Cut the node of a leading task off, whose answer cannot be. Raises RunFailedError."""
        self._refuse(self.node_of[list(self._leaders)[leader]], f"an answer that cannot be: {wrong}")

    def sample_now(self, timeout_seconds: float = 5.0) -> None:
        """Have every node take a sample now and await it, so that figures of the run clock begin and end with it."""
        for node in sorted(self._places):
            self.nodes.ask(node, Message("sample_now"), "sampled")
        self._collect("sampled", self._places, timeout_seconds, "samples")

    def standing(self, timeout_seconds: float = 0.75) -> ClusterState:
        """Ask how the tasks are, for the report of a stall, and return what is heard of it in the time. Raises nothing.

        A node that does not answer is not waited for any more when the run ends.
        """
        states: dict[str, str] = {}
        members = self.nodes.members
        waiting = members.present & self._places
        for node in waiting:
            self.nodes.ask(node, Message("inspect"), "states")
        deadline = time.monotonic() + timeout_seconds
        while (waiting := waiting & members.present) and (remaining := deadline - time.monotonic()) > 0:
            answer = self._sorted(remaining)
            if answer is not None and answer[1].kind == "states":
                node, message = answer
                states |= {task: state for task, state in message["states"].items() if self.node_of.get(task) == node}
                waiting = waiting - {node}
        self.nodes.ignores_requests(waiting)
        lost = {node: self.nodes.describe_loss(node) for node in self.nodes.lost if node in self._places}
        stacks = {} if waiting or lost else self._stacks_of(self._places)  # with a node that has gone all others wait for that
        silent = {node: f"the agent of {self.nodes.name(node)} does not answer" for node in sorted(waiting)}
        return ClusterState({**{death["task"]: "gone" for death in self.deaths}, **states}, {**lost, **silent}, stacks)

    def find_stacks(self, task: str) -> None:
        """Ask where a task stands; nobody waits for the answer."""
        self.inquiries.ask(self.node_of[task], [task], awaited=False)

    def _stacks_of(self, nodes: Iterable[int]) -> dict[str, TaskStack]:
        """Ask nodes where their tasks stand; return what is heard of it within the time that agents take at most, or that it was not."""
        inquiries = self.inquiries
        inquiries.found.clear()
        for node in nodes:
            inquiries.ask(node, [task for task, place in self.node_of.items() if place == node], awaited=True)
        deadline = time.monotonic() + COLLECT_SECONDS
        while inquiries.awaited & self.nodes.members.present and (remaining := deadline - time.monotonic()) > 0:
            self._sorted(min(remaining, 1.0))
        silent = TaskStack("", f"is on a node that sent no stack within {COLLECT_SECONDS:g} s")
        found = {task: silent for task, place in self.node_of.items() if place in inquiries.awaited} | inquiries.found
        inquiries.give_up()
        return {task: found[task] for task in self.node_of if task in found}

    # How it ends ----------------------------------------------------------------------------------------------------

    def end_tasks(self, grace_seconds: float, *, politely: bool) -> None:
        """End every task and await it: with ``close`` first where the cluster is in order, then by force. Bounded.

        A node that does not tell in time that its tasks have ended is lost.
        """
        self._ending = True
        self.inquiries.on_answer = None
        nodes = self.nodes
        nodes.give_up_silent()
        waiting = nodes.answering & self._places
        for name in self._absent.started:  # in the middle of their start they would not hear that they are to go
            nodes.members.tell(self.node_of[name], Message("kill", {"task": name}))
        if politely:
            for name, place in self.node_of.items():
                if place in waiting:
                    nodes.members.tell(place, Message("close", {"to": name}))
        for node in waiting:
            nodes.ask(node, Message("stop", {"grace_seconds": grace_seconds if politely else 0.0}), "stopped")
        deadline = time.monotonic() + grace_seconds + KILL_SECONDS
        while (waiting := waiting & nodes.members.present) and time.monotonic() < deadline:
            answer = self._sorted(0.5)
            if answer is not None and answer[1].kind == "stopped":
                waiting = waiting - {answer[0]}
        nodes.ignores_requests(waiting & nodes.members.present)
        nodes.give_up_silent()

    @property
    def deaths(self) -> list[Message]:
        """The deaths reported so far, in order of arrival; after `end_tasks` those of all tasks."""
        return self._failures.deaths

    def first_failure(self) -> TrainerError:
        """Await further deaths for a moment, unless the cause is certain; then return the error that names the first cause.

        Where only victims have fallen, or none of the tasks has said anything for long before, a node that the others do not reach is that.
        """
        limit = self.nodes.node_timeout_seconds
        suspicious = limit is not None and time.monotonic() - self._heard_at >= limit / 2
        if not self._failures.certain and (suspicious or all(each.victim for each in self._failures.terminations)):
            self._ask_about_links()
        arrived = {node: mark for node, mark in self.nodes.members.arrivals.items() if node in self._places}
        deadline = time.monotonic() + CAUSE_WINDOW_SECONDS
        while not self._failures.certain and (remaining := deadline - time.monotonic()) > 0:
            self._put_off(self._sorted(remaining))
        self._await_silent_cause(arrived)
        told = self._failures.reported_cause()
        if told is not None:
            return told
        while self._links.under_way and not self._failures.certain:
            if (cut := self._node_cut_off()) is not None:
                return cut
            self._put_off(self._sorted(TICK_SECONDS))
        first = first_cause(self._failures.terminations)
        if first.death is None:
            return self.nodes.loss(first.node)
        if ended_with_fork_server(first.death) and (described := self.nodes.channels[first.node].fork_server) is not None:
            return TaskDiedError(f"{described()}, which ended the tasks that it had forked", FORK_SERVER, first.node)
        return self._failures.death_of(first.node, self.nodes.name(first.node), first.death)

    def _await_silent_cause(self, before: Mapping[int, Hashable]) -> None:
        """Where only victims have fallen, wait until each node has said something since `before`, or is lost: then that is the cause."""
        if self.nodes.node_timeout_seconds is None:
            return
        deadline = time.monotonic() + self.nodes.node_timeout_seconds + CAUSE_WINDOW_SECONDS
        while time.monotonic() < deadline and all(each.victim for each in self._failures.terminations):
            now = self.nodes.members.arrivals
            if all(now[node] != mark for node, mark in before.items() if node in now):
                return
            self._put_off(self._sorted(TICK_SECONDS))

    def _put_off(self, answer: tuple[int, Message] | None) -> None:
        """Keep what has arrived meanwhile, for whoever goes on after a failure."""
        if answer is not None:
            self._unheard.append(answer)


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
