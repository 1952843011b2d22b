"""The root cause among several failures of tasks and nodes.

A task that loses a peer ends, often before the driver hears of the peer, so it is blamed last. Clocks of machines are never compared: on
one node its own count of deaths decides, between nodes the order of arrival.
"""

from __future__ import annotations

import errno
import math
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ...core.errors import RunFailedError, StalledRunError, TrainerError, UsageError
from ...core.liveness import REMEDY, worker_in
from ...engine.protocol.messages import Message
from ...engine.worker_watch import indicates_peer_loss

FORK_SERVER = "fork-server"  # task name if a fork server ended, with the tasks that it had forked
WARMING_UP = "warming up"  # includes compilation
MOST_QUOTED_CHARACTERS = 300
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


class NodeLostError(_LossError):
    """A node has ended or was cut off; `task` names its agent."""


@dataclass(frozen=True, slots=True)
class Termination:
    """The end of a task, or of a node (`death` is None); a `victim` had lost a peer."""

    node: int
    death: Message | None
    victim: bool = False

    @property
    def order(self) -> float:
        """Its place on its node; the node's own end is the last."""
        return math.inf if self.death is None else self.death["order"]


def is_victim(death: Message, error: Message | None) -> bool:
    """Return whether a task ended because it had lost a peer, as its error or log says."""
    if error is not None:
        return bool(error.get("peer_lost"))
    return death["signal"] in (None, "SIGABRT") and any(map(indicates_peer_loss, death["tail"]))  # frameworks abort themselves


def ended_with_fork_server(death: Message) -> bool:
    """Return whether a task ended with the fork server, as its CPU time is then unknown."""
    return death["pid"] is not None and death["cpu_seconds"] is None


def first_cause(terminations: Sequence[Termination]) -> Termination:
    """Return the root cause among at least one of `terminations`, in the order of arrival.

    Victims are blamed only if all are; of equals the first to arrive, or an earlier one of its node.
    """
    equals = [each for each in terminations if not each.victim] or list(terminations)
    return min((each for each in equals if each.node == equals[0].node), key=lambda each: each.order)


