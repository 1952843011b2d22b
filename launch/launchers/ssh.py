"""The launcher of nodes that are reached by ssh: the system's own, with the user's configuration, keys, known hosts and jump hosts.

Host keys are checked as that configuration says, and nothing is asked: a host that would ask for a password is an error that says so.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from ...core.errors import UsageError
from ...core.process import command_ending_with_parent
from ...core.untrusted.console import note, one_line
from ...engine.protocol.messages import Stream
from ...engine.protocol.transport import AGENT_BEGINS, start_over_stdio
from .base import Launcher, StartedAgent, ending_in_words
from .host_list import Host
from .registry import LaunchRequest
from .remote import RemoteLauncher, refuse_virtual_nodes

__all__ = ["SshStarter", "make", "make_starter"]

SSH_FAILED, NO_PROGRAM = 255, 127
"""What ssh exits with where it failed itself, and the shell over there where there is no such program."""

LONGEST_LINE_BYTES = 4096
LAST_LINES = 4
"""Of what ssh and the node say on standard error: how much is kept of a line, and how many are told."""

READ_SECONDS = 0.5
"""How long is waited for the last lines of a process that has ended."""


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher of a run whose nodes are ``--hosts``. Raises UsageError where there are none, or no ssh here."""
    if not run.hosts:
        raise UsageError("launcher: 'ssh' starts the nodes on other machines; name them by --hosts node0,node1 or --hostfile")
    refuse_virtual_nodes(run.job, "ssh")
    return RemoteLauncher(run.job, make_starter(run.hosts, run.job.start_timeout), run.python, run.warn)


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

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Start an agent; see `AgentStarter`. ssh itself ends with this process, and the agent with ssh."""
        host = self.hosts[node].name
        options = ["BatchMode=yes", f"ConnectTimeout={max(1, int(self.connect_seconds))}", "ClearAllForwardings=yes", "ControlMaster=no"]
        words = [self.program, "-T", *(part for option in options for part in ("-o", option)), "--", host, f"exec {shlex.join(command)}"]
        process, stream = start_over_stdio(_popen, command_ending_with_parent(words), AGENT_BEGINS)
        assert process.stderr is not None
        said = _Said(host, process.stderr, stream)
        return StartedAgent(process, stream, "", isolated=None, host=host, explain=partial(_explain, host, said))


def _popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


class _Said:
    """What ssh, and the agent over there, say on standard error: told with the host's name once the agent is there, and kept before."""

    def __init__(self, host: str, file: IO[bytes], stream: Stream) -> None:
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._relay, args=(host, file, stream), name=f"said-by-{host}", daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Return the last lines, with colons between; to be called when the process has ended."""
        self._thread.join(READ_SECONDS)
        return ": ".join(self._lines)

    def _relay(self, host: str, file: IO[bytes], stream: Stream) -> None:
        with file:
            while line := file.readline(LONGEST_LINE_BYTES):
                text = one_line(line.decode(errors="replace").rstrip("\r\n"))
                if text.strip():
                    self._lines.append(text)
                    if stream.begun:
                        note(f"{host}: {text}")


def _explain(host: str, said: _Said, code: int) -> str:
    """Say what the exit code of ssh means, with what it and the node have said last."""
    told = said.last()
    if code == SSH_FAILED:
        return f"is out of reach: ssh has failed, or the connection has ended{_behind(told)} (try `ssh {shlex.quote(host)} true`)"
    if code == NO_PROGRAM:
        return f"could not be started: there is no such program{_behind(told)} (--python names the interpreter on the nodes)"
    return f"{ending_in_words(code)}{_behind(told)}"


def _behind(text: str) -> str:
    return f": {text}" if text else ""
