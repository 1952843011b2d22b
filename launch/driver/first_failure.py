"""The root cause among several failures of tasks and nodes.

A task that loses a peer ends, often before the driver hears of the peer, so it is blamed last. Clocks of machines are never compared: on
one node its own count of deaths decides, between nodes the order of arrival.
"""

from __future__ import annotations

import errno
import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ...core.errors import RunFailedError, StalledRunError, TrainerError, UsageError
from ...core.liveness import REMEDY, worker_in
from ...engine.protocol.messages import WireMessage
from ...engine.protocol.node_messages import Death, Error, Phase
from ...engine.worker_watch import indicates_peer_loss, indicates_silent_peer

FORK_SERVER = "fork-server"  # task name if a fork server ended, with the tasks that it had forked
WARMING_UP = "warming up"  # includes compilation
MAX_QUOTED_CHARACTERS = 300
_SAYS_NOTHING = re.compile(  # log lines that do not explain a death: stacks, their titles, and frameworks' infos and warnings
    r"""\s*$|\s+File\ "|\s*(?:frame\ )?\#\d|\s*@\s+0x|(?:Current\ t|T)hread\ 0x|Extension\ modules:|\*\*\*\ (?:Begin|End)
    |\[?[IW]\d{4}\ |.{0,60}:\ [IW]\ \S+:\d+|terminate\ called|Stack\ (?:Trace|trace)""",
    re.VERBOSE,
)


class AddressInUseError(TrainerError):
    """A reserved port was taken by another program before the task could listen on it."""


class _LossError(RunFailedError):
    def __init__(self, message: str, task: str | None, node: int) -> None:
        super().__init__(message, task)
        self.node = node


class TaskDiedError(_LossError):
    """A task has ended before the run. `stalled`: because it found that others stalled."""

    stalled = False


class SilentTaskError(StalledRunError):
    """A task has finished nothing for too long while others have.

    Training continues, with or without its restart.
    """


class NodeLostError(_LossError):
    """A node has ended or was cut off; `task` names its agent."""


@dataclass(frozen=True, slots=True)
class Termination:
    """The end of a task, or of a node (`death` is None); a `victim` had lost a peer."""

    node: int
    death: Death | None
    victim: bool = False

    @property
    def order(self) -> float:
        """Its place on its node; the node's own end is the last."""
        return math.inf if self.death is None else self.death.order


def is_victim(death: Death, error: Error | None) -> bool:
    """Return whether a task ended because it had lost a peer, as its error or log reports."""
    if error is not None:
        return error.peer_lost
    return death.signal in (None, "SIGABRT") and any(map(indicates_peer_loss, death.tail))  # frameworks abort themselves


def ended_with_fork_server(death: Death) -> bool:
    """Return whether a task ended with the fork server, as its CPU time is then unknown."""
    return death.pid is not None and death.cpu_seconds is None


def first_cause(terminations: Sequence[Termination]) -> Termination:
    """Return the root cause among at least one of `terminations`, in the order of arrival.

    Victims are blamed only if all are; of equals the first to arrive, or an earlier one of its node.
    """
    equals = [end for end in terminations if not end.victim] or list(terminations)
    return min((end for end in equals if end.node == equals[0].node), key=lambda end: end.order)


class TaskState(Enum):
    """The state of a task; the last three are of a task that restarts alone."""

    STARTING = "starting"
    READY = "ready"  # also once it has ended
    LOST = "lost"  # until its restart
    RESTARTING = "restarting"
    OVERDUE = "overdue"  # was not ready in time


@dataclass(slots=True)
class TaskRecord:
    """A task's state, last phase, and restart alone; moments and seconds of the monotonic clock."""

    state: TaskState = TaskState.STARTING
    phase: str | None = None
    warming_since: float = math.inf
    expected_deaths: int = 0  # of replaced processes
    cause: str = ""
    lost_at: float | None = None
    start_at: float = 0.0
    start_seconds: float = 0.0  # limit of the restart
    ready_by: float = math.inf

    @property
    def is_absent(self) -> bool:
        """Whether the task restarts alone and is not ready yet."""
        return self.state not in (TaskState.STARTING, TaskState.READY)


