"""The tasks of one node: start, messages and end, each in its own process group.

A task is a child of this process or of the machine's fork server (`fork_server.py`), which then reaps and kills it. A spare is prestarted
before its role is known, so that its framework loads early; its death is no failure. Only the main thread starts tasks, as the parent-death
signal follows the forking thread. One thread reaps, in the kernel's order of deaths; a death is reported after the task's messages.
"""

from __future__ import annotations

import errno
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.liveness import kernel_oom_kills
from ...core.process import kill_group, process_state, python
from ...engine.protocol.messages import Message, ReusableBuffer, Stream, WireMessage
from ...engine.protocol.node_messages import Death, Error, Prepare
from .fork_server_client import ForkServerConnection
from .scratch import task_environment
from .stacks import InspectedTask

LOG_TAIL_LINES = 25
Usage = resource.struct_rusage | None  # None: unknown


def _death(child: _Child, order: int, status: int, usage: Usage) -> Death:
    killed = os.WIFSIGNALED(status)
    oom_kills = kernel_oom_kills() if killed else None
    if oom_kills is not None:
        oom_kills = None if child.oom_kills_before is None else max(0, oom_kills - child.oom_kills_before)
    return Death(
        task=child.name,
        pid=child.pid,
        code=None if killed else os.WEXITSTATUS(status),
        signal=signal.Signals(os.WTERMSIG(status)).name if killed else None,
        order=order,
        cpu_seconds=None if usage is None else usage.ru_utime + usage.ru_stime,
        max_rss_bytes=None if usage is None else usage.ru_maxrss * 1024,
        tail=[],
        oom_kills=oom_kills,
    )


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError as error:
        return [f"(the log {log} could not be read: {error.strerror})"]


KILLED_SECONDS = 5.0  # time limit for the kernel to end a process; waiting for a disk may take longer
FOREIGN_SECONDS = 0.01  # interval of looking for deaths while a child that is no task is not reaped by the code that started it


@dataclass
class _Child:
    """A process that is, or may become, a task; its `number` counts the starts.

    `pid`: None until the fork server has sent it. `process`: None if forked. `early_log`: a former spare's output until it moves to `log`.
    `usable`: a spare that can be claimed. `ended` gets the death, the error of the start, or None if ended before it started. `stacks`: the
    file for its stacks. `theirs`: its end of the stream until it is started.
    """

    number: int
    name: str
    environment: Mapping[str, str]
    stream: Stream
    log: Path
    theirs: socket.socket
    process: subprocess.Popen[bytes] | None = None
    pid: int | None = None
    reaped: bool = False
    stacks: int | None = None
    early_log: Path | None = None
    usable: bool = False
    spare: bool = False
    oom_kills_before: int | None = field(default_factory=kernel_oom_kills)
    ended: queue.SimpleQueue[tuple[Death, Usage] | OSError | None] = field(default_factory=queue.SimpleQueue)

    @property
    def forked(self) -> bool:
        """Whether the fork server kills and reaps it."""
        return self.process is None


