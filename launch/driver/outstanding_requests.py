"""Unanswered requests of the driver to nodes and leading tasks; other answers are refused.

Unrequested messages are limited in time and number, so no node can keep the driver busy or fill its disk.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...engine.protocol.task_messages import Command

_OF_THE_FIRST = frozenset({"steps", "evaluated", "state_begin", "state_part", "state_end"})  # only the first leading task reports these
MAX_HEARTBEATS = 100_000  # heartbeats during one translation: more than a day at one a second
_SPARE_SAMPLES = 20  # beyond the interval, as a busy machine may send some in quick succession
# Steps are reported during any command, as each but ``train`` first makes the cluster quiescent.
_DURING = {"evaluated": "evaluate", "predicted": "predict", "decoded": "decode", "translated": "translate", "calibrated": "calibrate"}
_ANSWERS_OF = {  # one answer per command, heartbeats apart; pairs of equal fields in answer and command
    "evaluated": (("sequence", "sequence"), ("split", "split")),
    "predicted": (("start", "start"),),
    "decoded": (("start", "start"),),
    "translated": (("order", "sequence"),),
}
_ANSWERED_BY_ALL = frozenset({"predict", "decode", "translate"})


@dataclass(slots=True)
class _Command:
    message: Command
    answered: bool = False
    heartbeats: int = 0


@dataclass(slots=True)
class _State:
    sequence: int
    begun: bool = False


class OutstandingRequests:
    """Checks whether an answer is due; each leading task does its commands in order."""

    def __init__(self, nodes: Iterable[int], *, may_leave: bool = False) -> None:  # may announce its end, once per agent
        self._owed: Counter[tuple[int | str, str]] = Counter()
        self._may_leave = may_leave
        self._commands: dict[str, deque[_Command]] = {}
        self._states: deque[_State] = deque()
        self._trains = False
        self._remarks: Counter[tuple[int | str, str]] = Counter()
        self._samples: Counter[int] = Counter()
        self._sampling: dict[int, tuple[float, float]] = {}
        for node in nodes:
            self._await_greeting(node)

    def _await_greeting(self, node: int) -> None:
        self._owed[node, "hello"] = 1
        self._owed[node, "leaving"] = int(self._may_leave)

    def reset_agent(self, node: int) -> None:
        """Note a new agent of a node, which owes only its greeting."""
        for counts in (self._owed, self._remarks):
            for key in [key for key in counts if key[0] == node]:
                del counts[key]
        self._await_greeting(node)
        self._samples[node] = 0
        self._sampling.pop(node, None)

    def allow_samples(self, node: int, interval_seconds: float | None) -> None:
        """Note that a node takes samples from now on; None: only requested ones."""
        if interval_seconds is not None:
            self._sampling.setdefault(node, (time.monotonic(), interval_seconds))

    def add_request(self, node: int, kind: str) -> None:
        """Note a request to a node for one message of a kind."""
        self._owed[node, kind] += 1
        self._samples[node] -= kind == "sampled"

    def started(self, tasks: Iterable[str], leaders: Iterable[str]) -> None:
        """Note the start of tasks, some of which lead; earlier requests are dropped."""
        for task in tasks:
            self._owed[task, "ready"] = 1
        self._commands = {leader: deque() for leader in leaders}
        self._states.clear()
        self._trains = False
        self._remarks.clear()

    def started_again(self, task: str) -> None:
        """Note the restart of a single task, whose earlier death may still be reported."""
        self._owed[task, "ready"] = 1
        self._remarks[task, "phase"] = self._remarks[task, "error"] = 0
        self._remarks[task, "death"] -= 1

    def add_command(self, leader: str, command: Command) -> None:
        """Note a command to a leading task."""
        self._commands[leader].append(_Command(command))
        self._trains = self._trains or command.kind == "train"

    def violation_in(self, node: int, message: Any) -> str | None:
        """Return why a valid message may not arrive now; else None, and its request is answered."""
        kind, arrives, owner = message.kind, message.ARRIVES, getattr(message, "task", node)
        if arrives == "requested":
            if not self._owed[owner, kind]:
                return f"a message {kind!r} that nobody asked for"
            self._owed[owner, kind] -= 1
        elif arrives == "command":
            violation = self._violation_in_answer(message)
            return None if violation is None else f"a message {kind!r} {violation}"
        elif arrives == "ending":
            return None if self._owed[node, "stopped"] else f"a message {kind!r} before it was asked to stop"
        elif arrives == "always":
            return None
        elif arrives == "sample":
            self._samples[node] += 1
            return f"more messages {kind!r} than its interval allows" if self._samples[node] > self._most_samples(node) else None
        else:
            if kind == "worker_stalled" and owner != next(iter(self._commands), None):
                return f"a message {kind!r} from {owner}, which does not report that"
            self._remarks[owner, kind] += 1
            return f"more messages {kind!r} of {owner} than there can be" if self._remarks[owner, kind] > arrives else None
        return None

    def _most_samples(self, node: int) -> float:
        if node not in self._sampling:
            return _SPARE_SAMPLES
        since, interval_seconds = self._sampling[node]
        return _SPARE_SAMPLES + 2 * (time.monotonic() - since) / interval_seconds

    def _violation_in_answer(self, message: Any) -> str | None:
        kind, task = message.kind, message.task
        commands = self._commands.get(task)
        if commands is None or (kind in _OF_THE_FIRST and task != next(iter(self._commands))):
            return f"from {task}, which does not report that"
        if kind.startswith("state_"):
            return self._violation_in_state(message)
        if not commands or (kind == "steps" and not self._trains):
            return "that answers no command"
        command = commands[0]
        request = command.message
        if kind == "done":
            if (message.sequence, message.command) != (request.sequence, request.kind):
                return f"about command {message.sequence}, where {request.sequence} ({request.kind}) is the next to be done"
            return self._violation_in_end(task, command)
        if kind in _DURING and request.kind != _DURING[kind]:
            return f"during the command {request.kind!r}"
        if kind in _ANSWERS_OF:
            if command.answered or any(
                getattr(message, in_answer) != getattr(request, in_command) for in_answer, in_command in _ANSWERS_OF[kind]
            ):
                return "that nobody asked for"
            if kind == "decoded" and not message.complete:
                command.heartbeats += 1
                return "more often than there can be" if command.heartbeats > MAX_HEARTBEATS else None
            command.answered = True
        return None

    def _violation_in_end(self, task: str, command: _Command) -> str | None:
        """Return what is missing of a completed command, or None and continue with the next."""
        first = task == next(iter(self._commands))
        kind = command.message.kind
        if not command.answered and (kind in _ANSWERED_BY_ALL or (kind == "evaluate" and first)):
            return f"of a command {kind!r} without its answer"
        self._commands[task].popleft()
        if kind == "state" and first:
            self._states.append(_State(command.message.sequence))
        return None

    def _violation_in_state(self, message: Any) -> str | None:
        state = self._states[0] if self._states else None
        begins = message.kind == "state_begin"
        if state is None or state.sequence != message.sequence or state.begun == begins:
            return "of a state that nobody asked for, or out of its turn"
        state.begun = True
        if message.kind == "state_end":
            self._states.popleft()
        return None
