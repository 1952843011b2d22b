"""Requests that the driver has sent to nodes and leading tasks and that are unanswered; an answer to no such request is refused.

What nodes send without being asked is limited in time and number too, so that no node can keep the driver busy or fill its disk.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ...engine.protocol.messages import Message

__all__ = ["OutstandingRequests"]

_OF_NODES = frozenset({"hello", "leaving", "peers_probed", "ports", "probe_port", "sampled", "states", "stacks", "stopped"})
_OF_COMMANDS = frozenset(
    {"done", "steps", "evaluated", "predicted", "decoded", "translated", "calibrated", "state_begin", "state_part", "state_end"}
)
_OF_THE_FIRST = frozenset({"steps", "evaluated", "state_begin", "state_part", "state_end"})
"""What the first leading task alone reports."""

_ONCE_ENDING = frozenset({"log", "trace"})
"""What a node sends between being asked to stop and having stopped."""

_MOST_REMARKS = {"phase": 100, "error": 10, "death": 1, "worker_stalled": 1000, "compile_timed": 1}
"""How often something may be said of a task from its start to its end: a start has half a dozen phases."""

MOST_SIGNS = 100_000
"""Of life, for one order to translate: with one a second, more than a day."""

_SPARE_SAMPLES = 20
"""How many more samples than its interval allows a node may send: one may follow another at once, and a machine may be busy."""

_DURING = {"evaluated": "evaluate", "predicted": "predict", "decoded": "decode", "translated": "translate", "calibrated": "calibrate"}
"""The command that an answer is part of; steps are reported during any, as each but ``train`` begins by making the cluster quiescent."""


_ANSWERS_OF = {
    "evaluated": (("sequence", "sequence"), ("split", "split")),
    "predicted": (("start", "start"),),
    "decoded": (("start", "start"),),
    "translated": (("order", "sequence"),),
}
"""Answers of which a command has exactly one, apart from heartbeats: their fields, each with the command's field of the same value."""

_ANSWERED_BY_ALL = frozenset({"predict", "decode", "translate"})


@dataclass(slots=True)
class _Command:
    """A command that a leading task has not done yet.

    `answered`: what it asks for has arrived. `signs`: so often the task has said that it is at it.
    """

    message: Message
    answered: bool = False
    signs: int = 0


@dataclass(slots=True)
class _State:
    """A state that the first leading task has copied and is to bring."""

    sequence: int
    begun: bool = False


