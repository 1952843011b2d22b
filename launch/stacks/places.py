"""Stacks of tasks in the driver: in which line each task stands, what a person reads of that, and the file that keeps them all.

Texts are those of nodes, and may be anything; they are bounded by the protocol, and shown, not obeyed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ...core.untrusted.console import one_line, shown

__all__ = ["STACKS", "TaskStack", "append_stacks", "describe_places", "odd_one_out"]

STACKS = "logs/stacks.txt"
"""The file of a run directory with the stacks of every stall."""

MOST_BYTES = 16 * 2**20
"""Of that file: a stall of a hundred tasks is a megabyte, and a run that is restarted may stall again and again."""

MOST_PLACES = 4
MOST_NAMES = 6
MOST_CHARACTERS = 200

_FRAMES = (re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$', re.MULTILINE), re.compile(r"^    (.+) \((.+):(\d+)\)$", re.MULTILINE))
"""A frame as faulthandler writes it (file, line, function), and as py-spy does (function, file, line)."""


@dataclass(frozen=True, slots=True)
class TaskStack:
    """The stacks of a task's threads, that of the one at work first; `problem` says why there are none."""

    text: str
    problem: str | None = None

    @property
    def place(self) -> str | None:
        """Return where the thread at work stands: the innermost Python frame's file, line and function. None where no frame is told."""
        faulthandler, spy = (frame.search(self.text) for frame in _FRAMES)
        if faulthandler is not None:
            file, line, function = faulthandler.groups()
        elif spy is not None:
            function, file, line = spy.groups()
        else:
            return None
        file = one_line(file)
        short = file if len(file) <= MOST_CHARACTERS else f"…{file[-MOST_CHARACTERS:]}"
        return f"{short}:{line[:9]} ({one_line(function)[:MOST_CHARACTERS]})"


def describe_places(stacks: Mapping[str, TaskStack]) -> str:
    """Say where the tasks stand, those first of which the fewest stand in one place; empty where that is not known of any."""
    together: dict[str, list[str]] = {}
    for task, stack in stacks.items():
        if (place := stack.place) is not None:
            together.setdefault(place, []).append(task)
    groups = sorted(together.items(), key=lambda group: len(group[1]))
    told = [f"{_names(tasks)} {'stands' if len(tasks) == 1 else 'stand'} at {place}" for place, tasks in groups[:MOST_PLACES]]
    if len(groups) > MOST_PLACES:
        told.append(f"others at {len(groups) - MOST_PLACES} more places")
    return "; ".join(told)


def _names(tasks: Sequence[str]) -> str:
    more = len(tasks) - MOST_NAMES
    return ", ".join(tasks[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def odd_one_out(stacks: Mapping[str, TaskStack]) -> str | None:
    """Return the task that alone stands elsewhere than all others of its role, which wait for it; None where there is no such one.

    Of two it cannot be said which waits for which.
    """
    roles: dict[str, dict[str, str]] = {}
    for task, stack in stacks.items():
        roles.setdefault(task.rpartition("-")[0], {})[task] = stack.place or ""
    for places in roles.values():
        counts = Counter(places.values())
        alone = [task for task, place in places.items() if counts[place] == 1]
        if len(places) > 2 and len(counts) == 2 and len(alone) == 1 and all(places.values()):
            return alone[0]
    return None


def append_stacks(run: Path, occasion: str, stacks: Mapping[str, TaskStack]) -> None:
    """Add the stacks of an occasion to the file of a run directory, as long as that is not too large. Raises OSError."""
    path = run / STACKS
    path.parent.mkdir(mode=0o700, exist_ok=True)
    parts = [f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {one_line(occasion)}\n"]
    for task, stack in stacks.items():
        parts.append(f"\n== {task}: {one_line(stack.problem)}\n" if stack.problem is not None else f"\n== {task}\n{shown(stack.text)}")
    text = "".join([*parts, "\n"])
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        if file.tell() + len(text) > MOST_BYTES:
            text = f"{parts[0]}(omitted: this file is large enough)\n\n" if file.tell() <= MOST_BYTES else ""
        file.write(text)
