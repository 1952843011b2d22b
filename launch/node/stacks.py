"""Stack traces of tasks: collected by agents, and written by the driver as untrusted text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ...core.console import one_line, shown
from ...core.liveness import DUMP_SIGNAL, WorkingThread, answers_signal, working_thread
from ...engine.protocol.messages import MAX_STACK_CHARACTERS, WireMessage
from ...engine.protocol.node_messages import FindStacks, Stacks

STACKS = "logs/stacks.txt"  # the file of a run directory with the stacks of every stall
MAX_BYTES = 16 * 2**20  # size limit of that file: a stall of a hundred tasks takes a megabyte, and a run may stall many times
MAX_PLACES = 4
MAX_NAMES = 6
MAX_CHARACTERS = 200
_FRAMES = (re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$', re.MULTILINE), re.compile(r"^    (.+) \((.+):(\d+)\)$", re.MULTILINE))
"""Frames of faulthandler (file, line, function) and py-spy (function, file, line)."""


@dataclass(frozen=True, slots=True)
class TaskStack:
    """The stacks of a task's threads, the working one first, or the `problem`."""

    text: str
    problem: str | None = None

    @property
    def place(self) -> str | None:
        """Return the working thread's innermost Python frame (file, line, function), if any."""
        faulthandler, spy = (frame.search(self.text) for frame in _FRAMES)
        if faulthandler is not None:
            file, line, function = faulthandler.groups()
        elif spy is not None:
            function, file, line = spy.groups()
        else:
            return None
        file = one_line(file)
        short = file if len(file) <= MAX_CHARACTERS else f"…{file[-MAX_CHARACTERS:]}"
        return f"{short}:{line[:9]} ({one_line(function)[:MAX_CHARACTERS]})"


def describe_places(stacks: Mapping[str, TaskStack]) -> str:
    """Describe where the tasks are, the smallest groups first; empty if unknown."""
    tasks_at: dict[str, list[str]] = {}
    for task, stack in stacks.items():
        if (place := stack.place) is not None:
            tasks_at.setdefault(place, []).append(task)
    groups = sorted(tasks_at.items(), key=lambda group: len(group[1]))
    texts = [f"{_names(tasks)} {'stands' if len(tasks) == 1 else 'stand'} at {place}" for place, tasks in groups[:MAX_PLACES]]
    if len(groups) > MAX_PLACES:
        texts.append(f"others at {len(groups) - MAX_PLACES} more places")
    return "; ".join(texts)


