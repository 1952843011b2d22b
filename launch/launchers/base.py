"""The interface of launchers: a channel to each node's agent."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...core.job import Job
from ...core.process import ending_in_words as ending_in_words  # for launchers of other packages
from ...core.process import python
from ...engine.protocol.messages import Stream
from ...engine.protocol.node_messages import Prepare
from ..node.scratch import remove_scratch

AGENT_MODULE = "crosstrain.launch.node.agent"
OWN_END_SECONDS = 0.5  # time limit for the exit code of a child whose channel has ended


class _Input(Protocol):
    def close(self) -> None: ...


class AgentProcess(Protocol):
    """The child that is an agent or carries its channel, or an object that represents either."""

    @property
    def stdin(self) -> _Input | None:
        """Return its input; an agent ends with it."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, below 0 for a signal. Raises subprocess.TimeoutExpired."""

    def terminate(self) -> None:
        """End it soon; safe in a signal handler, as `kill` is."""

    def kill(self) -> None:
        """End it immediately."""


def how_it_ended(process: AgentProcess, explain: Callable[[int], str]) -> str | None:
    """Describe the end of a child whose channel has ended; None if it has not ended."""
    try:
        return explain(process.wait(timeout=OWN_END_SECONDS))
    except subprocess.TimeoutExpired:
        return None


@dataclass(slots=True)
class NodeChannel:
    """The driver's end of one node: its channel, address and resources.

    `address` is empty until the agent sends it. `host` is the node's name as the user wrote it. `isolated`: the node has its own
    interfaces; None if the agent has to find out. `cores` is the node's CPU limit. `shares_files`: the agent sees the driver's files.
    `process` is the agent or the carrier of its channel, and `explain` describes its exit code. `ports` are those that a contract assigns
    to tasks. `scratch` is the temporary folder of an agent on this machine. `fork_server` describes the end of its tasks' fork server.
    """

    node: int
    stream: Stream
    address: str
    isolated: bool | None
    cores: float | None
    shares_files: bool
    process: AgentProcess | None = None
    host: str | None = None
    explain: Callable[[int], str] = ending_in_words
    ports: Mapping[str, int] = field(default_factory=dict)
    scratch: Path | None = None
    fork_server: Callable[[], str] | None = None

    def cut_off(self) -> None:
        """Disconnect the node immediately: kill a local agent, or the carrier of a remote one."""
        if self.process is not None and self.shares_files:
            self.process.kill()
            return
        if self.process is not None:
            self.process.terminate()
        self.stream.cut()


@dataclass(frozen=True, slots=True)
class StartedAgent:
    """A started agent, with the fields of `NodeChannel`."""

    process: AgentProcess
    stream: Stream
    address: str
    isolated: bool | None
    cores: float | None = None
    host: str | None = None
    explain: Callable[[int], str] = ending_in_words
    shares_files: bool = False


class AgentStarter(Protocol):
    """Starts a command of ours on a node, with a channel to its standard input and output.

    On another machine its messages begin after the line `AGENT_BEGINS`. A local agent gets ``--parent`` with this process's pid, and ends
    with it; a remote one ends with its parent, its input, or the driver's heartbeats.
    """

    @property
    def name(self) -> str:
        """Return its name in error messages."""

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Start `command` on node `node`. Raises OSError."""


@runtime_checkable
class Launcher(Protocol):
    """Starts the nodes' agents.

    The plug-in's `make`, `prestart` and `start` raise UsageError if the user has to change the command (exit code 2), and RunFailedError if
    the start failed (1); `start` also InterruptedRunError, after `interrupt`. `close` is called after any exception. Other exceptions are
    bugs of the launcher, shown with their traceback.
    """

    def prestart(self) -> None:
        """Begin what can be done while this process loads its own code, without waiting for others."""

    def start(self) -> Sequence[NodeChannel]:
        """Start or await one agent per node; return their channels in node order. Idempotent."""

    def close(self) -> None:
        """End everything that `start` started, within bounded time; idempotent."""

    def replace(self, node: int) -> NodeChannel | None:
        """Start another agent for a lost node without waiting; return its channel, if possible."""

    def interrupt(self) -> None:
        """Make a waiting `start` raise InterruptedRunError soon; safe in a signal handler."""

    def kill(self) -> None:
        """End it immediately, without waiting; safe in a signal handler."""

    def check(self) -> None:
        """Raise RunFailedError if the nodes' network or cluster is gone."""

    def ended(self, exit_code: int) -> None:
        """Take the run's exit code, before `close`."""


class LauncherDefaults:
    """Optional methods of a `Launcher` that do nothing."""

    def prestart(self) -> None:
        """Begin nothing before `start`."""

    def replace(self, node: int) -> NodeChannel | None:
        """Return None: agents cannot be replaced."""
        return None

    def interrupt(self) -> None:
        """Do nothing: `start` does not wait."""

    def check(self) -> None:
        """Do nothing: the nodes depend on nothing else."""

    def ended(self, exit_code: int) -> None:
        """Do nothing: no other process needs the code."""


def agent_command(node: int, *options: str) -> list[str]:
    """Return the command of the agent of a node on this machine, with this interpreter."""
    return python(AGENT_MODULE, "--node", str(node), *options)


def send_prepare(stream: Stream, job: Job, node: int, *, one_machine: bool = False) -> None:
    """Have a node's agent prestart its workers; with `one_machine`, all nodes share its GPUs."""
    described, workers = _prepared(job)
    tasks = workers[node]
    shared = (sum(workers[:node]), job.workers) if one_machine else (0, tasks)
    with suppress(OSError):  # the agent is gone, as the end of its stream shows
        stream.send(Prepare(described, job.backend, job.device, job.node_timeout, job.spare_processes, tasks, *shared))


@lru_cache(1)
def _prepared(job: Job) -> tuple[str, Sequence[int]]:
    return json.dumps(job.model_dump(mode="json")), job.workers_by_node


def end_lost(channel: NodeChannel, agents: list[AgentProcess]) -> None:
    """End a lost node's carrier, and remove it and the agent's temporary files on this machine."""
    channel.cut_off()
    if channel.process is not None:
        end_agents([channel.process], patience_seconds=1.0)
        agents[:] = [agent for agent in agents if agent is not channel.process]
    channel.stream.close()
    if channel.scratch is not None:
        remove_scratch(channel.scratch)


def end_agents(agents: Sequence[AgentProcess], patience_seconds: float = 5.0) -> None:
    """Close the agents' input, and kill those that have not ended after this time."""
    for agent in agents:
        if agent.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended
                agent.stdin.close()
    deadline = time.monotonic() + patience_seconds
    for agent in agents:
        try:
            agent.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