class RestartedTask(NamedTuple):
    """A task that is ready again after a restart alone, and why and for how long it was absent."""

    name: str
    cause: str
    absent_seconds: float


@dataclass(slots=True)
class _End:
    node: int
    death: Death | None
    expected: bool = False  # of a replaced process


class Failures:
    """The states of a group of tasks, and their failures in the order of arrival."""

    def __init__(self, lost: Iterable[int], dispensable: Collection[str] = ()) -> None:  # `dispensable` may end once ready
        self.tasks: defaultdict[str, TaskRecord] = defaultdict(TaskRecord)
        self._absent: dict[str, TaskRecord] = {}  # looked at for every message of a thousand tasks
        self.restarted: deque[RestartedTask] = deque()
        self.warming_up_seconds = 0.0  # the longest of all tasks
        self._ends = [_End(node, None) for node in lost]
        self._dispensable = dispensable
        self._errors: dict[str, Error] = {}

    def __bool__(self) -> bool:
        return bool(self.terminations)

    def record(self, node: int, message: WireMessage | None) -> bool:
        """Keep a report of a task's end (None: the node's loss); return whether it was one."""
        if message is None or isinstance(message, Death):
            self._ends.append(_End(node, message))
            if message is not None and self.tasks[message.task].expected_deaths:
                self._expect_death(message.task)
        elif isinstance(message, Error):
            self._errors[message.task] = message
        elif isinstance(message, Phase):
            task = self.tasks[message.task]
            task.phase = message.name
            if task.phase == WARMING_UP:
                task.warming_since = time.monotonic()
        else:
            return False
        return True

    def mark_ready(self, name: str) -> None:
        """Note that a task has started."""
        task, now = self.tasks[name], time.monotonic()
        self.warming_up_seconds = max(self.warming_up_seconds, now - task.warming_since)
        if task.lost_at is not None:
            self.restarted.append(RestartedTask(name, task.cause, now - task.lost_at))
        task.state, task.phase, task.warming_since, task.lost_at = TaskState.READY, None, math.inf, None
        self._absent.pop(name, None)

    def replace(self, name: str, cause: str, after_seconds: float, start_seconds: float) -> None:
        """Note that a lost task restarts alone after a pause, so that its end is no failure."""
        task, now = self.tasks[name], time.monotonic()
        task.expected_deaths += 1
        if any(self._unexpected_of(name)):
            self._expect_death(name)
        task.state, task.cause, task.start_at, task.start_seconds = TaskState.LOST, cause, now + after_seconds, start_seconds
        task.lost_at = now if task.lost_at is None else task.lost_at
        self._absent[name] = task

    def start_due(self) -> list[str]:
        """Return the lost tasks to restart now, each once."""
        now = time.monotonic()
        due = [name for name, task in self._absent.items() if task.state is TaskState.LOST and task.start_at <= now]
        for name in due:
            task = self.tasks[name]
            task.state, task.ready_by = TaskState.RESTARTING, now + task.start_seconds
        return due

    def overdue(self, grace_seconds: float) -> str | None:
        """Return a restarted task that is not ready this long after its limit, if any."""
        latest = time.monotonic() - grace_seconds
        for name, task in self._absent.items():
            if task.state is TaskState.RESTARTING and task.ready_by < latest:
                task.state = TaskState.OVERDUE
                return name
        return None

    def _unexpected_of(self, name: str) -> Iterator[_End]:
        return (end for end in self._ends if end.death is not None and end.death.task == name and not end.expected)

    def _expect_death(self, name: str) -> None:
        next(self._unexpected_of(name)).expected = True
        self.tasks[name].expected_deaths -= 1
        self.tasks[name].phase = None
        self._errors.pop(name, None)

    def only_of(self, tasks: Collection[str]) -> bool:
        """Return whether only these tasks have failed."""
        return all(end.death is not None and end.death.task in tasks for end in self.terminations)

    def is_training(self, name: str) -> bool:
        """Return whether a task is ready and has not ended since."""
        return self._is_ready(name) and not any(self._unexpected_of(name))

    def _is_ready(self, name: str) -> bool:
        return self.tasks[name].state is TaskState.READY

    @property
    def deaths(self) -> list[Death]:
        """The deaths of tasks so far, in order of arrival."""
        return [end.death for end in self._ends if end.death is not None]

    @property
    def terminations(self) -> list[Termination]:
        """The unexpected ends of tasks and nodes, in order of arrival."""
        return [
            Termination(end.node, end.death, end.death is not None and is_victim(end.death, self._errors.get(end.death.task)))
            for end in self._ends
            if not end.expected and not (end.death and end.death.task in self._dispensable and self._is_ready(end.death.task))
        ]

    @property
    def only_victims(self) -> bool:
        """Whether every failure is a victim's."""
        return all(end.victim for end in self.terminations)

    @property
    def certain(self) -> bool:
        """Whether a failure is certainly a cause: of a node, or of a killed, ready task."""
        return any(
            not end.victim and (end.death is None or (self._is_ready(end.death.task) and end.death.signal not in (None, "SIGABRT")))
            for end in self.terminations
        )

    def reported_cause(self) -> TrainerError | None:
        """Return a usage error or a taken port, which no other failure can cause."""
        for error in self._errors.values():
            if error.exit_code == UsageError.exit_code:
                return UsageError(error.message)
        for error in self._errors.values():
            if error.errno == errno.EADDRINUSE:
                return AddressInUseError(error.message)
        return None

    def death_of(self, node: int, name: str, death: Death) -> TaskDiedError:
        """Return the error for a task's end on the node `name`, with the end of its log."""
        task = death.task
        how = _ending_of(death)
        phase = self.tasks[task].phase
        doing = "" if phase is None else f" while {phase}"
        error = self._errors.get(task)
        why = f" ({error.type}: {error.message.splitlines()[0] if error.message else ''})" if error else ""
        out_of_memory = None if error is None else error.out_of_memory
        if out_of_memory is not None:
            first = "".join(out_of_memory.splitlines()[:1])
            starved = worker_in(first) or task
            how, why = f"{how}, as {'it' if starved == task else starved} ran out of memory", f" ({first}): {REMEDY}"
        elif death.signal == "SIGKILL" and death.oom_kills:
            why = f"; the kernel has killed for want of memory meanwhile, so that it ran out of memory, most likely: {REMEDY}"
        elif not why and (last := _last_words(death)) is not None:
            why = f'; its log ends with "{last}"'
        log = "\n".join(f"  {line}" for line in death.tail)
        text = f"task {task} on {name} {how}{doing}{why}"
        died = TaskDiedError(f"{text}\nlast lines of its log:\n{log}" if log else text, task, node)
        died.stalled = error is not None and (error.type == StalledRunError.__name__ or indicates_silent_peer(error.message))
        return died


def _last_words(death: Death) -> str | None:
    """Return the last line of a log that explains a signal; a lost peer explains SIGABRT only."""
    last_line = next((line.strip() for line in reversed(death.tail) if not _SAYS_NOTHING.match(line)), None)
    if last_line is None or death.signal is None or (death.signal != "SIGABRT" and indicates_peer_loss(last_line)):
        return None
    return last_line if len(last_line) <= MAX_QUOTED_CHARACTERS else f"{last_line[:MAX_QUOTED_CHARACTERS]}…"


def _ending_of(death: Death) -> str:
    if death.signal:
        return f"was killed by {death.signal}"
    return "could not be started" if death.code is None else f"ended with exit code {death.code}"
