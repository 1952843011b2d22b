"""Who starts a fork server, and who has it fork tasks: the launcher's end of it, and an agent's."""

from __future__ import annotations

import glob
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from ...backends.loading import load_backend
from ...core.job import Job
from ...core.process import python
from .task_environment import task_environment

__all__ = ["PACKET_BYTES", "ForkServerConnection", "ForkServerProcess", "ForkedTasksListener", "pays_to_fork"]

GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg")

PACKET_BYTES = 2**16
"""The largest message on sockets of a fork server, which keep messages apart (SOCK_SEQPACKET); a job takes a few kilobytes."""


def pays_to_fork(job: Job) -> bool:
    """Return whether several tasks on this machine could be forked from one process that has imported the framework.

    With GPUs each task sees its own, which its environment says from the beginning. One task alone has nothing to share, unless it is
    started again.
    """
    if sys.platform != "linux" or any(map(glob.glob, GPU_DEVICES)):
        return False
    backend = load_backend(job.backend)
    return backend.capabilities.forks and (len(backend.placement(job)) > 1 or job.max_restarts > 0)


class ForkServerProcess:
    """A fork server as a child of this process's main thread; it imports what a job's backend needs, and ends with this process."""

    def __init__(self, job: Job) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = python("crosstrain.launch.node.fork_server", "--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=task_environment(os.environ, None, None),
                start_new_session=True,
            )
        self._tell({"job": job.model_dump(mode="json")}, ())

    def connect(self, namespaces: Mapping[str, int], cgroups: str) -> socket.socket:
        """Return an agent's end of a new connection, whose tasks live in these namespaces (``user``, ``network``) and CPU groups.

        `cgroups` as ``enter.py`` takes it. Where the server has ended, its end is closed, and the agent starts tasks by itself.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._tell({"namespaces": list(namespaces), "cgroups": cgroups}, [theirs.fileno(), *namespaces.values()])
        return ours

    def _tell(self, said: Mapping[str, object], descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(said).encode()], descriptors)
        except OSError:
            return  # it has ended; the agents find their connections closed

    def kill(self) -> None:
        """End it at once, and with it whatever it has forked; safe in a signal handler."""
        self._process.kill()

    def close(self) -> None:
        """End it, and wait for that; a second call does nothing."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class ForkedTasksListener(Protocol):
    """Hears of forked processes by the number under which each was asked for, from one thread."""

    def forked(self, number: int, pid: int) -> None:
        """Hear which process it is."""
        ...

    def ended(self, number: int, status: int, usage: resource.struct_rusage) -> None:
        """Hear how it has ended, as wait4(2) says it; its group is killed, and it is reaped."""
        ...

    def refused(self, number: int) -> None:
        """Hear that it could not be forked."""
        ...

    def fork_server_lost(self) -> None:
        """Hear that the server has ended: its processes end with it, and it forks no more."""
        ...


class ForkServerConnection:
    """A connection to the fork server, over a socket that it has been given the other end of."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def listen(self, listener: ForkedTasksListener) -> None:
        """Tell a listener what the server says, from a thread, until it has ended."""
        threading.Thread(target=self._read, args=(listener,), name="fork-server", daemon=True).start()

    def fork(self, number: int, temporary_folder: str, descriptors: Sequence[int]) -> bool:
        """Ask for a task with such a folder for temporary files; return False where the server is gone.

        `descriptors`: its channel, its log, and what it writes its stacks to, if anything.
        """
        return self._send({"fork": number, "temporary_folder": temporary_folder}, descriptors)

    def kill(self, number: int) -> None:
        """Ask for the end of a task and its process group; of one that has ended nothing is left to kill."""
        self._send({"kill": number})

    def _send(self, said: dict[str, object], descriptors: Sequence[int] = ()) -> bool:
        try:
            socket.send_fds(self._connection, [json.dumps(said).encode()], descriptors)
        except OSError:
            return False
        return True

    def _read(self, listener: ForkedTasksListener) -> None:
        while True:
            try:
                text = self._connection.recv(PACKET_BYTES)
            except OSError:
                text = b""
            if not text:
                listener.fork_server_lost()
                return
            said = json.loads(text)
            if "forked" in said:
                listener.forked(said["forked"], said["pid"])
            elif "refused" in said:
                listener.refused(said["refused"])
            else:
                listener.ended(said["ended"], said["status"], resource.struct_rusage(said["usage"]))
