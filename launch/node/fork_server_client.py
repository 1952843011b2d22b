"""The launcher's and agent's side of a fork server, a run's own or a pool's."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.process import child_working_directory, ending_in_words, python
from .scratch import task_environment

if TYPE_CHECKING:  # agents load this file without it
    from ...core.job import Job

PACKET_BYTES = 2**16  # size limit of messages on a fork server's sockets (SOCK_SEQPACKET); a job takes a few kilobytes
MAX_DESCRIPTORS = 3


def receive_packet(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a message and its descriptors; None at the end. Raises OSError."""
    text, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, MAX_DESCRIPTORS)
    return (json.loads(text), descriptors) if text else None


def is_same_user(connection: socket.socket) -> bool:
    """Return whether a local socket's peer is this user (unix(7), SO_PEERCRED). For Linux."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())


class ForkServerConnection:
    """An agent's connection to the fork server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def listen(self, on_event: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Pass on the server's messages, from a thread, and None once the server has ended.

        Its processes have ended then, too. An event has the number of a request: ``forked`` with the ``pid``, ``refused``, or ``ended``
        with ``status`` and ``usage`` as in wait4(2), after the process's group was killed and it was reaped.
        """
        threading.Thread(target=self._read, args=(on_event,), name="fork-server", daemon=True).start()

    def fork(self, number: int, temporary_folder: str, descriptors: Sequence[int]) -> bool:
        """Request a task with `descriptors` for channel, log, stacks; return False without server."""
        return _send(self._connection, {"fork": number, "temporary_folder": temporary_folder}, descriptors)

    def kill(self, number: int) -> None:
        """Request the end of a task and its process group."""
        _send(self._connection, {"kill": number})

    def _read(self, on_event: Callable[[Mapping[str, Any] | None], None]) -> None:
        while text := self._received():
            on_event(json.loads(text))
        on_event(None)

    def _received(self) -> bytes:
        with suppress(OSError):
            return self._connection.recv(PACKET_BYTES)
        return b""


def _send(connection: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> bool:
    try:
        socket.send_fds(connection, [json.dumps(message).encode()], descriptors)
    except OSError:
        return False
    return True


GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg")
POOL_VARIABLE = "CROSSTRAIN_FORK_SERVERS"  # abstract socket (unix(7)) of a pool of servers; such runs skip the framework's import
POOL_ANSWER_SECONDS = 10.0
END_SECONDS = 1.0  # time limit for the exit code of a server whose tasks have ended with it
TRANSFERRED = ("CROSSTRAIN_", "PYTEST_", "TRAINER_")
TRANSFERRED_NAMES = frozenset({"COLUMNS", "LINES", "OLDPWD", "PWD", "PYTHONPATH", "SHLVL", "XDG_CONFIG_HOME", "_"})
"""Variables that no framework reads on import, which each task gets from its own launcher."""
STATUS_FIELDS = ("Umask", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")  # inherited (proc_pid_status(5))


def pays_to_fork(job: Job) -> bool:
    """Return whether forking saves imports: several tasks, or restarts, on this machine."""
    from ...backends.loading import load_backend

    return _can_fork(job) and (len(load_backend(job.backend).placement(job)) > 1 or job.max_restarts > 0)


def _can_fork(job: Job) -> bool:
    """Return whether tasks may be forked: not with GPUs, which are assigned before the import."""
    from ...backends.loading import load_backend

    return sys.platform == "linux" and not any(map(glob.glob, GPU_DEVICES)) and load_backend(job.backend).capabilities.forks


def open_fork_server(job: Job) -> ForkServer | None:
    """Return a run's fork server: a shared one if possible, another if that pays, else None."""
    pool = os.environ.get(POOL_VARIABLE)
    if pool is not None and _can_fork(job) and (shared := _shared_server(pool, job)) is not None:
        return shared
    return ForkServerProcess(job) if pays_to_fork(job) else None


