"""The tasks of one node: each started in a process group of its own, reaped in the order of death, and ended within a time limit.

A task is a child of this process, or is forked by the machine's fork server where there is one (`fork_server.py`), which then waits for it
and kills it in our stead. A task may be prestarted before it is known which task of the cluster it will be, so that its framework loads
meanwhile. The death of a prestarted process that is no task yet is no failure: the task is then started normally.

Only the main thread starts tasks, because the parent-death signal follows the thread that forked. One other thread reaps whatever
dies, so that the order of deaths is the kernel's. A death is reported after everything that the task had sent.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...core.liveness.memory_exhaustion import kernel_oom_kills
from ...core.process import kill_group, process_state, python
from ...engine.protocol.error_report import error_message
from ...engine.protocol.messages import Message, ReusableBuffer, Stream
from ..stacks.collect import InspectedTask
from .deaths import Death, death_of, never_started
from .fork_server_connection import ForkServerConnection
from .task_environment import task_environment

__all__ = ["Supervisor"]

KILLED_SECONDS = 5.0
"""How long the kernel is given to end a process; one that waits for a disk may take longer."""

FOREIGN_SECONDS = 0.01
"""How long a child of this process that is no task has to be awaited by whoever has started it, before deaths are looked at again."""


@dataclass
class _Child:
    """`number` counts the starts. `pid`: None until the fork server has said it. `process`: None of one that is forked.

    `early_log`: where a task that began as a spare writes until it has moved to its `log`. `usable`: a spare that still may be taken.

    `environment` is what it was started with. `ended` gets its death, once it has been reaped; where it never was a process,
    why it could not be started, or None where it was to end before. `stacks`: what it writes its stacks to when it is asked to. `theirs`:
    its end of the stream, until it has it.
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
    ended: queue.SimpleQueue[tuple[Death, resource.struct_rusage | None] | OSError | None] = field(default_factory=queue.SimpleQueue)

    @property
    def forked(self) -> bool:
        """Whether the fork server is to kill and reap it."""
        return self.process is None


