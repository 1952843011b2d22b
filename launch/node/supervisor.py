"""The tasks of one node: each started in a process group of its own, reaped in the order of death, and ended within a time limit.

A task may be prestarted before it is known which task of the cluster it will be, so that its framework loads meanwhile. The death of a
prestarted process that is no task yet is no failure: the task is then started normally.

Only the main thread starts tasks, because the parent-death signal follows the thread that forked. One other thread reaps whatever
dies, so that the order of deaths is the kernel's. A death is reported after everything that the task had sent.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...core.memory_exhaustion import kernel_oom_kills
from ...core.process import python
from ...engine.protocol.messages import Message, ReusableBuffer, Stream
from ..stacks.collect import InspectedTask

__all__ = ["Death", "Supervisor", "tail"]

LOG_TAIL_LINES = 25

FOREIGN_SECONDS = 0.01
"""How long a child of this process that is no task has to be awaited by whoever has started it, before deaths are looked at again."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a task ended. `order` counts the deaths on the node; `signal` is None where the task exited by itself.

    CPU seconds are the kernel's, from wait4(2), with all the task's own children. `oom_kills` is how many processes of the machine the
    kernel has killed for want of memory while the task lived; None where it does not say, or the task ended by itself.
    """

    task: str
    pid: int
    code: int | None
    signal: str | None
    order: int
    cpu_seconds: float
    max_rss_bytes: int
    oom_kills: int | None = None


@dataclass
class _Child:
    """`early_log`: where a task that began as a spare writes until it has moved to its `log`. `usable`: a spare that still may be taken.

    `environment` is what it was started with. `ended` gets its death, once it has been reaped. `stacks`: what it writes its stacks to when
    it is asked to.
    """

    name: str
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    stream: Stream
    log: Path
    stacks: int | None = None
    early_log: Path | None = None
    usable: bool = False
    spare: bool = False
    oom_kills_before: int | None = field(default_factory=kernel_oom_kills)
    ended: queue.SimpleQueue[tuple[Death, resource.struct_rusage]] = field(default_factory=queue.SimpleQueue)


class Supervisor:
    """Starts and ends the tasks of one node. `on_message` and `on_death` are called from a thread of each task.

    The arrays of a message are there for `on_message` until it returns.
    """

    def __init__(self, on_message: Callable[[str, Message], None], on_death: Callable[[Death, resource.struct_rusage], None]) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._children: dict[int, _Child] = {}
        self._changed = threading.Condition()
        self._deaths = 0
        self._spares = 0
        threading.Thread(target=self._reap, name="reaper", daemon=True).start()

    def start(self, name: str, log: Path, environment: Mapping[str, str]) -> int:
        """Start one task, its output appended to `log`; return its pid. Call from the main thread."""
        return self._spawn(name, log, environment, None).process.pid

    def prestart(self, folder: Path, environment: Mapping[str, str], prepare: Message) -> None:
        """Start a task that has no name yet and send it `prepare`; it writes to a file in `folder` meanwhile. Call from the main thread."""
        self._spares += 1
        early = folder / f"spare-{self._spares}.early"
        child = self._spawn(early.stem, early, environment, early)
        try:
            child.stream.send(prepare)
        except OSError:
            return  # it has died, and is not taken then

    def claim(self, name: str, log: Path, environment: Mapping[str, str]) -> tuple[int, Path] | None:
        """Make a living spare the task `name`; return its pid and the file that it writes to until it moves to `log`.

        None: none lives that was started in this environment, which is not changed later: frameworks read it when they like.
        """
        with self._changed:
            child = next((child for child in self._children.values() if child.usable and child.environment == environment), None)
            if child is None or child.early_log is None:
                return None
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            child.name, child.log, child.usable, child.spare = name, log, False, False
            return child.process.pid, child.early_log

    def spares(self) -> dict[str, int]:
        """Return the process numbers of the spares that can be taken, by their names."""
        with self._changed:
            return {child.name: pid for pid, child in self._children.items() if child.usable}

    def spare_environments(self) -> list[Mapping[str, str]]:
        """Return the environments of the spares that can be taken."""
        with self._changed:
            return [child.environment for child in self._children.values() if child.usable]

    def kill_unclaimed(self) -> None:
        """Kill the spares that nobody has taken."""
        with self._changed:
            for pid, child in self._children.items():
                if child.spare:
                    child.usable = False
                    _kill_group(pid)

    def _spawn(self, name: str, log: Path, environment: Mapping[str, str], early_log: Path | None) -> _Child:
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        stacks = os.memfd_create("stacks") if sys.platform == "linux" else None
        command = python("crosstrain.engine.task", "--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
        command += [] if stacks is None else ["--stacks", str(stacks)]
        with theirs, log.open("ab") as output, self._changed:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), *([] if stacks is None else [stacks])],
                env=dict(environment),
                start_new_session=True,
            )
            stream = Stream(ours.makefile("rb"), ours.makefile("wb"))
            is_spare = early_log is not None
            child = _Child(name, environment, process, stream, log, stacks, early_log, usable=is_spare, spare=is_spare)
            self._children[process.pid] = child
            self._changed.notify_all()
        ours.close()
        threading.Thread(target=self._follow, args=(child,), name=f"read-{name}", daemon=True).start()
        return child

    def send(self, task: str, message: Message) -> None:
        """Send a message to a task; one to a task that is gone is dropped, since its death is reported anyway."""
        with self._changed:
            child = next((child for child in self._children.values() if child.name == task), None)
        if child is None:
            return
        try:
            child.stream.send(message)
        except OSError:
            return

    def kill_task(self, task: str) -> None:
        """Kill the process group of a task, where it lives."""
        with self._changed:
            for pid, child in self._children.items():
                if child.name == task and child.process.returncode is None:
                    _kill_group(pid)

    def end_task(self, task: str) -> None:
        """Kill a task and return when its end has been reported, so that another may take its name."""
        self.kill_task(task)
        with self._changed:
            self._changed.wait_for(lambda: all(child.name != task for child in self._children.values()), timeout=10.0)

    def alive(self) -> list[str]:
        """Return the names of the tasks that have not been reaped; spares are none."""
        with self._changed:
            return [child.name for child in self._children.values() if not child.spare]

    def stop(self, grace_seconds: float, *, keep_spares: bool = False) -> None:
        """Wait for every task to end by itself, then kill the groups of those that did not. Returns when all are reaped.

        Spares are killed at once, or stay for the tasks that are started next.
        """
        if not keep_spares:
            self.kill_unclaimed()

        def all_reaped() -> bool:
            return not any(not (keep_spares and child.usable) for child in self._children.values())

        with self._changed:
            self._changed.wait_for(all_reaped, timeout=grace_seconds)
        self.kill(keep_spares=keep_spares)
        with self._changed:
            self._changed.wait_for(all_reaped, timeout=10.0)

    def kill(self, *, keep_spares: bool = False) -> None:
        """Kill the process group of every task that still lives, and of every spare that is not kept."""
        with self._changed:
            for pid, child in self._children.items():
                if child.process.returncode is None and not (keep_spares and child.usable):
                    _kill_group(pid)

    def state_of(self, task: str) -> str:
        """Return the kernel's state letter of a task (``R S D T Z``), or ``gone``."""
        with self._changed:
            pid = next((pid for pid, child in self._children.items() if child.name == task), None)
        if pid is None:
            return "gone"
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    @contextmanager
    def inspected(self, tasks: Collection[str]) -> Iterator[list[InspectedTask]]:
        """Give those of the tasks that live, for as long as the block lasts, to whoever finds out where they stand."""
        with self._changed:
            children = [child for child in self._children.values() if child.name in tasks and child.process.returncode is None]
            written = [None if child.stacks is None else os.dup(child.stacks) for child in children]
        try:
            yield [
                InspectedTask(child.name, child.process.pid, self.state_of(child.name), descriptor)
                for child, descriptor in zip(children, written, strict=True)
            ]
        finally:
            for descriptor in written:
                if descriptor is not None:
                    os.close(descriptor)

    def _follow(self, child: _Child) -> None:
        """Report what a task says, then its death."""
        self._read(child)
        death, usage = child.ended.get()
        if not child.spare:
            self._on_death(death, usage)
        with self._changed:
            if self._children.get(death.pid) is child:
                del self._children[death.pid]
            if child.stacks is not None:
                os.close(child.stacks)
                child.stacks = None
            self._changed.notify_all()

    def _read(self, child: _Child) -> None:
        room = ReusableBuffer()
        while True:
            try:
                message = child.stream.receive(room)
            except OSError:
                return
            if message is None:
                return
            with self._changed:
                child.usable = False  # a spare has nothing to say but why it ends
                spare = child.spare
            if not spare:
                self._on_message(child.name, message)

    def _next_dead(self) -> int | None:
        """Wait for a child to die; return its pid, None where it was no task and none has died meanwhile.

        One that looks at a task's stacks is such a child: whoever has started it awaits it, and must find it.
        """
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        with self._changed:
            tasks = [pid for pid, child in self._children.items() if child.process.returncode is None]
        if found is not None and found.si_pid in tasks:
            return found.si_pid
        dead = next((pid for pid in tasks if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None), None)
        if dead is None:
            time.sleep(FOREIGN_SECONDS)
        return dead

    def _reap(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(child.process.returncode is None for child in self._children.values()))
            dead = self._next_dead()
            if dead is None:
                continue
            _kill_group(dead)  # while it is a zombie its group number cannot belong to anybody else
            pid, status, usage = os.wait4(dead, 0)
            with self._changed:
                child = self._children.get(pid)
                if child is None:
                    continue
                killed = os.WIFSIGNALED(status)
                child.process.returncode = -os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)
                child.usable = False
                self._deaths += not child.spare
                order = self._deaths
            if child.early_log is not None:
                _rescue(child.early_log, child.log)
            death = Death(
                task=child.name,
                pid=pid,
                code=None if killed else os.WEXITSTATUS(status),
                signal=signal.Signals(os.WTERMSIG(status)).name if killed else None,
                order=order,
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                max_rss_bytes=usage.ru_maxrss * 1024,
                oom_kills=_oom_kills_since(child.oom_kills_before) if killed else None,
            )
            child.ended.put((death, usage))
            child.stream.cut()  # what has arrived can still be read; a process of the task's that outlives it is not waited for


def _kill_group(pid: int) -> None:
    """Kill what is left of a task's process group, if anything is."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _oom_kills_since(before: int | None) -> int | None:
    now = kernel_oom_kills()
    return None if now is None or before is None else max(0, now - before)


def _rescue(early_log: Path, log: Path) -> None:
    """Append to a dead task's log what it wrote before it could move there; once it has moved, the early file is gone."""
    if early_log == log or not early_log.exists():
        return
    with log.open("ab") as file:
        file.write(early_log.read_bytes())
    early_log.unlink()


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """Return the last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return [f"(the log {log} could not be read: {error.strerror})"]
