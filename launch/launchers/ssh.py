"""The launcher of nodes that are reached by ssh: the system's own, with the user's configuration, keys, known hosts and jump hosts.

Host keys are checked as that configuration says, and nothing is asked: a host that would ask for a password is an error that says so.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...core.errors import UsageError
from ..node.identity import ADDRESS_VARIABLE
from .base import Launcher, StartedAgent
from .carrier import ErrorLines, end_elsewhere, start_elsewhere
from .host_list import Host
from .remote import RemoteLauncher, refuse_virtual_nodes
from .request import LauncherPlugin, LaunchRequest

__all__ = ["LAUNCHER", "SshStarter", "make", "make_starter"]

SSH_FAILED = 255
"""What ssh exits with where it failed itself."""

OPTIONS = ("BatchMode=yes", "ClearAllForwardings=yes", "ControlMaster=no", "LogLevel=ERROR")
"""For each connection. At the last's level ssh says why it fails, and leaves out the host's banner, which would push the reason away."""

WITH_ADDRESS = f'address=${{SSH_CONNECTION% *}}; export {ADDRESS_VARIABLE}="${{address##* }}"; exec "$@"'
"""What a POSIX shell does over there: sshd says the client's address and port, then those by which the client has reached this host."""


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher of a run whose nodes are ``--hosts``. Raises UsageError where there are none, or no ssh here."""
    if not run.hosts:
        raise UsageError("launcher: 'ssh' starts the nodes on other machines; name them by --hosts node0,node1 or --hostfile")
    refuse_virtual_nodes(run.job, "ssh")
    return RemoteLauncher(run.job, make_starter(run.hosts, run.job.start_timeout), run.python, run.warn)


LAUNCHER = LauncherPlugin(make, takes=("hosts", "hostfile", "python"))


def make_starter(hosts: Sequence[Host], connect_seconds: float) -> SshStarter:
    """Return what starts commands on these hosts. Raises UsageError where there is no ssh here."""
    program = shutil.which("ssh")
    if program is None:
        raise UsageError("launcher: 'ssh' needs the program ssh, which is not on PATH; install it (Debian: apt install openssh-client)")
    return SshStarter(hosts, program, connect_seconds)


@dataclass(frozen=True)
class SshStarter:
    """Starts agents on `hosts` with the ssh client `program`, which gives a connection up after so many seconds."""

    hosts: Sequence[Host]
    program: str
    connect_seconds: float
    name = "ssh"

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Start an agent; see `AgentStarter`. ssh itself ends with this process, and the agent with ssh."""
        host = self.hosts[node].name
        options = [*OPTIONS, f"ConnectTimeout={max(1, int(self.connect_seconds))}"]
        words = [self.program, "-T", *(part for option in options for part in ("-o", option)), "--", host]
        words.append(f"exec {shlex.join(['sh', '-c', WITH_ADDRESS, 'sh', *command])}")
        process, stream, said = start_elsewhere(host, words)
        return StartedAgent(process, stream, "", isolated=None, host=host, explain=partial(_explain, host, said, command))


def _explain(host: str, said: ErrorLines, command: Sequence[str], code: int) -> str:
    """Say what the exit code of ssh means, with what it and the node have said last."""
    if code == SSH_FAILED:
        return f"is out of reach: ssh has failed, or the connection has ended{said.behind()} (try `ssh {shlex.quote(host)} true`)"
    return end_elsewhere(command, code, said.last())
