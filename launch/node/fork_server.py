"""A process that has imported the framework once, and forks every task of this machine's nodes from itself.

On one machine with several nodes each task would import the framework by itself, which takes most of their start: seconds of a core and
hundreds of megabytes each. Forked tasks have it at once, and share its memory until they write to it. The standard library has the same
idea (multiprocessing, start method ``forkserver``).

Started by the local launcher as ``python -m crosstrain.launch.node.fork_server``. Over its first socket come the job, then one more
connection for each agent, with the place in which that agent's tasks live. Over such a connection an agent asks for forks and kills, and
hears of starts and ends, since only a parent can wait for a process. The server ends with the launcher, its tasks with the server
(parent-death signal), and those of an agent with the agent's connection.

Over the first socket other launchers can come too, each with a connection like it, and with what their tasks are to have of them and not
of the process that has started the server (`conformance/fork_server_pool.py`).
"""

from __future__ import annotations

import argparse
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...core.errors import MissingPackageError
from ...core.job import Job
from ...core.process import die_with_parent, ignore_interrupts, kill_group, python
from ...engine.task import import_framework, run_task
from ..virtual.enter import drop_capabilities, enter
from .fork_server_client import is_transferred, path_entries
from .fork_server_connection import PACKET_BYTES, receive_packet

__all__ = ["ForkServer", "main"]

TASK_MODULE = "crosstrain.engine.task"


@dataclass(frozen=True)
class _Launcher:
    """A launcher's connection, and what its tasks have of it and not of this process; `directory` is a descriptor of where it works.

    Without one it has started this process, which has all of it.
    """

    connection: socket.socket
    directory: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def adopt(self) -> None:
        """In a task: work where the launcher does, with its variables."""
        if self.directory is None:
            return
        os.fchdir(self.directory)
        os.close(self.directory)
        own = path_entries(os.environ)
        for name in filter(is_transferred, list(os.environ)):
            del os.environ[name]
        os.environ.update(self.variables)
        sys.path[:] = [*path_entries(self.variables), *(entry for entry in sys.path if entry not in own)]

    def close(self) -> None:
        """Close what this process has of it."""
        self.connection.close()
        if self.directory is not None:
            os.close(self.directory)


@dataclass
class _Agent:
    """An agent's connection, its tasks' place, and the processes forked for it, by the number that the agent gave each.

    `user` and `network` are descriptors of namespaces, and `cgroups` the files to enter its CPU groups, as ``enter.py`` takes them.
    """

    launcher: _Launcher
    connection: socket.socket
    user: int | None
    network: int | None
    cgroups: str
    pid_of: dict[int, int] = field(default_factory=dict)

    def tell(self, **said: Any) -> None:
        """Send a message; to an agent that is gone nothing needs to be said."""
        try:
            self.connection.send(json.dumps(said).encode())
        except OSError:
            return


