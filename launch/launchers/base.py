"""What every launcher gives the driver: a channel to the agent of each node."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...core.job import Job
from ...core.process import ending_in_words, python
from ...engine.protocol.messages import Message, PreparedJson, Stream
from ..node.scratch import remove_scratch

__all__ = [
    "AGENT_MODULE",
    "AgentProcess",
    "AgentStarter",
    "Launcher",
    "LauncherDefaults",
    "NodeChannel",
    "StartedAgent",
    "agent_command",
    "end_agents",
    "end_lost",
    "ending_in_words",
    "how_it_ended",
    "send_prepare",
]

AGENT_MODULE = "crosstrain.launch.node.agent"

OWN_END_SECONDS = 0.5
"""How long is waited for the exit code of a child whose channel has ended."""


class _Input(Protocol):
    """What a process reads."""

    def close(self) -> None:
        """End it."""
        ...


class AgentProcess(Protocol):
    """An agent that this process has started, or what has started it on another machine: a child, or what stands for one elsewhere."""

    @property
    def stdin(self) -> _Input | None:
        """Its input, at whose end an agent ends."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, below 0 for a signal. Raises subprocess.TimeoutExpired after so many seconds."""
        ...

    def terminate(self) -> None:
        """Have it end soon; safe in a signal handler, as `kill` is."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


def how_it_ended(process: AgentProcess, explain: Callable[[int], str]) -> str | None:
    """Say how a child has ended whose channel is at its end; None where it does not end. `explain` as in `NodeChannel`."""
    try:
        return explain(process.wait(timeout=OWN_END_SECONDS))
    except subprocess.TimeoutExpired:
        return None


@dataclass(slots=True)
class NodeChannel:
    """The driver's end of one node: its channel, address, and what is known about its resources.

    `address` is empty until the agent has said it, where only that knows it. `host` is the node's name as the user has written it, where he
    has. `isolated`: the node has interfaces of its own, so that their counters are the node's; None where the agent has to find out.
    `cores` is the node's CPU limit, where it has one. `shares_files`: the agent is on this machine, and sees the driver's files. `process`
    is our child, the agent or what has started it on another machine, and `explain` says what its exit code means. `ports` are those that
    a contract assigns to tasks. `scratch` is the folder of temporary files of an agent on this machine. `fork_server` says what has become
    of the fork server of its tasks, where it has one.
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
        """Give the node up at once: kill an agent on this machine, end what carries the channel of another, or the connection itself."""
        if self.process is not None and self.shares_files:
            self.process.kill()
            return
        if self.process is not None:
            self.process.terminate()
        self.stream.cut()


@dataclass(frozen=True, slots=True)
class StartedAgent:
    """An agent that a child of this process is, or has started: the child, the channel over its standard input and output, and its node.

    `address`, `isolated`, `cores`, `host`, `explain` and `shares_files` as in `NodeChannel`.
    """

    process: AgentProcess
    stream: Stream
    address: str
    isolated: bool | None
    cores: float | None = None
    host: str | None = None
    explain: Callable[[int], str] = ending_in_words
    shares_files: bool = False


