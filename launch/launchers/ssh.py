"""The launcher of nodes on other machines by any carrier, and that by ssh."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO

from ...core.console import note, one_line
from ...core.errors import RunFailedError, UsageError
from ...core.job import Job
from ...core.process import command_ending_with_parent, ignores_signal
from ...core.settings.sweeps import value_text
from ...engine.protocol.messages import Stream
from ...engine.protocol.transport import AGENT_BEGINS, start_over_stdio
from ..node.scratch import ADDRESS_VARIABLE, remove_scratch
from ..preflight.findings import Finding
from .base import (
    AGENT_MODULE,
    AgentProcess,
    AgentStarter,
    Launcher,
    LauncherDefaults,
    NodeChannel,
    StartedAgent,
    end_agents,
    end_lost,
    ending_in_words,
    send_prepare,
)
from .host_list import Host, HostChecks, refuse, remote_python
from .registry import LauncherPlugin, LaunchRequest

END_SECONDS = 10.0  # time limit for a remote agent to end its tasks and itself, and for its carrier to notice


def shape_of_hosts(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the settings from a list of hosts: nodes, and processes if given."""
    counts = [host.processes for host in hosts]
    shape = {"nodes": str(len(hosts))}
    if any(count is not None for count in counts):
        shape["procs_per_node"] = ",".join(str(count or 1) for count in counts)
    return shape


def refuse_virtual_nodes(job: Job, contract: str) -> None:
    """Raise UsageError for settings of virtual nodes, as `contract` starts the nodes."""
    virtual = {"bandwidth": job.bandwidth, "cores_per_node": job.cores_per_node, "network": job.network == "isolated" or None}
    for key, limit in virtual.items():
        if limit is not None:
            shown = job.network if key == "network" else value_text(limit)
            raise UsageError(f"{key}: got {shown!r}, which is for virtual nodes; these were started by {contract}. Leave it out.")


@dataclass
class RemoteLauncher(LauncherDefaults):
    """Probes all hosts and starts an agent per node by `starter`; default `python`: this one."""

    job: Job
    starter: AgentStarter
    python: Path | None = None
    warn: Callable[[str], None] = lambda text: None
    relocate: Callable[[int], None] = lambda node: None  # moves a node with a lost host to another one for its next start
    _checks: HostChecks = field(init=False)
    _checked: bool = False
    _channels: list[NodeChannel] = field(default_factory=list)
    _agents: list[AgentProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._checks = HostChecks(self.starter, self.job.nodes, self.python)

    def prestart(self) -> None:
        """Start the probes and the agents, which load while the driver does. Raises RunFailedError."""
        if self._channels:
            return
        self._checks.start()
        try:
            self._channels.extend(self._started(node) for node in range(self.job.nodes))
        except OSError as error:
            raise RunFailedError(f"{self.starter.name} cannot start an agent: {error}") from error

    def _started(self, node: int) -> NodeChannel:
        agent = self.starter.start(node, remote_python(self.python, AGENT_MODULE, "--node", str(node), "--remote"))
        self._agents.append(agent.process)
        send_prepare(agent.stream, self.job, node)
        return NodeChannel(
            node, agent.stream, agent.address, agent.isolated, agent.cores, agent.shares_files, agent.process, agent.host, agent.explain
        )

    def replace(self, node: int) -> NodeChannel | None:
        """Start another agent on a spare host or the node's; its greeting shows whether it is fit."""
        end_lost(self._channels[node], self._agents)
        self.relocate(node)
        self._channels[node] = self._started(node)
        return self._channels[node]

    def start(self) -> list[NodeChannel]:
        """Start agents, await findings. Raises UsageError, RunFailedError, InterruptedRunError."""
        self.prestart()
        if not self._checked:
            findings = self._checks.findings(self.job.start_timeout, self.job)
            refuse(findings)
            for finding in findings:
                if finding.state == "odd":
                    self.warn(f"{finding.host}: {finding.what}: {finding.found}")
            self._checks.close()
            self._checked = True
        return self._channels

    def look(self, timeout_seconds: float) -> list[Finding]:
        """Return findings about the hosts for any run; see `LooksAtHosts`."""
        return self._look_at(self.job.nodes, timeout_seconds, self.job.workers_by_node)

    def _look_at(self, hosts: int, timeout_seconds: float, workers: Sequence[int] = ()) -> list[Finding]:
        self._checks = HostChecks(self.starter, hosts, self.python, workers)
        return self._checks.findings(timeout_seconds)

    def close(self) -> None:
        """End the probes, and the agents with their tasks by the end of their input."""
        self._checks.close()
        end_agents(self._agents, END_SECONDS)
        for channel in self._channels:
            channel.stream.close()
        self._agents.clear()

    def interrupt(self) -> None:
        """Make a waiting `start` raise InterruptedRunError."""
        self._checks.interrupt()

    def kill(self) -> None:
        """End the carriers of the channels, and so agents and probes."""
        self._checks.kill()
        for agent in self._agents:
            agent.terminate()
        for channel in self._channels:
            if channel.scratch is not None:
                remove_scratch(channel.scratch)


MAX_LINE_BYTES = 4096
LAST_LINES = 4  # limits of a line and of the lines that are reported
READ_SECONDS = 0.5  # time limit for the last lines of a process that has ended
NO_PROGRAM = 127  # exit code of a shell, env and Ray's actor if the program is missing
_MISSING = re.compile(r"No module named '(\w+)")


class Carrier(subprocess.Popen[bytes]):
    """A child that carries a channel (ssh, srun) or becomes the agent (``env``)."""

    def terminate(self) -> None:
        """End it by SIGTERM, or, if it is the agent, which ignores that, by SIGKILL."""
        if ignores_signal(self.pid, signal.SIGTERM):
            self.kill()
        else:
            super().terminate()


def start_elsewhere(host: str, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Stream, ErrorLines]:
    """Start a command on `host` that carries a channel; return it, the channel and its errors.

    It ends by SIGTERM with this process: a killed srun cannot notify the node, whose agent would run until its node time-out. A command
    that becomes the agent ends with its input.
    """
    popen = partial(Carrier, stderr=subprocess.PIPE)
    process, stream = start_over_stdio(popen, command_ending_with_parent(command, signal.SIGTERM), AGENT_BEGINS)
    assert process.stderr is not None
    return process, stream, ErrorLines(host, process.stderr, should_log=lambda: stream.begun)


class ErrorLines:
    """A carrier's standard error, whose last lines are stored.

    Lines are logged with the host's name if `should_log` returns True.
    """

    def __init__(self, host: str, file: IO[bytes], should_log: Callable[[], bool]) -> None:
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._relay, args=(host, file, should_log), name=f"errors-of-{host}", daemon=True)
        self._thread.start()

    def last(self) -> list[str]:
        """Return the last lines, after the process has ended."""
        self._thread.join(READ_SECONDS)
        return [*self._lines]

    def behind(self) -> str:
        """Return the last lines for the end of a message, after the process has ended."""
        return "".join(f": {line}" for line in self.last())

    def _relay(self, host: str, file: IO[bytes], should_log: Callable[[], bool]) -> None:
        with file:
            while line := file.readline(MAX_LINE_BYTES):
                text = one_line(line.decode(errors="replace").rstrip("\r\n"))
                if text.strip():
                    self._lines.append(text)
                    if should_log():
                        note(f"{host}: {text}")