def _names(tasks: Sequence[str]) -> str:
    more = len(tasks) - MAX_NAMES
    return ", ".join(tasks[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def odd_one_out(stacks: Mapping[str, TaskStack]) -> str | None:
    """Return the only task of its role that is elsewhere than at least two others, if any."""
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
    """Append stacks to the file of a run directory, unless it is too large. Raises OSError."""
    path = run / STACKS
    path.parent.mkdir(mode=0o700, exist_ok=True)
    parts = [f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {one_line(occasion)}\n"]
    for task, stack in stacks.items():
        parts.append(f"\n== {task}: {one_line(stack.problem)}\n" if stack.problem is not None else f"\n== {task}\n{shown(stack.text)}")
    text = "".join([*parts, "\n"])
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        if file.tell() + len(text) > MAX_BYTES:
            text = f"{parts[0]}(omitted: this file is large enough)\n\n" if file.tell() <= MAX_BYTES else ""
        file.write(text)


class StackRequests:
    """Numbered requests for stacks, sent by `send`; `on_answer` gets answers not awaited."""

    def __init__(self, send: Callable[[int, WireMessage], None]) -> None:
        self.on_answer: Callable[[Mapping[str, TaskStack]], None] | None = None
        self.stacks: dict[str, TaskStack] = {}
        self._send = send
        self._count = 0
        self._pending: dict[int, int] = {}

    def request(self, node: int, tasks: Sequence[str], *, awaited: bool) -> None:
        """Request the stacks of a node's tasks; `awaited` ones are added to `stacks`."""
        self._count += 1
        if awaited:
            self._pending[self._count] = node
        self._send(node, FindStacks(self._count, tasks))

    def add_answer(self, answer: Stacks) -> None:
        """Take a node's answer."""
        stacks = {task: TaskStack(stack.text, stack.problem) for task, stack in answer.stacks.items()}
        if self._pending.pop(answer.number, None) is not None:
            self.stacks |= stacks
        elif self.on_answer is not None:
            self.on_answer(stacks)

    @property
    def pending(self) -> set[int]:
        """The nodes whose answers are pending."""
        return set(self._pending.values())

    def give_up(self) -> None:
        """Stop waiting for answers."""
        self._pending.clear()


SPY_SECONDS = 5.0  # time limit of py-spy for all tasks: it reads a process in hundredths of a second, large ones in a second or two
SIGNAL_SECONDS = 1.0  # time limit for a task to answer the signal; its handler needs milliseconds once it runs
QUIET_SECONDS = 0.06  # an answer is complete when nothing was added to it for this long
TICK_SECONDS = 0.02
COLLECT_SECONDS = SPY_SECONDS + SIGNAL_SECONDS + 1.0  # upper bound of `collect_stacks`
MAX_CHARACTERS_TOGETHER = 8 * MAX_STACK_CHARACTERS  # limit of all stacks of a node, which have to fit in one message
_SECTION = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+|\d+)\b", re.MULTILINE)  # a thread's first line, in either notation


@dataclass(frozen=True, slots=True)
class InspectedTask:
    """A task: pid, the kernel's state letter, and the descriptor of the file for its stacks."""

    name: str
    pid: int
    state: str
    written: int | None


def find_py_spy() -> str | None:
    """Return the path of py-spy: on PATH, or next to this interpreter."""
    installed = Path(sysconfig.get_path("scripts")) / "py-spy"
    return shutil.which("py-spy") or (str(installed) if os.access(installed, os.X_OK) else None)


def collect_stacks(tasks: Sequence[InspectedTask], spy: str | None) -> dict[str, dict[str, str | None]]:
    """Return each task's ``text``, the working thread first, or ``problem``; raises nothing."""
    limit = min(MAX_STACK_CHARACTERS, MAX_CHARACTERS_TOGETHER // max(len(tasks), 1))
    texts, problems = _by_spy(tasks, spy) if spy is not None else ({}, {})
    answered, unanswered = _by_signal([task for task in tasks if task.name not in texts])
    texts |= answered
    stacks: dict[str, dict[str, str | None]] = {}
    for task in tasks:
        working = working_thread(_read(task.written, 0))
        if task.name in texts:
            stacks[task.name] = {"text": _cut(_working_first(texts[task.name], working), limit), "problem": None}
        else:
            reasons = [reasons_of[task.name] for reasons_of in (unanswered, problems) if task.name in reasons_of]
            stacks[task.name] = {"text": "", "problem": "; ".join(reasons) or "is gone"}
    return stacks


def _by_spy(tasks: Sequence[InspectedTask], spy: str) -> tuple[dict[str, str], dict[str, str]]:
    deadline = time.monotonic() + SPY_SECONDS
    started: dict[str, subprocess.Popen[bytes]] = {}
    texts, problems = {}, {}
    for task in tasks:
        how = ["--nonblocking"] if task.state in "TtD" else []
        command = [spy, "dump", "--full-filenames", *how, "--pid", str(task.pid)]
        try:
            started[task.name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            problems[task.name] = f"py-spy cannot be run: {error.strerror}"
    for name, process in started.items():
        try:
            output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problems[name] = f"py-spy has found nothing within {SPY_SECONDS:g} s"
            continue
        text = output.decode(errors="replace")
        if _SECTION.search(text):  # its exit code may have been reaped by the supervisor
            texts[name] = text
        else:
            lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
            problems[name] = f"py-spy has found nothing ({'; '.join(lines)[:300]})"
    return texts, problems


def _by_signal(tasks: Sequence[InspectedTask]) -> tuple[dict[str, str], dict[str, str]]:
    offsets: dict[InspectedTask, int] = {}
    problems = {}
    for task in tasks:
        problem = _cannot_answer(task)
        if problem is None and task.written is not None and DUMP_SIGNAL is not None:
            offsets[task] = os.fstat(task.written).st_size
            try:
                os.kill(task.pid, DUMP_SIGNAL)
            except ProcessLookupError:
                del offsets[task]
                problem = "is gone"
        if problem is not None:
            problems[task.name] = problem
    texts = dict(_answers(offsets))
    for task in offsets:
        if task.name not in texts:
            problems[task.name] = f"has not answered within {SIGNAL_SECONDS:g} s (state {task.state})"
    return texts, problems


def _cannot_answer(task: InspectedTask) -> str | None:
    if task.state in "Tt":
        return "is stopped by a signal, and cannot say where it stands"
    if task.state == "D":
        return "waits in the kernel without interruption (state D), and cannot say where it stands"
    if task.state not in "RS":
        return "is gone"
    return None if task.written is not None and answers_signal(task.pid) else "does not say where it stands: it has not begun to"


def _answers(offsets: Mapping[InspectedTask, int]) -> Iterator[tuple[str, str]]:
    """Yield each task's complete answer: what it has written after its `asked` offset."""
    waiting = {task: (offset, time.monotonic()) for task, offset in offsets.items()}
    deadline = time.monotonic() + SIGNAL_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(TICK_SECONDS)
        for task, (size, since) in list(waiting.items()):
            now = os.fstat(task.written).st_size if task.written is not None else 0
            if now != size:
                waiting[task] = now, time.monotonic()
            elif now > offsets[task] and time.monotonic() - since >= QUIET_SECONDS:
                del waiting[task]
                yield task.name, _read(task.written, offsets[task])


def _read(descriptor: int | None, offset: int) -> str:
    if descriptor is None:
        return ""
    return os.pread(descriptor, os.fstat(descriptor).st_size - offset, offset).decode(errors="replace")


def _working_first(text: str, working: WorkingThread | None) -> str:
    begins = [match.start() for match in _SECTION.finditer(text)]
    sections = [text[begin:end].rstrip() + "\n" for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    def rank(section: str) -> bool:
        match = _SECTION.match(section)
        number = match[1] if match is not None else ""
        return working is None or number not in working

    return "\n".join(sorted(sections, key=rank))


def _cut(text: str, limit: int) -> str:
    note = "\n… (cut)\n"
    return text if len(text) <= limit else text[: limit - len(note)] + note