class Supervisor:
    """Starts and ends the tasks of one node.

    `on_message` and `on_death` are called from a thread of each task, `on_pid` (also for spares) from any. A message's arrays are valid
    until `on_message` returns. `fork_server` forks tasks whose environment differs from this process's only in the temporary folder.
    """

    def __init__(
        self,
        on_message: Callable[[str, Message], None],
        on_death: Callable[[Death, Usage], None],
        on_pid: Callable[[str, int], None] = lambda name, pid: None,
        fork_server: ForkServerConnection | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._on_pid = on_pid
        self._fork_server = fork_server
        self._starts = 0
        self._children: dict[int, _Child] = {}
        self._changed = threading.Condition()
        self._deaths = 0
        self._spares = 0
        threading.Thread(target=self._reap, name="reaper", daemon=True).start()
        if fork_server is not None:
            fork_server.listen(self._on_fork_event)

    def start(self, name: str, log: Path, environment: Mapping[str, str]) -> None:
        """Start a task that appends to `log`; report a failure as its death. Main thread only."""
        try:
            self._spawn(name, log, environment, None)
        except OSError as error:
            self._report_unstarted(name, error)

    def prestart(self, folder: Path, environment: Mapping[str, str], prepare: Prepare) -> None:
        """Start a spare with `prepare`, which writes to `folder` until claimed. Main thread only."""
        self._spares += 1
        early = folder / f"spare-{self._spares}.early"
        with suppress(OSError):  # it has died or was not started, and is not claimed then
            self._spawn(early.stem, early, environment, early).stream.send(prepare)

    def claim(self, name: str, log: Path, environment: Mapping[str, str]) -> Path | None:
        """Make a spare of this environment the task `name`; return its present log, or None."""
        with self._changed:
            child = next((child for child in self._children.values() if child.usable and child.environment == environment), None)
            if child is None or child.early_log is None:
                return None
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                log.touch()
            except OSError:
                return None  # `start` then reports it
            child.name, child.log, child.usable, child.spare = name, log, False, False
            return child.early_log

    def pid_of(self, task: str) -> int | None:
        """Return a task's pid; None if it was reaped or the pid is unknown yet."""
        with self._changed:
            child = self._named(task)
            return None if child is None else child.pid

    def _named(self, task: str) -> _Child | None:
        """Return a task by name, which is unique until its end; call with the lock held."""
        return next((child for child in self._children.values() if child.name == task), None)

    def spares(self) -> dict[str, int]:
        """Return the pids of the spares that can be claimed, by name."""
        with self._changed:
            return {child.name: child.pid for child in self._children.values() if child.usable and child.pid is not None}

    def spare_environments(self) -> list[Mapping[str, str]]:
        """Return the environments of the spares that can be claimed."""
        with self._changed:
            return [child.environment for child in self._children.values() if child.usable]

    def kill_unclaimed(self) -> None:
        """Kill the spares that were not claimed."""
        with self._changed:
            for child in self._children.values():
                if child.spare and not child.reaped:
                    child.usable = False
                    self._kill(child)

    def _spawn(self, name: str, log: Path, environment: Mapping[str, str], early_log: Path | None) -> _Child:
        """Start a process and its thread, which reports failures. Raises OSError without a thread."""
        is_spare = early_log is not None
        with ExitStack() as undone:
            ours, theirs = socket.socketpair()
            undone.callback(theirs.close)
            with ours:
                stream = Stream(ours.makefile("rb"), ours.makefile("wb"))
            undone.callback(stream.close)
            log.parent.mkdir(parents=True, exist_ok=True)
            stacks = os.memfd_create("stacks") if sys.platform == "linux" else None
            if stacks is not None:
                undone.callback(os.close, stacks)
            self._starts += 1
            child = _Child(
                self._starts, name, environment, stream, log, theirs, stacks=stacks, early_log=early_log, usable=is_spare, spare=is_spare
            )
            try:
                threading.Thread(target=self._follow, args=(child,), name=f"read-{name}", daemon=True).start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, str(error)) from error
            undone.pop_all()
        with self._changed:
            self._children[child.number] = child
            with self._ending_unstarted(child):
                if not self._fork(child):
                    self._execute(child)
            pid = child.pid
        if pid is not None:
            self._on_pid(name, pid)
        return child

    @contextmanager
    def _ending_unstarted(self, child: _Child) -> Iterator[None]:
        """End a child whose start raises OSError within the block; call with the lock held."""
        try:
            yield
        except OSError as error:
            self._discard(child, error)

    def _discard(self, child: _Child, error: OSError | None) -> None:
        """End a child that never starts; its thread reports an `error`. Call with the lock held."""
        child.reaped = True
        child.usable = False
        child.theirs.close()
        child.stream.cut()
        child.ended.put(error)

    def _report_unstarted(self, name: str, error: OSError) -> None:
        self._on_message(name, Message.from_typed(Error.from_exception(error, peer_lost=False)))
        with self._changed:
            self._deaths += 1
            order = self._deaths
        self._on_death(Death(name, None, None, None, order, None, None, []), None)

    def _fork(self, child: _Child) -> bool:
        folder = child.environment.get("TMPDIR")
        if self._fork_server is None or folder is None or task_environment(os.environ, Path(folder), None) != child.environment:
            return False
        with child.log.open("ab") as output:
            descriptors = [child.theirs.fileno(), output.fileno(), *([] if child.stacks is None else [child.stacks])]
            return self._fork_server.fork(child.number, folder, descriptors)

    def _execute(self, child: _Child) -> None:
        descriptors = [child.theirs.fileno(), *([] if child.stacks is None else [child.stacks])]
        command = python("crosstrain.engine.task", "--fd", str(child.theirs.fileno()), "--parent", str(os.getpid()))
        command += [] if child.stacks is None else ["--stacks", str(child.stacks)]
        with child.theirs, child.log.open("ab") as output:
            child.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                env=dict(child.environment),
                start_new_session=True,
            )
        child.pid = child.process.pid
        self._changed.notify_all()

    def send(self, task: str, message: Message | WireMessage) -> None:
        """Send a message to a task; dropped if the task is gone, as its death is reported."""
        with self._changed:
            child = self._named(task)
        if child is not None:
            with suppress(OSError):
                child.stream.send(message)

    def kill_task(self, task: str) -> None:
        """Kill the process group of a task, if it is alive."""
        with self._changed:
            child = self._named(task)
            if child is not None and not child.reaped:
                self._kill(child)

    def end_task(self, task: str) -> None:
        """Kill a task and wait until its death was reported, so that its name can be reused."""
        self.kill_task(task)
        with self._changed:
            self._changed.wait_for(lambda: self._named(task) is None, timeout=10.0)

    def alive(self) -> list[str]:
        """Return the names of the tasks, without spares, that have not been reaped."""
        with self._changed:
            return [child.name for child in self._children.values() if not child.spare]

    def stop(self, grace_seconds: float, *, keep_spares: bool = False) -> None:
        """Wait for the tasks, then kill the rest; return when all are reaped."""
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
        """Kill the process groups of all tasks, and of spares that are not kept."""
        with self._changed:
            for child in self._children.values():
                if not child.reaped and not (keep_spares and child.usable):
                    self._kill(child)

    def _kill(self, child: _Child) -> None:
        if child.process is not None:
            kill_group(child.process.pid)
            return
        if self._fork_server is None:
            return  # it has died with the server, and will be reported
        self._fork_server.kill(child.number)
        if child.pid is None and not child.reaped:
            self._discard(child, None)

    def state_of(self, task: str) -> str:
        """Return the kernel's state letter of a task (``R S D T Z``), or ``gone``."""
        with self._changed:
            child = self._named(task)
        if child is None:
            return "gone"
        if child.pid is None:
            return "D"  # waits for the fork server
        return process_state(child.pid) or "gone"

    @contextmanager
    def inspected(self, tasks: Collection[str]) -> Iterator[list[InspectedTask]]:
        """Yield the living tasks of these, with descriptors of their stacks open within the block."""
        with self._changed:
            children = [child for child in self._children.values() if child.name in tasks and child.pid is not None and not child.reaped]
            written = [None if child.stacks is None else os.dup(child.stacks) for child in children]
        try:
            yield [
                InspectedTask(child.name, child.pid, self.state_of(child.name), descriptor)
                for child, descriptor in zip(children, written, strict=True)
                if child.pid is not None
            ]
        finally:
            for descriptor in written:
                if descriptor is not None:
                    os.close(descriptor)

    def _follow(self, child: _Child) -> None:
        self._read(child)
        end = child.ended.get()
        if isinstance(end, OSError):
            if not child.spare:
                self._report_unstarted(child.name, end)
        elif end is not None and not child.spare:
            self._on_death(*end)
        with self._changed:
            del self._children[child.number]
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
                child.usable = False  # a spare sends nothing but why it ends
                spare = child.spare
            if not spare:
                self._on_message(child.name, message)

    def _next_dead(self) -> int | None:
        """Wait for a child's death; return a task's pid. Others, such as py-spy, have their reapers."""
        dead_child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        with self._changed:
            tasks = [child.process.pid for child in self._children.values() if child.process is not None and not child.reaped]
        if dead_child is not None and dead_child.si_pid in tasks:
            return dead_child.si_pid
        dead = next((pid for pid in tasks if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None), None)
        if dead is None:
            time.sleep(FOREIGN_SECONDS)
        return dead

    def _reap(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(not child.forked and not child.reaped for child in self._children.values()))
            dead = self._next_dead()
            if dead is None:
                continue
            kill_group(dead)  # while it is a zombie, its group number is not reused
            pid, status, usage = os.wait4(dead, 0)
            with self._changed:
                child = next((child for child in self._children.values() if child.pid == pid and not child.forked), None)
                if child is None:
                    continue
                assert child.process is not None
                child.process.returncode = os.waitstatus_to_exitcode(status)
            self._on_end(child, status, usage)

    def _on_fork_event(self, event: Mapping[str, Any] | None) -> None:
        if event is None:
            self._on_fork_server_lost()
        elif "forked" in event:
            self._on_forked(event["forked"], event["pid"])
        elif "refused" in event:
            self._on_refused(event["refused"])
        else:
            self._on_ended(event["ended"], event["status"], resource.struct_rusage(event["usage"]))

    def _on_forked(self, number: int, pid: int) -> None:
        with self._changed:
            child = self._children.get(number)
            if child is None or child.reaped:
                return  # it was killed before it was forked; the server also got the request
            child.pid = pid
            child.theirs.close()
            name = child.name
        self._on_pid(name, pid)

    def _on_ended(self, number: int, status: int, usage: resource.struct_rusage) -> None:
        with self._changed:
            child = self._children.get(number)
        if child is not None and not child.reaped:
            self._on_end(child, status, usage)

    def _on_refused(self, number: int) -> None:
        """Start as a child what the fork server could not fork."""
        with self._changed:
            child = self._children.get(number)
            if child is None or child.reaped:
                return
            with self._ending_unstarted(child):
                self._execute(child)
            pid, name = child.pid, child.name
        if pid is not None:
            self._on_pid(name, pid)

    def _on_fork_server_lost(self) -> None:
        """Start pending tasks as children; the kernel kills those that the server had forked."""
        with self._changed:
            self._fork_server, children = None, [child for child in self._children.values() if child.forked and not child.reaped]
            for child in children:
                if child.pid is None:
                    with self._ending_unstarted(child):
                        self._execute(child)
        for child in children:
            if child.pid is None:
                continue  # its start failed
            if child.forked:
                _await_end(child.pid)
                self._on_end(child, signal.SIGKILL, None)
            else:
                self._on_pid(child.name, child.pid)

    def _on_end(self, child: _Child, status: int, usage: Usage) -> None:
        with self._changed:
            child.reaped = True
            child.usable = False
            self._deaths += not child.spare
            order = self._deaths
        if child.early_log is not None:
            _rescue(child.early_log, child.log)
        child.ended.put((_death(child, order, status, usage), usage))
        child.stream.cut()  # received data can still be read; other processes of the task are not waited for


def _await_end(pid: int) -> None:
    deadline = time.monotonic() + KILLED_SECONDS
    while process_state(pid) not in (None, "Z", "X") and time.monotonic() < deadline:
        time.sleep(0.01)


def _rescue(early_log: Path, log: Path) -> None:
    if early_log == log or not early_log.exists():
        return
    with log.open("ab") as file:
        file.write(early_log.read_bytes())
    early_log.unlink()