def _shared_server(pool: str, job: Job) -> ForkServer | None:
    """Return a server of this user's pool with the same inherited state, if any."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(POOL_ANSWER_SECONDS)
    request = {
        "job": job.model_dump(mode="json"),
        "state": inherited_state(),
        "variables": {key: value for key, value in task_environment(os.environ, None, None).items() if is_transferred(key)},
    }
    directory = os.open(child_working_directory(), os.O_PATH | os.O_DIRECTORY)
    try:
        control.connect(f"\0{pool}")
        if is_same_user(control):
            socket.send_fds(control, [json.dumps(request).encode()], [directory])
            if (answer := receive_packet(control)) is not None and answer[0]["lent"]:
                control.settimeout(None)
                return ForkServer(control)
    except OSError:  # the pool has ended: the caller starts its own server
        pass
    finally:
        os.close(directory)
    control.close()
    return None


def is_transferred(variable: str) -> bool:
    """Return whether a task of a shared server gets this variable from its launcher."""
    return variable in TRANSFERRED_NAMES or variable.startswith(TRANSFERRED)


def path_entries(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def inherited_state() -> str:
    """Return a digest of the inherited state that sharing a server requires. For Linux."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    limits["RLIMIT_NOFILE"] = limits["RLIMIT_OFILE"] = (0, limits["RLIMIT_NOFILE"][1])
    environment = {key: value for key, value in task_environment(os.environ, None, None).items() if not is_transferred(key)}
    state: dict[str, Any] = {
        "python": [*python(""), sys.prefix],
        "user": [os.getresuid(), os.getresgid(), sorted(os.getgroups())],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "groups": Path("/proc/self/cgroup").read_text(),
        "namespaces": {entry.name: os.readlink(entry) for entry in Path("/proc/self/ns").iterdir()},
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),
        "status": {name: status.get(name) for name in STATUS_FIELDS},
        "limits": limits,
        "environment": environment,
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode(errors="surrogateescape")).hexdigest()


class ForkServer:
    """A launcher's connection to a fork server, over which it announces its agents."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def connect(self, namespaces: Mapping[str, int], cgroups: str) -> socket.socket:
        """Return an agent's connection for tasks in these namespaces and CPU groups.

        `cgroups` as in ``enter.py``, `namespaces`: ``user``, ``network``. Without server it is closed, and the agent starts tasks.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            _send(self._control, {"namespaces": list(namespaces), "cgroups": cgroups}, [theirs.fileno(), *namespaces.values()])
        return ours

    def describe_end(self) -> str:
        """Describe the server's end."""
        return "the fork server, which was lent to this run, has ended"

    def kill(self) -> None:
        """End what it has forked for this launcher; safe in a signal handler."""
        self._control.close()

    def close(self) -> None:
        """Disconnect, which ends its tasks; idempotent."""
        self._control.close()


class ForkServerProcess(ForkServer):
    """A fork server that is a child of this process's main thread, and ends with this process."""

    def __init__(self, job: Job) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(control)
        with theirs:
            command = python("crosstrain.launch.node.fork_server", str(theirs.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=task_environment(os.environ, None, None),
                start_new_session=True,
                cwd=child_working_directory(),
            )
        _send(self._control, {"job": job.model_dump(mode="json")})

    @property
    def ended(self) -> bool:
        """Whether the server has ended."""
        return self._process.poll() is not None

    def describe_end(self) -> str:
        """Describe the server's end; call after its tasks have ended."""
        try:
            how = ending_in_words(self._process.wait(END_SECONDS))
        except subprocess.TimeoutExpired:
            how = "has ended the connection to an agent"
        return f"the fork server (process {self._process.pid}) {how}"

    def lend(self, launcher: socket.socket, directory: int, variables: Mapping[str, str]) -> None:
        """Serve another launcher, too, with its connection and working directory."""
        _send(self._control, {"variables": variables}, [launcher.fileno(), directory])

    def kill(self) -> None:
        """End it and everything it has forked; safe in a signal handler."""
        self._process.kill()

    def close(self) -> None:
        """End it and wait for that; idempotent."""
        self._control.close()
        self._process.kill()
        self._process.wait()