class ForkServer:
    """Serves a launcher, over `control`, the agents that it announces, and any other launchers."""

    def __init__(self, control: socket.socket, written: bytes) -> None:
        """`written` is what the import has written, which each task's log begins with."""
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
        """Serve until the launcher is gone that has started this process."""
        while True:
            ready = {key.fd: key.data for key, _ in self._selector.select()}
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
        """Take the connection of an agent, or of another launcher; return False at the end of this one's."""
        try:
            received = receive_packet(launcher.connection)
        except OSError:
            received = None
        if received is None:
            return False
        said, (connection, *descriptors) = received
        joined: _Agent | _Launcher
        if "namespaces" in said:
            named = dict(zip(said["namespaces"], descriptors, strict=True))
            joined = _Agent(launcher, socket.socket(fileno=connection), named.get("user"), named.get("network"), said["cgroups"])
            self._agents.append(joined)
        else:
            joined = _Launcher(socket.socket(fileno=connection), descriptors[0], said["variables"])
            self._launchers.append(joined)
        self._selector.register(joined.connection, selectors.EVENT_READ)
        return True

    def _forget(self, launcher: _Launcher) -> None:
        """Kill the tasks of a launcher that is gone."""
        for agent in [agent for agent in self._agents if agent.launcher is launcher]:
            self._dismiss(agent)
        self._selector.unregister(launcher.connection)
        self._launchers.remove(launcher)
        launcher.close()

    def _serve_agent(self, agent: _Agent) -> None:
        try:
            received = receive_packet(agent.connection)
        except OSError:
            received = None
        if received is None:
            self._dismiss(agent)
            return
        said, descriptors = received
        if "kill" in said:
            pid = agent.pid_of.get(said["kill"])
            if pid is not None:
                kill_group(pid)
            return
        number = said["fork"]
        try:
            pid = self._fork(agent, said, descriptors)
        except OSError:  # no memory, or too many processes: whoever starts a process of its own hears it of the kernel too
            agent.tell(refused=number)
        else:
            agent.pid_of[number] = pid
            agent.tell(forked=number, pid=pid)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _dismiss(self, agent: _Agent) -> None:
        """Kill the tasks of an agent that is gone."""
        for pid in agent.pid_of.values():
            kill_group(pid)
        self._selector.unregister(agent.connection)
        agent.connection.close()
        self._agents.remove(agent)
        for descriptor in (agent.user, agent.network):
            if descriptor is not None:
                os.close(descriptor)

    def _reap(self) -> None:
        """Tell of every process that has ended, in the kernel's order, and kill what is left of its group."""
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return
            if dead is None:
                return
            kill_group(dead.si_pid)  # while it is a zombie its group number cannot belong to anybody else
            pid, status, usage = os.wait4(dead.si_pid, 0)
            for agent in self._agents:
                for number in [number for number, of in agent.pid_of.items() if of == pid]:
                    del agent.pid_of[number]
                    agent.tell(ended=number, status=status, usage=list(usage))

    def _fork(self, agent: _Agent, said: dict[str, Any], descriptors: list[int]) -> int:
        """Fork a task; return its pid. Raises OSError."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_task(agent, said, descriptors, server)
        return pid

    def _become_task(self, agent: _Agent, said: dict[str, Any], descriptors: list[int], server: int) -> NoReturn:
        """In the child: leave all that is the server's, enter the node, and be the task to its end."""
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
            os.environ["TMPDIR"] = said["temporary_folder"]
            tempfile.tempdir = None  # what it was before is remembered there
        except BaseException:  # noqa: BLE001 — told in the task's log, and the task ends
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        run_task(socket.socket(fileno=channel), server, stacks[0] if stacks else None)

    def _leave(self, own: _Agent) -> None:
        """Close what is the server's, and that of other agents: whoever waits for the end of a connection must not wait for a task."""
        self._selector.close()
        os.close(self._ended)
        os.close(self._wakeup)
        for launcher in self._launchers:
            launcher.connection.close()
            if launcher.directory is not None and launcher is not own.launcher:
                os.close(launcher.directory)
        for agent in self._agents:
            agent.connection.close()
            for descriptor in (agent.user, agent.network):
                if descriptor is not None and agent is not own:
                    os.close(descriptor)


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, PACKET_BYTES):
            pass
    except BlockingIOError:
        return


def _rename_command_line(command: list[str]) -> None:
    """Have lists of processes show another command: the words are where the kernel has put those of this process (proc_pid_stat(5)).

    A command that is longer than there is room is cut.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and 49th of all
    words = b"".join(os.fsencode(word) + b"\0" for word in command)[: max(0, end - begin - 1)]
    if 0 < begin < end:
        ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


@contextmanager
def _output_kept() -> Iterator[list[bytes]]:
    """Have what this process writes within the block, native code included, kept in the list that is returned."""
    before = [os.dup(1), os.dup(2)]
    written: list[bytes] = []
    kept = os.memfd_create("written")
    os.dup2(kept, 1)
    os.dup2(kept, 2)
    try:
        yield written
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, own in enumerate(before, start=1):
            os.dup2(own, descriptor)
            os.close(own)
        written.append(os.pread(kept, os.fstat(kept).st_size, 0))
        os.close(kept)


def main(arguments: list[str] | None = None) -> None:
    """Import the framework, then fork until the launcher is gone. Leaves with os._exit, as tasks do.

    A framework that cannot be imported, also not within half the time of a start, or that has started threads by being imported, is none to
    fork from: the server ends, and the agents start tasks by themselves, which then tell what is wrong.
    """
    parser = argparse.ArgumentParser(prog="crosstrain.launch.node.fork_server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    ignore_interrupts()
    die_with_parent(options.parent)
    control = socket.socket(fileno=options.fd)
    first = receive_packet(control)
    if first is not None:
        job = Job.model_validate(first[0]["job"])
        try:
            with _output_kept() as written:
                import_framework(job, time.monotonic() + job.start_timeout / 2, lambda what: None)
        except MissingPackageError:
            os._exit(1)
        if threading.active_count() == 1:
            ForkServer(control, b"".join(written)).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
