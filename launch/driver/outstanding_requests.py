"""What the driver has asked of its nodes and leading tasks and is not answered yet: an answer that nobody waits for is none."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ...engine.protocol.messages import Message

__all__ = ["Asked"]

_OF_NODES = frozenset({"hello", "ports", "sampled", "states", "stopped"})
_OF_COMMANDS = frozenset({"done", "steps", "evaluated", "predicted", "calibrated", "state_begin", "state_part", "state_end"})
_OF_THE_FIRST = frozenset({"steps", "evaluated", "state_begin", "state_part", "state_end"})
"""What the first leading task alone reports."""

_DURING = {"evaluated": "evaluate", "predicted": "predict", "calibrated": "calibrate"}
"""The command that an answer is part of; steps are reported during any, as each but ``train`` begins by making the cluster quiescent."""


@dataclass(slots=True)
class _Command:
    """A command that a leading task has not done yet. `answered`: the evaluation, or prediction, that it asks for has arrived."""

    message: Message
    answered: bool = False


@dataclass(slots=True)
class _State:
    """A state that the first leading task has copied and is to bring."""

    sequence: int
    begun: bool = False


class Asked:
    """Keeps what is asked, and says of an answer what is wrong with its time. Each leading task does its commands one after another."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._owed: Counter[tuple[int | str, str]] = Counter((node, "hello") for node in nodes)
        self._commands: dict[str, deque[_Command]] = {}
        self._states: deque[_State] = deque()
        self._trains = False

    def of_node(self, node: int, kind: str) -> None:
        """A node has been asked for one message of a kind."""
        self._owed[node, kind] += 1

    def started(self, tasks: Iterable[str], leaders: Iterable[str]) -> None:
        """Tasks are being started, of which some lead; what was asked of others before is forgotten."""
        for task in tasks:
            self._owed[task, "ready"] = 1
        self._commands = {leader: deque() for leader in leaders}
        self._states.clear()
        self._trains = False

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
        return None

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
        if kind in ("evaluated", "predicted"):
            part = "split" if kind == "evaluated" else "start"
            if command.answered or message[part] != asked[part]:
                return "that nobody asked for"
            command.answered = True
        return None

    def _wrong_with_end(self, task: str, command: _Command) -> str | None:
        """A command is done: return what is missing of it, or None; then the next one is being done."""
        first = task == next(iter(self._commands))
        kind = command.message.kind
        if not command.answered and (kind == "predict" or (kind == "evaluate" and first)):
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