def end_elsewhere(command: Sequence[str], code: int, error_lines: Sequence[str], by: str = "") -> str:
    """Describe the end of a `remote_python` command; `by` names the carrier, after a space."""
    interpreter = shlex.quote(command[2] if command[0] == "env" else command[0])
    lines = "".join(f": {line}" for line in error_lines)
    if code == NO_PROGRAM:
        return f"could not be started: there is no {interpreter}{lines}; --python PATH names the interpreter on the nodes"
    missing = [match[1] for line in error_lines if (match := _MISSING.search(line)) is not None]
    if not missing:
        return f"{ending_in_words(code)}{by}{lines}"
    install = f"{interpreter} -m pip install crosstrain=={version('crosstrain')}"
    return (
        f"{ending_in_words(code)}{by}, as {missing[-1]} is not installed for {interpreter}{lines}; type `{install}` there, or name "
        "another interpreter by --python PATH"
    )


# Host keys are checked as configured, and nothing is prompted for: a host that would ask for a password is an error.

SSH_FAILED = 255  # exit code of ssh's own failures
OPTIONS = ("BatchMode=yes", "ClearAllForwardings=yes", "ControlMaster=no", "LogLevel=ERROR")  # ERROR omits the host's banner
WITH_ADDRESS = f'address=${{SSH_CONNECTION% *}}; export {ADDRESS_VARIABLE}="${{address##* }}"; exec "$@"'
"""The remote shell's script; SSH_CONNECTION has the client's address and port, then the host's."""


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher of ``--hosts``. Raises UsageError without hosts, or without ssh."""
    if not run.hosts:
        raise UsageError("launcher: 'ssh' starts the nodes on other machines; name them by --hosts node0,node1 or --hostfile")
    refuse_virtual_nodes(run.job, "ssh")
    program = shutil.which("ssh")
    if program is None:
        raise UsageError("launcher: 'ssh' needs the program ssh, which is not on PATH; install it (Debian: apt install openssh-client)")
    return RemoteLauncher(run.job, SshStarter(run.hosts, program, run.job.start_timeout), run.python, run.warn)


LAUNCHER = LauncherPlugin(make, takes=("hosts", "hostfile", "python"))


@dataclass(frozen=True)
class SshStarter:
    """Starts agents by the ssh client `program`, with this connection timeout."""

    hosts: Sequence[Host]
    program: str
    connect_seconds: float
    name = "ssh"

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Start an agent; see `AgentStarter`. ssh ends with this process, and the agent with ssh."""
        host = self.hosts[node].name
        options = [*OPTIONS, f"ConnectTimeout={max(1, int(self.connect_seconds))}"]
        words = [self.program, "-T", *(part for option in options for part in ("-o", option)), "--", host]
        words.append(f"exec {shlex.join(['sh', '-c', WITH_ADDRESS, 'sh', *command])}")
        process, stream, errors = start_elsewhere(host, words)

        def explain(code: int) -> str:
            if code == SSH_FAILED:
                return f"is out of reach: ssh has failed, or the connection has ended{errors.behind()} (try `ssh {shlex.quote(host)} true`)"
            return end_elsewhere(command, code, errors.last())

        return StartedAgent(process, stream, "", isolated=None, host=host, explain=explain)