class Failures:
    """The failures of a group of tasks, in the order of arrival, and the tasks' reports."""

    def __init__(self, lost: Iterable[int], dispensable: Collection[str] = ()) -> None:  # `dispensable` may end once ready
        self._ended: list[tuple[int, Message | None]] = [(node, None) for node in lost]
        self._dispensable = dispensable
        self._ready: set[str] = set()
        self._forgiven: list[tuple[int, Message | None]] = []
        self._awaited: Counter[str] = Counter()
        self._errors: dict[str, Message] = {}
        self._phases: dict[str, str] = {}
        self._warming_since: dict[str, float] = {}
        self.warming_up_seconds = 0.0  # the longest of all tasks

    def __bool__(self) -> bool:
        return bool(self.terminations)

    def record(self, node: int, message: Message | None) -> bool:
        """Keep a report of a task's end (None: the node's loss); return whether it was one."""
        if message is None or message.kind == "death":
            self._ended.append((node, message))
            if message is not None and self._awaited[message["task"]]:
                self._forgive(message["task"])
        elif message.kind == "error":
            self._errors[message["from"]] = message
        elif message.kind == "phase":
            self._phases[message["from"]] = message["name"]
            if message["name"] == WARMING_UP:
                self._warming_since[message["from"]] = time.monotonic()
        else:
            return False
        return True

    def mark_ready(self, task: str) -> None:
        """Note that a task has started."""
        self._ready.add(task)
        self._phases.pop(task, None)
        self.warming_up_seconds = max(self.warming_up_seconds, time.monotonic() - self._warming_since.pop(task, math.inf))

    def replaced(self, task: str) -> None:
        """Note that a task restarts alone: its end, known or pending, is no failure."""
        self._awaited[task] += 1
        if any(death is not None and death["task"] == task for _, death in self._unforgiven):
            self._forgive(task)

    def _forgive(self, task: str) -> None:
        self._awaited[task] -= 1
        self._forgiven.append(next(ended for ended in self._unforgiven if ended[1] is not None and ended[1]["task"] == task))
        self._ready.discard(task)
        self._errors.pop(task, None)
        self._phases.pop(task, None)

    @property
    def _unforgiven(self) -> list[tuple[int, Message | None]]:
        return [ended for ended in self._ended if not any(ended is each for each in self._forgiven)]

    def only_of(self, tasks: Collection[str]) -> bool:
        """Return whether only these tasks have failed."""
        return all(each.death is not None and each.death["task"] in tasks for each in self.terminations)

    def is_ready(self, task: str) -> bool:
        """Return whether a task is ready and has not ended since."""
        gone = any(death["task"] == task for _, death in self._unforgiven if death is not None)
        return task in self._ready and not gone and not self._awaited[task]

    def phase_of(self, task: str) -> str | None:
        """Return the last phase that a starting task reported."""
        return self._phases.get(task)

    @property
    def deaths(self) -> list[Message]:
        """The deaths of tasks so far, in order of arrival."""
        return [death for _, death in self._ended if death is not None]

    @property
    def terminations(self) -> list[Termination]:
        """The unexpected ends of tasks and nodes, in order of arrival."""
        expected = self._ready.intersection(self._dispensable)
        return [
            Termination(node, death, death is not None and is_victim(death, self._errors.get(death["task"])))
            for node, death in self._unforgiven
            if death is None or death["task"] not in expected
        ]

    @property
    def only_victims(self) -> bool:
        """Whether every failure is a victim's."""
        return all(each.victim for each in self.terminations)

    @property
    def certain(self) -> bool:
        """Whether a failure is surely a cause: of a node, or of a killed, ready task."""
        return any(
            not each.victim
            and (each.death is None or (each.death["task"] in self._ready and each.death["signal"] not in (None, "SIGABRT")))
            for each in self.terminations
        )

    def reported_cause(self) -> TrainerError | None:
        """Return a usage error or a taken port, which no other failure can cause."""
        for error in self._errors.values():
            if error["exit_code"] == UsageError.exit_code:
                return UsageError(error["message"])
        for error in self._errors.values():
            if error["errno"] == errno.EADDRINUSE:
                return AddressInUseError(error["message"])
        return None

    def death_of(self, node: int, name: str, death: Message) -> TaskDiedError:
        """Return the error for a task's end on the node `name`, with the end of its log."""
        task: str = death["task"]
        how = _ending_of(death)
        doing = f" while {self._phases[task]}" if task in self._phases else ""
        error = self._errors.get(task)
        why = f" ({error['type']}: {error['message'].splitlines()[0] if error['message'] else ''})" if error else ""
        out_of_memory: str | None = None if error is None else error.get("out_of_memory")
        if out_of_memory is not None:
            first = "".join(out_of_memory.splitlines()[:1])
            starved = worker_in(first) or task
            how, why = f"{how}, as {'it' if starved == task else starved} ran out of memory", f" ({first}): {REMEDY}"
        elif death["signal"] == "SIGKILL" and death.get("oom_kills"):
            why = f"; the kernel has killed for want of memory meanwhile, so that it ran out of memory, most likely: {REMEDY}"
        elif not why and (last := _last_words(death)) is not None:
            why = f'; its log ends with "{last}"'
        log = "\n".join(f"  {line}" for line in death["tail"])
        text = f"task {task} on {name} {how}{doing}{why}"
        died = TaskDiedError(f"{text}\nlast lines of its log:\n{log}" if log else text, task, node)
        died.stalled = error is not None and error["type"] == StalledRunError.__name__
        return died


def _last_words(death: Message) -> str | None:
    """Return the last line of a log that explains a signal; a lost peer explains SIGABRT only."""
    said = next((line.strip() for line in reversed(death["tail"]) if not _SAYS_NOTHING.match(line)), None)
    if said is None or death["signal"] is None or (death["signal"] != "SIGABRT" and indicates_peer_loss(said)):
        return None
    return said if len(said) <= MOST_QUOTED_CHARACTERS else f"{said[:MOST_QUOTED_CHARACTERS]}…"


def _ending_of(death: Message) -> str:
    if death["signal"]:
        return f"was killed by {death['signal']}"
    return "could not be started" if death["code"] is None else f"ended with exit code {death['code']}"
