"""The stacks of a node's tasks, as its agent finds them: by py-spy where it is installed, else by the signal at which each writes its own.

Bounded in time and size, and nothing is raised: what could not be found out of a task is said in its place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.liveness.stack_dump import DUMP_SIGNAL, WorkingThread, answers_signal, working_thread
from ...engine.protocol.messages import MOST_STACK_CHARACTERS

__all__ = ["COLLECT_SECONDS", "InspectedTask", "collect_stacks", "find_py_spy"]

SPY_SECONDS = 5.0
"""What py-spy may take for all tasks together: it reads a process in hundredths of a second, large ones in a second or two."""

SIGNAL_SECONDS = 1.0
"""How long a task may take to answer the signal; its handler needs milliseconds once it runs."""

QUIET_SECONDS = 0.06
"""An answer is whole when nothing was added to it for so long."""

TICK_SECONDS = 0.02

COLLECT_SECONDS = SPY_SECONDS + SIGNAL_SECONDS + 1.0
"""What `collect_stacks` takes at most, with some room."""

MOST_CHARACTERS_TOGETHER = 8 * MOST_STACK_CHARACTERS
"""Of the stacks of all tasks of a node, which have to fit in one message."""

_SECTION = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+|\d+)\b", re.MULTILINE)
"""The line that begins a thread's stack, in either notation."""


@dataclass(frozen=True, slots=True)
class InspectedTask:
    """A task: its process, the kernel's letter for its state, and a descriptor of the file that it writes its stacks to, or None."""

    name: str
    pid: int
    state: str
    written: int | None


def find_py_spy() -> str | None:
    """Return the program py-spy: on PATH, or beside this interpreter."""
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)


def collect_stacks(tasks: Sequence[InspectedTask], spy: str | None) -> dict[str, dict[str, str | None]]:
    """Return for each task the ``text`` of its stacks, that of the thread at work first, and the ``problem`` where there is none.

    `spy` is the program py-spy, where there is one.
    """
    limit = min(MOST_STACK_CHARACTERS, MOST_CHARACTERS_TOGETHER // max(len(tasks), 1))
    found, problems = _by_spy(tasks, spy) if spy is not None else ({}, {})
    texts = found | _by_signal([task for task in tasks if task.name not in found], problems)
    working = {task.name: working_thread(_read(task.written, 0)) for task in tasks}
    return {
        task.name: {
            "text": _cut(_working_first(texts[task.name], working[task.name]), limit) if task.name in texts else "",
            "problem": None if task.name in texts else problems.get(task.name, "is gone"),
        }
        for task in tasks
    }


def _by_spy(tasks: Sequence[InspectedTask], spy: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return what py-spy finds, and why it does not; it reads the memory of a process that is stopped, or waits in the kernel, too."""
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
        if _SECTION.search(text):  # its exit code may have been taken by whoever reaps this process's children
            texts[name] = text
        else:
            lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
            problems[name] = f"py-spy has found nothing ({'; '.join(lines)[:300]})"
    return texts, problems


def _by_signal(tasks: Sequence[InspectedTask], problems: dict[str, str]) -> dict[str, str]:
    """Return what tasks write at the signal. `problems` gets why others do not, behind what is there already."""
    asked: dict[InspectedTask, int] = {}
    for task in tasks:
        why = _cannot_answer(task)
        if why is None and task.written is not None and DUMP_SIGNAL is not None:
            asked[task] = os.fstat(task.written).st_size
            try:
                os.kill(task.pid, DUMP_SIGNAL)
            except ProcessLookupError:
                del asked[task]
                why = "is gone"
        if why is not None:
            _add(problems, task.name, why)
    answered = dict(_answers(asked))
    for task in asked:
        if task.name not in answered:
            _add(problems, task.name, f"has not answered within {SIGNAL_SECONDS:g} s (state {task.state})")
    return answered


def _cannot_answer(task: InspectedTask) -> str | None:
    if task.state in "Tt":
        return "is stopped by a signal, and cannot say where it stands"
    if task.state == "D":
        return "waits in the kernel without interruption (state D), and cannot say where it stands"
    if task.state not in "RS":
        return "is gone"
    return None if task.written is not None and answers_signal(task.pid) else "does not say where it stands: it has not begun to"


def _answers(asked: Mapping[InspectedTask, int]) -> Iterator[tuple[str, str]]:
    """Yield each task's answer: what it has written behind its `asked` offset, once it is whole."""
    waiting = {task: (offset, time.monotonic()) for task, offset in asked.items()}
    deadline = time.monotonic() + SIGNAL_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(TICK_SECONDS)
        for task, (size, since) in list(waiting.items()):
            now = os.fstat(task.written).st_size if task.written is not None else 0
            if now != size:
                waiting[task] = now, time.monotonic()
            elif now > asked[task] and time.monotonic() - since >= QUIET_SECONDS:
                del waiting[task]
                yield task.name, _read(task.written, asked[task])


def _read(descriptor: int | None, offset: int) -> str:
    if descriptor is None:
        return ""
    return os.pread(descriptor, os.fstat(descriptor).st_size - offset, offset).decode(errors="replace")


def _working_first(text: str, working: WorkingThread | None) -> str:
    """Put the stack of the thread at work before the others; where none is marked they stay as they are."""
    begins = [found.start() for found in _SECTION.finditer(text)]
    sections = [text[begin:end].rstrip() + "\n" for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    def rank(section: str) -> bool:
        found = _SECTION.match(section)
        number = found[1] if found is not None else ""
        return working is None or number not in working

    return "\n".join(sorted(sections, key=rank))


def _cut(text: str, limit: int) -> str:
    note = "\n… (cut)\n"
    return text if len(text) <= limit else text[: limit - len(note)] + note


def _add(problems: dict[str, str], name: str, why: str) -> None:
    problems[name] = f"{why}; {problems[name]}" if name in problems else why
