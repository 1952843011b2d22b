"""Fork servers as a launcher has them: started for a run, or lent by a pool.

A launcher usually starts a server of its own. Where many short runs follow each other, as in a test suite, a pool can lend them all the
same (`conformance/fork_server_pool.py`); it is named by a variable.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...backends.loading import load_backend
from ...core.job import Job
from ...core.process import ending_in_words, python, there_to_work_in
from .fork_server_connection import is_own_user, receive_packet
from .task_environment import task_environment

__all__ = [
    "POOL_VARIABLE",
    "ForkServer",
    "ForkServerProcess",
    "inherited_state",
    "is_transferred",
    "open_fork_server",
    "path_entries",
    "pays_to_fork",
]

GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg")

POOL_VARIABLE = "CROSSTRAIN_FORK_SERVERS"
"""Names the socket of a pool of fork servers, in the abstract namespace (unix(7)). The runs that use it do without the import of the
framework, so that the time of their start is not that of other runs."""

POOL_ANSWER_SECONDS = 10.0

END_SECONDS = 1.0
"""How long is waited for the exit code of a server whose tasks have ended with it."""

TRANSFERRED = ("CROSSTRAIN_", "PYTEST_", "TRAINER_")
TRANSFERRED_NAMES = frozenset({"COLUMNS", "LINES", "OLDPWD", "PWD", "PYTHONPATH", "SHLVL", "XDG_CONFIG_HOME", "_"})
"""Variables that no framework reads when it is imported: each task has those of its own launcher. What PYTHONPATH says holds for what a
task imports from then on."""

STATUS_FIELDS = ("Umask", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
"""Lines of proc_pid_status(5) that a child inherits."""


def pays_to_fork(job: Job) -> bool:
    """Return whether several tasks on this machine could be forked from one process that has imported the framework.

    One task alone has nothing to share, unless it is started again.
    """
    return _can_fork(job) and (len(load_backend(job.backend).placement(job)) > 1 or job.max_restarts > 0)


def _can_fork(job: Job) -> bool:
    """Return whether tasks may be forked here. With GPUs each task sees its own, which its environment says from the beginning."""
    return sys.platform == "linux" and not any(map(glob.glob, GPU_DEVICES)) and load_backend(job.backend).capabilities.forks


def open_fork_server(job: Job) -> ForkServer | None:
    """Return what a run's tasks are forked from: a server that is lent, where there is one, its own where that pays, else None."""
    pool = os.environ.get(POOL_VARIABLE)
    if pool is not None and _can_fork(job) and (lent := _lent_server(pool, job)) is not None:
        return lent
    return ForkServerProcess(job) if pays_to_fork(job) else None


def _lent_server(pool: str, job: Job) -> ForkServer | None:
    """Return a server of the pool of this name; None where there is none, or another user's, or where this process differs from it."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(POOL_ANSWER_SECONDS)
    said = {
        "job": job.model_dump(mode="json"),
        "state": inherited_state(),
        "variables": {key: value for key, value in task_environment(os.environ, None, None).items() if is_transferred(key)},
    }
    directory = os.open(there_to_work_in(), os.O_PATH | os.O_DIRECTORY)
    try:
        control.connect(f"\0{pool}")
        if is_own_user(control):
            socket.send_fds(control, [json.dumps(said).encode()], [directory])
            if (answer := receive_packet(control)) is not None and answer[0]["lent"]:
                control.settimeout(None)
                return ForkServer(control)
    except OSError:  # the pool has ended: a server of one's own does as well
        pass
    finally:
        os.close(directory)
    control.close()
    return None


def is_transferred(variable: str) -> bool:
    """Return whether a task that a lent server has forked has this variable of its launcher."""
    return variable in TRANSFERRED_NAMES or variable.startswith(TRANSFERRED)


def path_entries(environment: Mapping[str, str]) -> list[str]:
    """Return the folders that PYTHONPATH names in an environment."""
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def inherited_state() -> str:
    """Return a digest of what a child of this process would have from it, but for what a lent server's tasks have of their launcher.

    Processes with equal digests could have started the same fork server. For Linux.
    """
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
    """A fork server as a launcher has it: a connection over which it announces its agents."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

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

    def describe_end(self) -> str:
        """Say in words that it has ended, and how, where that is known."""
        return "the fork server, which was lent to this run, has ended"

    def kill(self) -> None:
        """Have whatever it has forked for this launcher end at once; safe in a signal handler."""
        self._control.close()

    def close(self) -> None:
        """Let go of it, and have its tasks end; a second call does nothing."""
        self._control.close()


class ForkServerProcess(ForkServer):
    """A fork server as a child of this process's main thread; it imports what a job's backend needs, and ends with this process."""

    def __init__(self, job: Job) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(control)
        with theirs:
            command = python("crosstrain.launch.node.fork_server", "--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=task_environment(os.environ, None, None),
                start_new_session=True,
                cwd=there_to_work_in(),
            )
        self._tell({"job": job.model_dump(mode="json")}, ())

    @property
    def ended(self) -> bool:
        """Whether the server has ended."""
        return self._process.poll() is not None

    def describe_end(self) -> str:
        """Say in words how it has ended; call where its tasks have ended with it."""
        try:
            how = ending_in_words(self._process.wait(END_SECONDS))
        except subprocess.TimeoutExpired:
            how = "has ended the connection to an agent"
        return f"the fork server (process {self._process.pid}) {how}"

    def lend(self, launcher: socket.socket, directory: int, variables: Mapping[str, str]) -> None:
        """Have it serve another launcher too, whose connection and working directory are handed over; see `open_fork_server`."""
        self._tell({"variables": variables}, [launcher.fileno(), directory])

    def kill(self) -> None:
        """End it at once, and with it whatever it has forked; safe in a signal handler."""
        self._process.kill()

    def close(self) -> None:
        """End it, and wait for that; a second call does nothing."""
        self._control.close()
        self._process.kill()
        self._process.wait()
