"""Process that imports the framework once, and forks every task of this machine's nodes.

Started as ``python -m crosstrain.launch.node.fork_server``. Its first socket carries the job, then a connection per agent, with the
namespaces and CPU groups of its tasks, or per launcher, with its variables and directory (`conformance/fork_server_pool.py`). Agents
request forks and kills, and get starts and ends. The server ends with the launcher, its tasks with it or their agent's connection.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...core.errors import MissingPackageError
from ...core.job import Job
from ...core.process import die_with_parent, ignore_interrupts, kill_group, python
from ...engine.task import import_framework, run_task
from ..virtual.enter import drop_capabilities, enter
from .fork_server_client import PACKET_BYTES, is_transferred, path_entries, receive_packet

TASK_MODULE = "crosstrain.engine.task"


@dataclass(frozen=True)
class _Launcher:
    """A launcher's connection, and its tasks' variables and directory (None: inherited)."""

    connection: socket.socket
    directory: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def adopt(self) -> None:
        if self.directory is None:
            return
        os.fchdir(self.directory)
        os.close(self.directory)
        entries_here = path_entries(os.environ)
        for name in filter(is_transferred, list(os.environ)):
            del os.environ[name]
        os.environ.update(self.variables)
        sys.path[:] = [*path_entries(self.variables), *(entry for entry in sys.path if entry not in entries_here)]

    def close(self) -> None:
        self.connection.close()
        if self.directory is not None:
            os.close(self.directory)


@dataclass
class _Agent:
    """An agent's connection, namespaces, CPU groups (``enter.py``), and tasks' pids by number."""

    launcher: _Launcher
    connection: socket.socket
    user: int | None
    network: int | None
    cgroups: str
    pid_of: dict[int, int] = field(default_factory=dict)

    def send(self, **message: Any) -> None:
        with suppress(OSError):
            self.connection.send(json.dumps(message).encode())


class ForkServer:
    """Serves launchers and agents; each task's log begins with `written`, the import's output."""

    def __init__(self, control: socket.socket, written: bytes) -> None:
        self._owner = _Launcher(control)
        self._launchers = [self._owner]
        self._written = written
        self._agents: list[_Agent] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._ended, self._wakeup = os.pipe()
        for end in (self._ended, self._wakeup):
            os.set_blocking(end, False)
        self._selector.register(self._ended, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only the descriptor below matters
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the launcher that started this process is gone."""
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            if self._ended in ready:
                _drain(self._ended)
                self._reap()
            for agent in list(self._agents):
                if agent.connection.fileno() in ready:
                    self._serve_agent(agent)
            for launcher in list(self._launchers):
                if launcher.connection.fileno() in ready and not self._admit(launcher):
                    if launcher is self._owner:
                        return
                    self._forget(launcher)

    def _admit(self, launcher: _Launcher) -> bool:
        received = _receive(launcher.connection)
        if received is None:
            return False
        message, (connection, *descriptors) = received
        joined: _Agent | _Launcher
        if "namespaces" in message:
            named = dict(zip(message["namespaces"], descriptors, strict=True))
            joined = _Agent(launcher, socket.socket(fileno=connection), named.get("user"), named.get("network"), message["cgroups"])
            self._agents.append(joined)
        else:
            joined = _Launcher(socket.socket(fileno=connection), descriptors[0], message["variables"])
            self._launchers.append(joined)
        self._selector.register(joined.connection, selectors.EVENT_READ)
        return True

    def _forget(self, launcher: _Launcher) -> None:
        for agent in [agent for agent in self._agents if agent.launcher is launcher]:
            self._dismiss(agent)
        self._selector.unregister(launcher.connection)
        self._launchers.remove(launcher)
        launcher.close()

    def _serve_agent(self, agent: _Agent) -> None:
        received = _receive(agent.connection)
        if received is None:
            self._dismiss(agent)
            return
        request, descriptors = received
        if "kill" in request:
            pid = agent.pid_of.get(request["kill"])
            if pid is not None:
                kill_group(pid)
            return
        number = request["fork"]
        server = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_task(agent, request, descriptors, server)
        except OSError:  # no memory, or too many processes
            agent.send(refused=number)
        else:
            agent.pid_of[number] = pid
            agent.send(forked=number, pid=pid)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _dismiss(self, agent: _Agent) -> None:
        for pid in agent.pid_of.values():
            kill_group(pid)
        self._selector.unregister(agent.connection)
        agent.connection.close()
        self._agents.remove(agent)
        for descriptor in (agent.user, agent.network):
            if descriptor is not None:
                os.close(descriptor)

    def _reap(self) -> None:
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return
            if dead is None:
                return
            kill_group(dead.si_pid)  # while it is a zombie, its group number is not reused
            pid, status, usage = os.wait4(dead.si_pid, 0)
            for agent in self._agents:
                for number in [number for number, forked in agent.pid_of.items() if forked == pid]:
                    del agent.pid_of[number]
                    agent.send(ended=number, status=status, usage=list(usage))

    def _become_task(self, agent: _Agent, request: dict[str, Any], descriptors: list[int], server: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            channel, log, *stacks = descriptors
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.write(1, self._written)
            user, network = ("-" if descriptor is None else str(descriptor) for descriptor in (agent.user, agent.network))
            enter(user, network, agent.cgroups)
            if agent.user is not None:
                drop_capabilities()
            _rename_command_line(python(TASK_MODULE))
            self._leave(agent)
            agent.launcher.adopt()
            os.environ["TMPDIR"] = request["temporary_folder"]
            tempfile.tempdir = None  # it caches the former folder
        except BaseException:  # noqa: BLE001 — written to the task's log, and the task ends
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        run_task(socket.socket(fileno=channel), server, stacks[0] if stacks else None)

    def _leave(self, mine: _Agent) -> None:
        """Close all other descriptors, so that no task keeps a connection open."""
        self._selector.close()
        os.close(self._ended)
        os.close(self._wakeup)
        for launcher in self._launchers:
            launcher.connection.close()
            if launcher.directory is not None and launcher is not mine.launcher:
                os.close(launcher.directory)
        for agent in self._agents:
            agent.connection.close()
            for descriptor in (agent.user, agent.network):
                if descriptor is not None and agent is not mine:
                    os.close(descriptor)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    try:
        return receive_packet(connection)
    except OSError:
        return None


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, PACKET_BYTES):
            pass


