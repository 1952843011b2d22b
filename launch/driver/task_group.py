"""The tasks of one attempt: the driver's messages to them, and their answers.

A failure is raised once, where messages are received. What arrives until then waits, so a lost task may restart (`replace`) while the
others train. Each attempt has its own group, which receives messages until the nodes report that all of its tasks have ended, so tasks of
two attempts cannot be confused.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from msgspec import structs

from ...backends.base import State
from ...backends.compiling import CompileChoice, Timing
from ...core.cluster import Role, Task, TaskSpec
from ...core.errors import RunFailedError, StalledRunError, TrainerError
from ...core.liveness import REPORT_SECONDS, TICK_SECONDS
from ...engine.protocol import node_messages as messages
from ...engine.protocol.messages import WireMessage
from ...engine.protocol.node_messages import Death, PlacedTask, Start, TaskReport, ToTask
from ...engine.protocol.state_transfer import load_messages
from ...engine.protocol.task_messages import Close, Command, Compile, CompileTimed, Done, Load, Ready, WorkerStalled
from ...engine.task import placed_task
from ..node.links import LinkInquiry, cut_off
from ..node.stacks import COLLECT_SECONDS, StackRequests, TaskStack
from .first_failure import (
    FORK_SERVER,
    Failures,
    NodeLostError,
    SilentTaskError,
    TaskDiedError,
    TaskState,
    ended_with_fork_server,
    first_cause,
)
from .nodes import Nodes

_Answer = tuple[int, WireMessage]  # a node and its message
CAUSE_WINDOW_SECONDS = 1.0  # wait for further deaths, to distinguish the root cause from its victims
KILL_SECONDS = 15.0  # for nodes to kill their tasks and to send their last reports


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The kernel's state letters and stacks of tasks, and problems of silent nodes."""

    states: Mapping[str, str]
    silent: Mapping[int, str]
    stacks: Mapping[str, TaskStack] = field(default_factory=dict)