class AgentStarter(Protocol):
    """Starts a command on a node, with a channel to its standard input and output; where that is, is all that starters differ in.

    The command is one of ours. On another machine its messages begin after the line `AGENT_BEGINS`. An agent on this machine is given
    ``--parent`` with this process's number, so that it ends with it however it ends; the others end with whatever has started them, with
    their input, or when they no longer hear of the driver.
    """

    @property
    def name(self) -> str:
        """What it is called where it cannot start something."""
        ...

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Start `command` on node `node`. Raises OSError where it cannot be started."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """Brings the nodes' agents to life.

    What makes one, `prestart` and `start` raise UsageError where the user has to ask for something else (the command ends with 2), and
    RunFailedError where what was asked for has failed (1); `start` also InterruptedRunError, after `interrupt`. Whatever `prestart` or
    `start` raises, `close` is called. Another exception is taken for a mistake in the launcher, and shown with its traceback.
    """

    def prestart(self) -> None:
        """Begin what can go on while this process still loads its own code; does nothing where a start may have to wait for others."""
        ...

    def start(self) -> Sequence[NodeChannel]:
        """Start or await one agent a node; return their channels in node order. A second call returns the same ones."""
        ...

    def close(self) -> None:
        """End whatever `start` started; bounded in time; a second call does nothing."""
        ...

    def replace(self, node: int) -> NodeChannel | None:
        """Start another agent in the place of a lost node's; return its channel, or None where there is nowhere to start one.

        Does not wait for it. What is left of the lost one is ended first, as far as it can be reached.
        """
        ...

    def interrupt(self) -> None:
        """Have a `start` that waits for others raise InterruptedRunError soon; safe in a signal handler."""
        ...

    def kill(self) -> None:
        """End it at once, without waiting; safe in a signal handler."""
        ...

    def check(self) -> None:
        """Raise RunFailedError where something that the nodes live in has gone."""
        ...

    def ended(self, exit_code: int) -> None:
        """Hear what the run's exit code is, before `close`."""
        ...


class LauncherDefaults:
    """What a launcher does not have to do, for those that have nothing to do there; see `Launcher`."""

    def prestart(self) -> None:
        """Begin nothing before `start`."""

    def replace(self, node: int) -> NodeChannel | None:
        """Return None: there is nowhere to start another agent."""
        return None

    def interrupt(self) -> None:
        """Do nothing: `start` waits for nobody."""

    def check(self) -> None:
        """Do nothing: the nodes live in nothing of ours."""

    def ended(self, exit_code: int) -> None:
        """Do nothing: nobody else waits for the code."""


def agent_command(node: int, *options: str) -> list[str]:
    """Return the command of the agent of a node on this machine, with this interpreter."""
    return python(AGENT_MODULE, "--node", str(node), *options)


def send_prepare(stream: Stream, job: Job, node: int, *, one_machine: bool = False) -> None:
    """Have the agent of node `node` start the tasks that are sure to be there, its workers; which task each of them is it hears later.

    It is the first message to an agent, which answers with its greeting. `one_machine`: all nodes are on one, and share its GPUs.
    """
    described, workers = _prepared(job)
    tasks = workers[node]
    shared = (sum(workers[:node]), job.workers) if one_machine else (0, tasks)
    fields = {"job": described, "tasks": tasks, "workers_before": shared[0], "workers_on_machine": shared[1]}
    try:
        stream.send(Message("prepare", fields))
    except OSError:
        return  # the agent has gone; the end of its stream says so


@lru_cache(1)
def _prepared(job: Job) -> tuple[PreparedJson, Sequence[int]]:
    """Return what the first messages to all agents of a run have in common: the job, and how many workers each node has."""
    return PreparedJson(job.model_dump(mode="json")), job.workers_by_node


def _close_input(agent: AgentProcess) -> None:
    """Close the agent's input, which ends it; one that is gone already is fine."""
    if agent.stdin is None:
        return
    try:
        agent.stdin.close()
    except BrokenPipeError:
        return


def end_lost(channel: NodeChannel, agents: list[AgentProcess]) -> None:
    """End our child that carries the channel of a node which is lost, take it out of `agents`, and remove what its agent has left here."""
    channel.cut_off()
    if channel.process is not None:
        end_agents([channel.process], patience_seconds=1.0)
        agents[:] = [agent for agent in agents if agent is not channel.process]
    channel.stream.close()
    if channel.scratch is not None:
        remove_scratch(channel.scratch)


def end_agents(agents: Sequence[AgentProcess], patience_seconds: float = 5.0) -> None:
    """End our children that are agents, or have started them, by the end of their input; kill whichever takes longer than this."""
    for agent in agents:
        _close_input(agent)
    deadline = time.monotonic() + patience_seconds
    for agent in agents:
        try:
            agent.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