class OutstandingRequests:
    """Keeps what is asked, and says of an answer what is wrong with its time. Each leading task does its commands one after another.

    `may_leave`: whatever has started the nodes may be about to end one, whose agent then says so, once.
    """

    def __init__(self, nodes: Iterable[int], *, may_leave: bool = False) -> None:
        self._owed: Counter[tuple[int | str, str]] = Counter()
        self._may_leave = may_leave
        self._commands: dict[str, deque[_Command]] = {}
        self._states: deque[_State] = deque()
        self._trains = False
        self._remarks: Counter[tuple[str, str]] = Counter()
        self._samples: Counter[int] = Counter()
        self._sampling: dict[int, tuple[float, float]] = {}
        for node in nodes:
            self._await_greeting(node)

    def _await_greeting(self, node: int) -> None:
        self._owed[node, "hello"] = 1
        self._owed[node, "leaving"] = int(self._may_leave)

    def of_new_agent(self, node: int) -> None:
        """Another agent takes a node's place: it owes its greeting, and nothing that the one before was asked."""
        for key in [key for key in self._owed if key[0] == node]:
            del self._owed[key]
        self._await_greeting(node)
        self._samples[node] = 0
        self._sampling.pop(node, None)

    def of_samples(self, node: int, interval_seconds: float | None) -> None:
        """A node takes samples from now on; None: it takes those only that it is asked for."""
        if interval_seconds is not None:
            self._sampling.setdefault(node, (time.monotonic(), interval_seconds))

    def of_node(self, node: int, kind: str) -> None:
        """A node has been asked for one message of a kind."""
        self._owed[node, kind] += 1
        self._samples[node] -= kind == "sampled"

    def started(self, tasks: Iterable[str], leaders: Iterable[str]) -> None:
        """Tasks are being started, of which some lead; what was asked of others before is forgotten."""
        for task in tasks:
            self._owed[task, "ready"] = 1
        self._commands = {leader: deque() for leader in leaders}
        self._states.clear()
        self._trains = False
        self._remarks.clear()

    def started_again(self, task: str) -> None:
        """A task is being started by itself, in the place of one that has ended, or is being ended: then it may still say that."""
        self._owed[task, "ready"] = 1
        self._remarks[task, "phase"] = self._remarks[task, "error"] = 0
        self._remarks[task, "death"] -= 1

    def of_leader(self, leader: str, command: Message) -> None:
        """A leading task has been sent a command."""
        self._commands[leader].append(_Command(command))
        self._trains = self._trains or command.kind == "train"

    def wrong_with(self, node: int, message: Message) -> str | None:
        """Return why a message, which is sound in itself, may not come now, or None; then it is what was asked for."""
        kind = message.kind
        if kind in _OF_NODES or kind == "ready":
            key = (message["from"] if kind == "ready" else node, kind)
            if not self._owed[key]:
                return f"a message {kind!r} that nobody asked for"
            self._owed[key] -= 1
        elif kind in _OF_COMMANDS:
            wrong = self._wrong_with_answer(message)
            return None if wrong is None else f"a message {kind!r} {wrong}"
        elif kind in _ONCE_ENDING:
            return None if self._owed[node, "stopped"] else f"a message {kind!r} before it was asked to stop"
        elif kind in _MOST_REMARKS:
            task = message["task"] if kind == "death" else message["from"]
            if kind == "worker_stalled" and task != next(iter(self._commands), None):
                return f"a message {kind!r} from {task}, which does not report that"
            self._remarks[task, kind] += 1
            return f"more messages {kind!r} of {task} than there can be" if self._remarks[task, kind] > _MOST_REMARKS[kind] else None
        elif kind == "sample":
            self._samples[node] += 1
            return f"more messages {kind!r} than its interval allows" if self._samples[node] > self._most_samples(node) else None
        return None

    def _most_samples(self, node: int) -> float:
        if node not in self._sampling:
            return _SPARE_SAMPLES
        since, interval_seconds = self._sampling[node]
        return _SPARE_SAMPLES + 2 * (time.monotonic() - since) / interval_seconds

    def _wrong_with_answer(self, message: Message) -> str | None:
        kind, task = message.kind, message["from"]
        commands = self._commands.get(task)
        if commands is None or (kind in _OF_THE_FIRST and task != next(iter(self._commands))):
            return f"from {task}, which does not report that"
        if kind.startswith("state_"):
            return self._wrong_with_state(message)
        if not commands or (kind == "steps" and not self._trains):
            return "that answers no command"
        command = commands[0]
        asked = command.message
        if kind == "done":
            if (message["sequence"], message["command"]) != (asked["sequence"], asked.kind):
                return f"about command {message['sequence']}, where {asked['sequence']} ({asked.kind}) is the next to be done"
            return self._wrong_with_end(task, command)
        if kind in _DURING and asked.kind != _DURING[kind]:
            return f"during the command {asked.kind!r}"
        if kind in _ANSWERS_OF:
            if command.answered or any(message[said] != asked[in_command] for said, in_command in _ANSWERS_OF[kind]):
                return "that nobody asked for"
            if kind == "decoded" and not message["complete"]:
                command.signs += 1
                return "more often than there can be" if command.signs > MOST_SIGNS else None
            command.answered = True
        return None

    def _wrong_with_end(self, task: str, command: _Command) -> str | None:
        """A command is done: return what is missing of it, or None; then the next one is being done."""
        first = task == next(iter(self._commands))
        kind = command.message.kind
        if not command.answered and (kind in _ANSWERED_BY_ALL or (kind == "evaluate" and first)):
            return f"of a command {kind!r} without its answer"
        self._commands[task].popleft()
        if kind == "state" and first:
            self._states.append(_State(command.message["sequence"]))
        return None

    def _wrong_with_state(self, message: Message) -> str | None:
        state = self._states[0] if self._states else None
        begins = message.kind == "state_begin"
        if state is None or state.sequence != message["sequence"] or state.begun == begins:
            return "of a state that nobody asked for, or out of its turn"
        state.begun = True
        if message.kind == "state_end":
            self._states.popleft()
        return None