class Supervisor:
    """Starts and ends the tasks of one node. `on_message` and `on_death` are called from a thread of each task, `on_pid` from any.

    The arrays of a message are there for `on_message` until it returns. `on_pid` hears which process a task, or what may become one, is.
    `fork_server` forks tasks that need no environment of their own but for the folder of temporary files.
    """

    def __init__(
        self,
        on_message: Callable[[str, Message], None],
        on_death: Callable[[Death, resource.struct_rusage | None], None],
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
            fork_server.listen(self)

    def start(self, name: str, log: Path, environment: Mapping[str, str]) -> None:
        """Start one task, its output appended to `log`; one that cannot be started is reported as ended. Call from the main thread."""
        try:
            self._spawn(name, log, environment, None)
        except OSError as error:
            self._tell_unstarted(name, error)

    def prestart(self, folder: Path, environment: Mapping[str, str], prepare: Message) -> None:
        """Start a task that has no name yet and send it `prepare`; it writes to a file in `folder` meanwhile. Call from the main thread."""
        self._spares += 1
        early = folder / f"spare-{self._spares}.early"
        try:
            self._spawn(early.stem, early, environment, early).stream.send(prepare)
        except OSError:
            return  # it has died, or could not even be started, and is not taken then

    def claim(self, name: str, log: Path, environment: Mapping[str, str]) -> Path | None:
        """Make a living spare the task `name`; return the file that it writes to until it moves to `log`.

        None: none lives that was started in this environment, which is not changed later: frameworks read it when they like.
        """
        with self._changed:
            child = next((child for child in self._children.values() if child.usable and child.environment == environment), None)
            if child is None or child.early_log is None:
                return None
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                log.touch()
            except OSError:
                return None  # whoever starts the task then reports it
            child.name, child.log, child.usable, child.spare = name, log, False, False
            return child.early_log

    def pid_of(self, task: str) -> int | None:
        """Return the process number of a task that has not been reaped; None where there is no such one, or it is not known yet."""
        with self._changed:
            child = self._named(task)
            return None if child is None else child.pid

    def _named(self, task: str) -> _Child | None:
        """Return the task of a name; call with the lock held. Whoever is to have a name waits for the end of the one before."""
        return next((child for child in self._children.values() if child.name == task), None)

    def spares(self) -> dict[str, int]:
        """Return the process numbers of the spares that can be taken, by their names."""
        with self._changed:
            return {child.name: child.pid for child in self._children.values() if child.usable and child.pid is not None}

    def spare_environments(self) -> list[Mapping[str, str]]:
        """Return the environments of the spares that can be taken."""
        with self._changed:
            return [child.environment for child in self._children.values() if child.usable]

    def kill_unclaimed(self) -> None:
        """Kill the spares that nobody has taken."""
        with self._changed:
            for child in self._children.values():
                if child.spare and not child.reaped:
                    child.usable = False
                    self._kill(child)

    def _spawn(self, name: str, log: Path, environment: Mapping[str, str], early_log: Path | None) -> _Child:
        """Start a process, or have it end before it began, which its own thread tells. Raises OSError where there is not even that."""
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
        """Make what keeps a process from being started within the block its end; call with the lock held."""
        try:
            yield
        except OSError as error:
            self._discard(child, error)

    def _discard(self, child: _Child, why: OSError | None) -> None:
        """A child never becomes a process; its own thread tells `why`, where it was not to. Call with the lock held."""
        child.reaped = True
        child.usable = False
        child.theirs.close()
        child.stream.cut()
        child.ended.put(why)

    def _tell_unstarted(self, name: str, error: OSError) -> None:
        """Report a task that could not be started as one that has ended by an error of its own."""
        self._on_message(name, error_message(error, peer_lost=False))
        with self._changed:
            self._deaths += 1
            order = self._deaths
        self._on_death(never_started(name, order), None)

    def _fork(self, child: _Child) -> bool:
        """Have the fork server start a task, if there is one that can."""
        folder = child.environment.get("TMPDIR")
        if self._fork_server is None or folder is None or task_environment(os.environ, Path(folder), None) != child.environment:
            return False
        with child.log.open("ab") as output:
            descriptors = [child.theirs.fileno(), output.fileno(), *([] if child.stacks is None else [child.stacks])]
            return self._fork_server.fork(child.number, folder, descriptors)

    def _execute(self, child: _Child) -> None:
        """Start a task as a child of this process."""
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

    def send(self, task: str, message: Message) -> None:
        """Send a message to a task; one to a task that is gone is dropped, since its death is reported anyway."""
        with self._changed:
            child = self._named(task)
        if child is None:
            return
        try:
            child.stream.send(message)
        except OSError:
            return

    def kill_task(self, task: str) -> None:
        """Kill the process group of a task, where it lives."""
        with self._changed:
            child = self._named(task)
            if child is not None and not child.reaped:
                self._kill(child)

    def end_task(self, task: str) -> None:
        """Kill a task and return when its end has been reported, so that another may take its name."""
        self.kill_task(task)
        with self._changed:
            self._changed.wait_for(lambda: self._named(task) is None, timeout=10.0)

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
            for child in self._children.values():
                if not child.reaped and not (keep_spares and child.usable):
                    self._kill(child)

    def _kill(self, child: _Child) -> None:
        """Kill a task's process group; one that is still to be forked is none, and dies once it is."""
        if child.process is not None:
            kill_group(child.process.pid)
            return
        if self._fork_server is None:
            return  # it has died with the server, and is about to be reported
        self._fork_server.kill(child.number)
        if child.pid is None and not child.reaped:
            self._discard(child, None)

    def state_of(self, task: str) -> str:
        """Return the kernel's state letter of a task (``R S D T Z``), or ``gone``."""
        with self._changed:
            child = self._named(task)
        if child is None:
            return "gone"
        if (pid := child.pid) is None:
            return "D"  # it waits for the fork server
        return process_state(pid) or "gone"

    @contextmanager
    def inspected(self, tasks: Collection[str]) -> Iterator[list[InspectedTask]]:
        """Give those of the tasks that live, for as long as the block lasts, to whoever finds out where they stand."""
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
        """Report what a task says, then its death."""
        self._read(child)
        end = child.ended.get()
        if isinstance(end, OSError):
            if not child.spare:
                self._tell_unstarted(child.name, end)
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
            tasks = [child.process.pid for child in self._children.values() if child.process is not None and not child.reaped]
        if found is not None and found.si_pid in tasks:
            return found.si_pid
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
            kill_group(dead)  # while it is a zombie its group number cannot belong to anybody else
            pid, status, usage = os.wait4(dead, 0)
            with self._changed:
                child = next((child for child in self._children.values() if child.pid == pid and not child.forked), None)
                if child is None:
                    continue
                assert child.process is not None
                child.process.returncode = os.waitstatus_to_exitcode(status)
            self._on_end(child, status, usage)

    def forked(self, number: int, pid: int) -> None:
        """Hear from the fork server which process a task is; see `ForkedTasksListener`."""
        with self._changed:
            child = self._children.get(number)
            if child is None or child.reaped:
                return  # it was to be killed before it was forked, and the server has heard that too
            child.pid = pid
            child.theirs.close()
            name = child.name
        self._on_pid(name, pid)

    def ended(self, number: int, status: int, usage: resource.struct_rusage) -> None:
        """Hear from the fork server how a task has ended."""
        with self._changed:
            child = self._children.get(number)
        if child is not None and not child.reaped:
            self._on_end(child, status, usage)

    def refused(self, number: int) -> None:
        """Start by itself what the fork server could not fork."""
        with self._changed:
            child = self._children.get(number)
            if child is None or child.reaped:
                return
            with self._ending_unstarted(child):
                self._execute(child)
            pid, name = child.pid, child.name
        if pid is not None:
            self._on_pid(name, pid)

    def fork_server_lost(self) -> None:
        """Start by itself what the server had still to fork; what it had forked is killed with it by the kernel."""
        with self._changed:
            self._fork_server, children = None, [child for child in self._children.values() if child.forked and not child.reaped]
            for child in children:
                if child.pid is None:
                    with self._ending_unstarted(child):
                        self._execute(child)
        for child in children:
            if child.pid is None:
                continue  # it could not be started
            if child.forked:
                _await_end(child.pid)
                self._on_end(child, signal.SIGKILL, None)
            else:
                self._on_pid(child.name, child.pid)

    def _on_end(self, child: _Child, status: int, usage: resource.struct_rusage | None) -> None:
        """Note a death, as wait4(2) has told it, in its order."""
        with self._changed:
            child.reaped = True
            child.usable = False
            self._deaths += not child.spare
            order = self._deaths
        if child.early_log is not None:
            _rescue(child.early_log, child.log)
        assert child.pid is not None
        child.ended.put((death_of(child.name, child.pid, order, status, usage, child.oom_kills_before), usage))
        child.stream.cut()  # what has arrived can still be read; a process of the task's that outlives it is not waited for


def _await_end(pid: int) -> None:
    """Wait for the end of a process that the kernel has been told to kill, and that another process is to reap."""
    deadline = time.monotonic() + KILLED_SECONDS
    while process_state(pid) not in (None, "Z", "X") and time.monotonic() < deadline:
        time.sleep(0.01)


def _rescue(early_log: Path, log: Path) -> None:
    """Append to a dead task's log what it wrote before it could move there; once it has moved, the early file is gone."""
    if early_log == log or not early_log.exists():
        return
    with log.open("ab") as file:
        file.write(early_log.read_bytes())
    early_log.unlink()