def _rename_command_line(command: list[str]) -> None:
    """Overwrite this process's command line, as ps shows it (proc_pid_stat(5))."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and 49th of all
    words = b"".join(os.fsencode(word) + b"\0" for word in command)[: max(0, end - begin - 1)]
    if 0 < begin < end:
        ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


@contextmanager
def _captured_output() -> Iterator[list[bytes]]:
    """Capture this process's output, also of native code, in the yielded list."""
    before = [os.dup(1), os.dup(2)]
    written: list[bytes] = []
    memory = os.memfd_create("written")
    os.dup2(memory, 1)
    os.dup2(memory, 2)
    try:
        yield written
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in enumerate(before, start=1):
            os.dup2(original, descriptor)
            os.close(original)
        written.append(os.pread(memory, os.fstat(memory).st_size, 0))
        os.close(memory)


def main(descriptor: int, parent: int) -> None:
    """Import the framework and fork until the launcher is gone; end early if the import fails."""
    ignore_interrupts()
    die_with_parent(parent)
    control = socket.socket(fileno=descriptor)
    first = receive_packet(control)
    if first is not None:
        job = Job.model_validate(first[0]["job"])
        try:
            with _captured_output() as written:
                import_framework(job, time.monotonic() + job.start_timeout / 2, lambda what: None)
        except MissingPackageError:
            os._exit(1)
        if threading.active_count() == 1:
            ForkServer(control, b"".join(written)).serve()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