class TaskGroup:
    """Messages with the tasks `placed` on `nodes`. Raises what ends them, until `end_tasks`."""

    def __init__(
        self,
        nodes: Nodes,
        placed: Sequence[TaskSpec],
        survives: Collection[Role] = (),  # the death of such a task, once ready, is no failure
        places: Collection[int] | None = None,  # the nodes in use, by default all; the loss of others is ignored
        rejoins: Collection[Role] = (),  # such tasks can restart alone
    ) -> None:
        self.nodes = nodes
        self._places = frozenset((channel.node for channel in nodes.channels) if places is None else places)
        lost = (node for node in nodes.peers.lost if node in self._places)
        self.failures = Failures(lost, {task.name for task in placed if task.role in survives})
        self.node_of = {task.name: task.node for task in placed}
        self._leaders = {task.name: number for number, task in enumerate(task for task in placed if task.leading)}
        self._rejoins = {task.name for task in placed if task.role in rejoins}
        self._tasks: dict[str, Task] = {}
        self._request: Callable[[int], Start] | None = None
        self._timings: dict[str, Timing] = {}
        self.compile_choice: CompileChoice | None = None
        self._stalled: deque[StalledRunError] = deque()
        self._pending: deque[_Answer] = deque()
        self._ending = False
        self.stack_requests = StackRequests(partial(nodes.request, kind="stacks"))
        self._links = LinkInquiry(nodes.request)
        self._last_report_at = time.monotonic()
        nodes.requests.started(self.node_of, self._leaders)

    def __len__(self) -> int:
        return len(self._leaders)

    @property
    def first_is_on_this_machine(self) -> bool:
        """Whether the first leading task is on this machine, by its launcher, not its node."""
        first = next(iter(self._leaders), None)
        return first is not None and self.nodes.channels[self.node_of[first]].shares_files

    def reserve_ports(self, counts: Mapping[int, int], timeout_seconds: float) -> dict[int, list[int]]:
        """Request ports from each node's agent."""
        for node, count in counts.items():
            self.nodes.request(node, messages.Reserve(count), "ports")
        reserved = {node: message.ports for node, message in self._collect("ports", counts, timeout_seconds, "ports").items()}
        for node, ports in reserved.items():
            if len(set(ports)) != counts[node]:
                self._refuse(node, f"{len(set(ports))} ports, where {counts[node]} were asked for")
        return reserved

    def start_tasks(self, tasks: Sequence[Task], request: Callable[[int], Start]) -> None:
        """Have every node start its tasks; `request` returns its message without them."""
        cluster = json.dumps(tasks[0].cluster.to_json()) if tasks else None
        self._tasks, self._request = {task.name: task for task in tasks}, request
        by_node: dict[int, list[PlacedTask]] = {node: [] for node in self._places}
        for task in tasks:
            by_node[task.placed.node].append(placed_task(task, cluster))
        self._last_report_at = time.monotonic()
        for node in sorted(self._places):
            start = structs.replace(request(node), tasks=by_node[node])
            self.nodes.requests.allow_samples(node, start.sample_interval_seconds)
            self.nodes.peers.send(node, start)

    def keep_spares(self, job: str, places: Collection[int] | None = None) -> None:
        """Have all or these nodes start a standby process per task of a job, given as JSON."""
        for node in sorted(self._places if places is None else places):
            self.nodes.peers.send(node, messages.Spares(job))

    def await_ready(self, timeout_seconds: float) -> dict[str, Ready]:
        """Wait until every task is warm. Raises AddressInUseError, UsageError or RunFailedError."""
        ready: dict[str, Ready] = {}
        deadline = time.monotonic() + timeout_seconds
        reported = deadline + 2 * REPORT_SECONDS  # a stuck task first reports its stacks
        while len(ready) < len(self.node_of):
            _, message = self._expect("ready", reported, partial(self._described_starts, ready), "--start-timeout")
            if time.monotonic() > deadline:
                raise RunFailedError(f"{message.task} was ready only after --start-timeout, which says how long a start may take")
            ready[message.task] = message
            self.failures.mark_ready(message.task)
        return ready

    def _described_starts(self, ready: Collection[str]) -> str:
        return ", ".join(map(self._described_start, sorted(set(self.node_of).difference(ready)))) + " to be ready"

    def _described_start(self, task: str) -> str:
        doing = self.failures.tasks[task].phase
        return f"task {task} on {self.nodes.name(self.node_of[task])}" + (f" ({doing})" if doing else "")

    def _collect(self, kind: str, nodes: Iterable[int], timeout_seconds: float, what: str) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        missing = set(nodes)
        while missing:
            node, message = self._expect(kind, deadline, lambda: f"{what} of nodes {sorted(missing)}")
            answers[node] = message
            missing.discard(node)
        return answers

    def _expect(self, kind: str, deadline: float, what: Callable[[], str], option: str | None = None) -> tuple[int, Any]:
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

    def send(self, message: Command) -> None:
        """Send a command to every leading task."""
        for name in self._leaders:
            self.nodes.requests.add_command(name, message)
            self._send_to(name, message)

    def send_to_first(self, message: ToTask) -> None:
        """Send a message to the first leading task, unless the tasks are being ended; thread-safe."""
        if not self._ending:
            self._send_to(next(iter(self._leaders)), message)

    def _send_to(self, task: str, message: ToTask) -> None:
        self.nodes.peers.send(self.node_of[task], structs.replace(message, to=task))

    def receive(self, timeout_seconds: float) -> _Answer | None:
        """Return the number of a leading task and its next message, or None after the timeout."""
        answer = self._next(timeout_seconds)
        if answer is None or not isinstance(answer[1], TaskReport) or answer[1].task not in self._leaders:
            return None
        return self._leaders[answer[1].task], answer[1]

    def _next(self, timeout_seconds: float) -> _Answer | None:
        """Return the next message for the caller. Raises failures, before which nothing is lost."""
        if not self._pending:
            self._postpone(self._accept(timeout_seconds))
        if not self._ending:
            self.nodes.raise_if_interrupted()
            if self.failures:
                raise self.first_failure()
            self._raise_stall()
            self._restart_lost()
            self._check_links()
            self.nodes.check()
        return self._pending.popleft() if self._pending else None

    def _raise_stall(self) -> None:
        while self._stalled:
            error = self._stalled.popleft()
            name = str(error.task)
            if not self.failures.tasks[name].is_absent and (self.can_replace(name) or not isinstance(error, SilentTaskError)):
                raise error

    def _restart_lost(self) -> None:
        for task in self.failures.start_due():
            node = self.node_of[task]
            start_seconds = self.failures.tasks[task].start_seconds
            assert self._request is not None
            tasks = [placed_task(self._tasks[task])]
            self.nodes.requests.started_again(task)
            self.nodes.peers.send(node, structs.replace(self._request(node), start_seconds=start_seconds, tasks=tasks, again=True))
        if (late := self.failures.overdue(2 * REPORT_SECONDS)) is not None:  # a stuck task first reports its stacks
            raise StalledRunError(f"{self._described_start(late)} was restarted, but not ready within --start-timeout", late)

    def _check_links(self) -> None:
        """Have the nodes probe each other after a long silence. Raises NodeLostError."""
        limit = self.nodes.node_timeout_seconds
        if limit is not None and time.monotonic() - max(self._last_report_at, self._links.ended_at) >= limit:
            self._probe_links()
        if (error := self._node_cut_off()) is not None:
            raise error

    def _probe_links(self) -> None:
        """Have the nodes with tasks probe each other, unless they do or share one address."""
        nodes = self.nodes.answering.intersection(self.node_of.values())
        if self._tasks and len({self.nodes.channels[node].address for node in nodes}) > 1:
            self._links.begin(nodes)

    def _node_cut_off(self) -> NodeLostError | None:
        probes = self._links.fetch()
        cut = None if probes is None else cut_off(probes, self.nodes.name)
        return None if cut is None else self.nodes.isolate(cut.node, cut.described)

    def _accept(self, timeout_seconds: float) -> _Answer | None:
        """Wait for a message; return it, unless it is handled here."""
        answer = self.nodes.receive(timeout_seconds, self.node_of)
        if answer is None:
            return None
        node, message = answer
        if message is None:
            if node in self._places or node in self.nodes.peers.rejected:  # a violation ends every run
                self.failures.record(node, None)
            return None
        if isinstance(message, TaskReport) and message.kind != "error":
            self._last_report_at = time.monotonic()
        return None if self.failures.record(node, message) or self._handle(node, message) else (node, message)

    def _handle(self, node: int, message: WireMessage) -> bool:
        if isinstance(message, messages.Stacks):
            self.stack_requests.add_answer(message)
        elif isinstance(message, messages.ProbePort | messages.PeersProbed):
            self._links.add_answer(node, message)
        elif isinstance(message, CompileTimed):
            self._record_timing(message)
        elif isinstance(message, WorkerStalled):
            task = f"worker-{message.worker}"
            how = "has finished nothing for most of --stall-timeout, while others were idle"
            self._stalled.append(StalledRunError(f"stalled: {task} {how}", task))
        elif isinstance(message, Ready) and self.failures.tasks[message.task].is_absent:
            self.failures.mark_ready(message.task)
        else:
            return False
        return True

    def _record_timing(self, message: CompileTimed) -> None:
        self._timings[message.task] = Timing(message.plain_seconds, message.compiled_seconds, message.reason)
        if len(self._timings) < message.tasks or self.compile_choice is not None:
            return
        self.compile_choice = CompileChoice.from_timings(list(self._timings.values()))
        for task in self._timings:
            self._send_to(task, Compile(self.compile_choice.compiled))

    def can_replace(self, task: str | None) -> bool:
        """Return whether a failed task can restart alone.

        Its node has to answer, another task to train, and no other to have failed.
        """
        failures = self.failures
        if task not in self._rejoins or failures.tasks[task].state is TaskState.OVERDUE or not failures.only_of(self._rejoins):
            return False
        trainers = (candidate for candidate in self._rejoins if candidate != task and failures.is_training(candidate))
        return any(trainers) and self.node_of[task] in self.nodes.answering and not self._ending

    def on_silent(self, worker: int) -> None:
        """Request the stacks of a worker that is silent while others are not.

        `receive` raises that later if the worker can restart.
        """
        task = f"worker-{worker}"
        self.stack_requests.request(self.node_of[task], [task], awaited=False)
        self._stalled.append(SilentTaskError(f"stalled: {task} has finished no step for --stall-timeout, while others have", task))

    def _refuse(self, node: int, wrong: str) -> NoReturn:
        """Cut a node off for a message. Raises the first failure, which may be earlier."""
        if self.nodes.cut_off(node, wrong):
            self.failures.record(node, None)
        raise self.first_failure()

    def refuse(self, leader: int, wrong: str) -> NoReturn:
        """Cut off the node of a leading task for an impossible answer. Raises RunFailedError."""
        self._refuse(self.node_of[list(self._leaders)[leader]], f"an answer that cannot be: {wrong}")

    def sample_now(self, timeout_seconds: float = 5.0) -> None:
        """Have every node take a sample now, so figures cover the whole run clock."""
        for node in sorted(self._places):
            self.nodes.request(node, messages.SampleNow(), "sampled")
        self._collect("sampled", self._places, timeout_seconds, "samples")

    def inspect_tasks(self, timeout_seconds: float = 0.75) -> ClusterState:
        """Return states and stacks after a stall, from nodes that answer in time. Raises nothing."""
        states: dict[str, str] = {}
        peers = self.nodes.peers
        waiting = peers.alive & self._places
        for node in waiting:
            self.nodes.request(node, messages.Inspect(), "states")
        deadline = time.monotonic() + timeout_seconds
        while (waiting := waiting & peers.alive) and (remaining := deadline - time.monotonic()) > 0:
            answer = self._accept(remaining)
            if answer is not None and isinstance(answer[1], messages.States):
                node = answer[0]
                states |= {task: state for task, state in answer[1].states.items() if self.node_of.get(task) == node}
                waiting = waiting - {node}
        self.nodes.mark_silent(waiting)
        lost = {node: self.nodes.describe_loss(node) for node in self.nodes.peers.lost if node in self._places}
        stacks = {} if waiting or lost else self._collect_stacks(self._places)  # a lost node explains the stall
        silent = {node: f"the agent of {self.nodes.name(node)} does not answer" for node in sorted(waiting)}
        return ClusterState({**{death.task: "gone" for death in self.deaths}, **states}, {**lost, **silent}, stacks)

    def _collect_stacks(self, nodes: Iterable[int]) -> dict[str, TaskStack]:
        requests = self.stack_requests
        requests.stacks.clear()
        for node in nodes:
            requests.request(node, [task for task, place in self.node_of.items() if place == node], awaited=True)
        deadline = time.monotonic() + COLLECT_SECONDS
        while requests.pending & self.nodes.peers.alive and (remaining := deadline - time.monotonic()) > 0:
            self._accept(min(remaining, 1.0))
        silent = TaskStack("", f"is on a node that sent no stack within {COLLECT_SECONDS:g} s")
        stacks = {task: silent for task, place in self.node_of.items() if place in requests.pending} | requests.stacks
        requests.give_up()
        return {task: stacks[task] for task in self.node_of if task in stacks}

    def end_tasks(self, grace_seconds: float, *, graceful: bool) -> None:
        """End every task in bounded time; a node that does not confirm is lost.

        With `graceful` the tasks first leave the cluster.
        """
        self._ending = True
        self.stack_requests.on_answer = None
        nodes = self.nodes
        nodes.disconnect_silent()
        waiting = nodes.answering & self._places
        for name, task in self.failures.tasks.items():
            if task.state in (TaskState.RESTARTING, TaskState.OVERDUE):  # starting tasks receive nothing
                nodes.peers.send(self.node_of[name], messages.Kill(name))
        if graceful:
            for name, place in self.node_of.items():
                if place in waiting:
                    nodes.peers.send(place, Close(to=name))
        for node in waiting:
            nodes.request(node, messages.Stop(grace_seconds if graceful else 0.0), "stopped")
        deadline = time.monotonic() + grace_seconds + KILL_SECONDS
        while (waiting := waiting & nodes.peers.alive) and time.monotonic() < deadline:
            answer = self._accept(0.5)
            if answer is not None and answer[1].kind == "stopped":
                waiting = waiting - {answer[0]}
        nodes.mark_silent(waiting & nodes.peers.alive)
        nodes.disconnect_silent()

    @property
    def deaths(self) -> list[Death]:
        """The deaths reported so far, in order of arrival; after `end_tasks` all."""
        return self.failures.deaths

    def first_failure(self) -> TrainerError:
        """Return the root cause's error, after further deaths if it is uncertain."""
        limit = self.nodes.node_timeout_seconds
        suspicious = limit is not None and time.monotonic() - self._last_report_at >= limit / 2
        if not self.failures.certain and (suspicious or self.failures.only_victims):  # perhaps an unreachable node
            self._probe_links()
        arrived = {node: mark for node, mark in self.nodes.peers.arrivals.items() if node in self._places}
        deadline = time.monotonic() + CAUSE_WINDOW_SECONDS
        while not self.failures.certain and (remaining := deadline - time.monotonic()) > 0:
            self._postpone(self._accept(remaining))
        self._await_silent_cause(arrived)
        if (reported := self.failures.reported_cause()) is not None:
            return reported
        while self._links.under_way and not self.failures.certain:
            if (cut := self._node_cut_off()) is not None:
                return cut
            self._postpone(self._accept(TICK_SECONDS))
        first = first_cause(self.failures.terminations)
        if first.death is None:
            return self.nodes.loss(first.node)
        if ended_with_fork_server(first.death) and (described := self.nodes.channels[first.node].fork_server) is not None:
            return TaskDiedError(f"{described()}, which ended the tasks that it had forked", FORK_SERVER, first.node)
        return self.failures.death_of(first.node, self.nodes.name(first.node), first.death)

    def _await_silent_cause(self, before: Mapping[int, Hashable]) -> None:
        """If only victims have ended, wait until each node has sent something or is lost."""
        if self.nodes.node_timeout_seconds is None:
            return
        deadline = time.monotonic() + self.nodes.node_timeout_seconds + CAUSE_WINDOW_SECONDS
        while time.monotonic() < deadline and self.failures.only_victims:
            now = self.nodes.peers.arrivals
            if all(now[node] != mark for node, mark in before.items() if node in now):
                return
            self._postpone(self._accept(TICK_SECONDS))

    def _postpone(self, answer: _Answer | None) -> None:
        if answer is not None:
            self._pending.append(answer)


def load_state(control: TaskGroup, state: State, timeout_seconds: float) -> None:
    """Have every leading task load a state. Raises RunFailedError, also after the timeout."""
    for message in load_messages(state):
        control.send_to_first(message)
    control.send(Load())
    deadline = time.monotonic() + timeout_seconds
    waiting = len(control)
    while waiting:
        if time.monotonic() > deadline:
            raise RunFailedError(f"the tasks did not take over the checkpoint's state within {timeout_seconds:.0f} s")
        answer = control.receive(1.0)
        if answer is not None and isinstance(answer[1], Done):
            waiting -= 1
