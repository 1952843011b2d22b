"""Which failure to blame where several tasks or nodes have ended: the first cause, and not what it caused.

A task that loses a peer ends because of it, often before the driver hears of the peer. So a task that gives the loss of a peer as its
reason is blamed last. Clocks of different machines are never compared: on one node its own count of deaths decides, between nodes the
order of arrival.
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
from ...core.liveness.memory_exhaustion import REMEDY, worker_in
from ...engine.peer_loss import indicates_peer_loss
from ...engine.protocol.messages import Message

__all__ = ["FORK_SERVER", "AddressInUseError", "Failures", "NodeLostError", "TaskDiedError", "Termination", "first_cause", "is_victim"]


FORK_SERVER = "fork-server"
"""What stands for the name of a task where the process has ended from which tasks were forked, and they with it."""

WARMING_UP = "warming up"
"""The phase of a start in which backends compile."""

MOST_QUOTED_CHARACTERS = 300

_SAYS_NOTHING = re.compile(
    r"""\s*$|\s+File\ "|\s*(?:frame\ )?\#\d|\s*@\s+0x|(?:Current\ t|T)hread\ 0x|Extension\ modules:|\*\*\*\ (?:Begin|End)
    |\[?[IW]\d{4}\ |.{0,60}:\ [IW]\ \S+:\d+|terminate\ called|Stack\ (?:Trace|trace)""",
    re.VERBOSE,
)
"""Lines of a log that tell nobody why its task has ended: stacks, their titles, and what frameworks say at the levels of information and
warning."""


class AddressInUseError(TrainerError):
    """A reserved port was taken by another program before the task could listen on it."""


class _LossError(RunFailedError):
    """Something that a run is made of has ended, on this node."""

    def __init__(self, message: str, task: str | None, node: int) -> None:
        super().__init__(message, task)
        self.node = node


class TaskDiedError(_LossError):
    """A task has ended, and the run has not. `stalled`: because it had seen that others do not get on."""

    stalled = False


class NodeLostError(_LossError):
    """A node has gone, or was cut off; `task` names its agent."""


@dataclass(frozen=True, slots=True)
class Termination:
    """The end of a task, or of a whole node where `death` is None. `victim`: it ended because it had lost a peer."""

    node: int
    death: Message | None
    victim: bool = False

    @property
    def order(self) -> float:
        """Its place among the terminations of its node; the node's own is the last."""
        return float("inf") if self.death is None else self.death["order"]


def is_victim(death: Message, error: Message | None) -> bool:
    """Return whether a task ended because it had lost a peer: `error`, its own report, says so, or else the end of its log.

    What a signal has ended is no victim, whatever it had logged before, save by SIGABRT: so frameworks end themselves.
    """
    if error is not None:
        return bool(error.get("peer_lost"))
    return death["signal"] in (None, "SIGABRT") and any(map(indicates_peer_loss, death["tail"]))


def ended_with_fork_server(death: Message) -> bool:
    """Return whether a task ended because the fork server did: nobody has waited for its process, and so heard its usage of the CPU."""
    return death["pid"] is not None and death["cpu_seconds"] is None


def first_cause(terminations: Sequence[Termination]) -> Termination:
    """Return the one to blame of `terminations`, which are in the order of their arrival; at least one.

    Victims are blamed only where there is nothing else; of equals the first that arrived, or one of its node that ended before it.
    """
    equals = [each for each in terminations if not each.victim] or list(terminations)
    return min((each for each in equals if each.node == equals[0].node), key=lambda each: each.order)


class Failures:
    """What a group of tasks has lost, in the order of arrival, and what its tasks said of that.

    `lost` nodes were so before it began. The death of a `dispensable` task that had been ready is known, and no failure.
    """

    def __init__(self, lost: Iterable[int], dispensable: Collection[str] = ()) -> None:
        self._ended: list[tuple[int, Message | None]] = [(node, None) for node in lost]
        self._dispensable = dispensable
        self._ready: set[str] = set()
        self._forgiven: list[tuple[int, Message | None]] = []
        self._awaited: Counter[str] = Counter()
        self._errors: dict[str, Message] = {}
        self._phases: dict[str, str] = {}
        self._warming_since: dict[str, float] = {}
        self.warming_up_seconds = 0.0  # of the task that took longest, until it was ready

    def __bool__(self) -> bool:
        return bool(self.terminations)

    def record(self, node: int, message: Message | None) -> bool:
        """Keep what a node says of its tasks' ends, or None for its own; return whether it was that."""
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
        """A task has started: what it was doing for that is over."""
        self._ready.add(task)
        self._phases.pop(task, None)
        self.warming_up_seconds = max(self.warming_up_seconds, time.monotonic() - self._warming_since.pop(task, math.inf))

    def replaced(self, task: str) -> None:
        """A task is started anew by itself: its end, which is known or yet to come, is no failure, and it has to start like any other."""
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
        """Whether all that has ended and should not have are some of these tasks."""
        return all(each.death is not None and each.death["task"] in tasks for each in self.terminations)

    def is_ready(self, task: str) -> bool:
        """Whether a task is ready, and neither it nor its node has ended since."""
        gone = any(death["task"] == task for _, death in self._unforgiven if death is not None)
        return task in self._ready and not gone and not self._awaited[task]

    def phase_of(self, task: str) -> str | None:
        """Return what a task that is not ready yet said last that it was doing, if it has said so."""
        return self._phases.get(task)

    @property
    def deaths(self) -> list[Message]:
        """The deaths of tasks so far, in order of arrival."""
        return [death for _, death in self._ended if death is not None]

    @property
    def terminations(self) -> list[Termination]:
        """All that has ended and should not have, in order of arrival."""
        expected = self._ready.intersection(self._dispensable)
        unexpected = [(node, death) for node, death in self._unforgiven if death is None or death["task"] not in expected]
        return [
            Termination(node, death, death is not None and is_victim(death, self._errors.get(death["task"]))) for node, death in unexpected
        ]

    @property
    def certain(self) -> bool:
        """Whether something has ended that no other end can have caused: a node, or a task that was killed after it had been ready."""
        return any(
            not each.victim
            and (each.death is None or (each.death["task"] in self._ready and each.death["signal"] not in (None, "SIGABRT")))
            for each in self.terminations
        )

    def reported_cause(self) -> TrainerError | None:
        """Return what a task said before it ended that no other end can have caused: a wrong request, or a port that was taken."""
        for error in self._errors.values():
            if error["exit_code"] == UsageError.exit_code:
                return UsageError(error["message"])
        for error in self._errors.values():
            if error["errno"] == errno.EADDRINUSE:
                return AddressInUseError(error["message"])
        return None

    def death_of(self, node: int, name: str, death: Message) -> TaskDiedError:
        """Return the error that names a task's end, on the node of this `name`, with the last lines of its log."""
        task: str = death["task"]
        how = _ending_of(death)
        doing = f" while {self._phases[task]}" if task in self._phases else ""
        error = self._errors.get(task)
        why = f" ({error['type']}: {error['message'].splitlines()[0] if error['message'] else ''})" if error else ""
        told: str | None = None if error is None else error.get("out_of_memory")
        if told is not None:
            told = "".join(told.splitlines()[:1])
            starved = worker_in(told) or task
            how, why = f"{how}, as {'it' if starved == task else starved} ran out of memory", f" ({told}): {REMEDY}"
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
    """Return the last line of the log of a task that a signal has ended which may say why; None where there is none.

    A lost peer is why a framework ends itself, by SIGABRT, and not why another signal came.
    """
    said = next((line.strip() for line in reversed(death["tail"]) if not _SAYS_NOTHING.match(line)), None)
    if said is None or death["signal"] is None or (death["signal"] != "SIGABRT" and indicates_peer_loss(said)):
        return None
    return said if len(said) <= MOST_QUOTED_CHARACTERS else f"{said[:MOST_QUOTED_CHARACTERS]}…"


def _ending_of(death: Message) -> str:
    if death["signal"]:
        return f"was killed by {death['signal']}"
    return "could not be started" if death["code"] is None else f"ended with exit code {death['code']}"
