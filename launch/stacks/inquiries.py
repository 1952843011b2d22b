"""What nodes were asked about where their tasks stand, and what they have answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...engine.protocol.messages import Message
from .places import TaskStack

__all__ = ["Inquiries"]


class Inquiries:
    """Numbers what is asked by `ask`, which gets a node and a message, so that each answer is known for what it is.

    `on_answer` gets the answers that nobody has waited for.
    """

    def __init__(self, ask: Callable[[int, Message], None]) -> None:
        self.on_answer: Callable[[Mapping[str, TaskStack]], None] | None = None
        self.found: dict[str, TaskStack] = {}
        self._ask = ask
        self._asked = 0
        self._awaited: dict[int, int] = {}

    def ask(self, node: int, tasks: Sequence[str], *, awaited: bool) -> None:
        """Ask a node where its tasks stand. What is `awaited` comes to `found`."""
        self._asked += 1
        if awaited:
            self._awaited[self._asked] = node
        self._ask(node, Message("find_stacks", {"number": self._asked, "tasks": list(tasks)}))

    def hear(self, answer: Message) -> None:
        """Take a node's answer, which is sound (`node_messages`)."""
        told = {task: TaskStack(stack["text"], stack["problem"]) for task, stack in answer["stacks"].items()}
        if self._awaited.pop(answer["number"], None) is not None:
            self.found |= told
        elif self.on_answer is not None:
            self.on_answer(told)

    @property
    def awaited(self) -> set[int]:
        """The nodes whose answer is awaited."""
        return set(self._awaited.values())

    def give_up(self) -> None:
        """Nobody waits any more."""
        self._awaited.clear()
