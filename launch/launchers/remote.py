"""The launcher of nodes on other machines: a command of the system's starts an agent on each, and carries its input and output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import RunFailedError, UsageError
from ...core.job import Job
from ...core.settings.sweeps import value_text
from ..node.scratch import remove_scratch
from ..preflight.findings import Finding
from .base import AGENT_MODULE, AgentProcess, AgentStarter, LauncherDefaults, NodeChannel, end_agents, end_lost, send_prepare
from .host_checks import HostChecks, refuse, remote_python
from .host_list import Host

__all__ = ["RemoteLauncher", "refuse_virtual_nodes", "shape_of_hosts"]

END_SECONDS = 10.0
"""How long an agent elsewhere may take to end its tasks and itself, and what has started it to hear of that."""


def shape_of_hosts(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the settings that a list of hosts decides, as the command line would have them: nodes, and processes where those are said."""
    counts = [host.processes for host in hosts]
    shape = {"nodes": str(len(hosts))}
    if any(count is not None for count in counts):
        shape["procs_per_node"] = ",".join(str(count or 1) for count in counts)
    return shape


def refuse_virtual_nodes(job: Job, contract: str) -> None:
    """Raise UsageError for what only virtual nodes have, as the nodes are machines that `contract` names."""
    virtual = {"bandwidth": job.bandwidth, "cores_per_node": job.cores_per_node, "network": job.network == "isolated" or None}
    for key, limit in virtual.items():
        if limit is not None:
            shown = job.network if key == "network" else value_text(limit)
            raise UsageError(f"{key}: got {shown!r}, which is for virtual nodes; these were started by {contract}. Leave it out.")


@dataclass
class RemoteLauncher(LauncherDefaults):
    """Starts an agent a node by `starter`, with the interpreter `python` of the node: by default the path of this one.

    The hosts are looked at meanwhile; where one of them cannot take part, nothing begins, and a table says what is wrong where.
    """

    job: Job
    starter: AgentStarter
    python: Path | None = None
    warn: Callable[[str], None] = lambda text: None
    relocate: Callable[[int], None] = lambda node: None
    """Has the next start of a node whose host is lost be on another host, where there is one."""
    _checks: HostChecks | None = None
    _channels: list[NodeChannel] = field(default_factory=list)
    _agents: list[AgentProcess] = field(default_factory=list)

    def prestart(self) -> None:
        """Start the probes and the agents, which are on their way while the driver loads. Raises RunFailedError where one cannot be."""
        if self._channels:
            return
        self._checks = HostChecks(self.starter, self.job.nodes, self.python)
        self._checks.start()
        try:
            self._channels.extend(self._started(node) for node in range(self.job.nodes))
        except OSError as error:
            raise RunFailedError(f"{self.starter.name} cannot start an agent: {error}") from error

    def _started(self, node: int) -> NodeChannel:
        agent = self.starter.start(node, remote_python(self.python, AGENT_MODULE, "--node", str(node), "--remote"))
        self._agents.append(agent.process)
        send_prepare(agent.stream, self.job, node)
        channel = NodeChannel(node, agent.stream, agent.address, agent.isolated, agent.cores, agent.shares_files, agent.process)
        channel.host, channel.explain = agent.host, agent.explain
        return channel

    def replace(self, node: int) -> NodeChannel | None:
        """Start another agent on the node's host, or on a spare one where there is one; whether it can take part shows when it greets."""
        end_lost(self._channels[node], self._agents)
        self.relocate(node)
        self._channels[node] = self._started(node)
        return self._channels[node]

    def start(self) -> list[NodeChannel]:
        """Start one agent a node, and await what the probes say; a second call returns the same channels.

        Raises UsageError or RunFailedError, with a table, where a host cannot take part, and InterruptedRunError.
        """
        self.prestart()
        if self._checks is not None:
            found = self._checks.findings(self.job.start_timeout, self.job)
            refuse(found)
            for one in found:
                if one.state == "odd":
                    self.warn(f"{one.host}: {one.what}: {one.found}")
            self._checks.close()
            self._checks = None
        return self._channels

    def look(self, timeout_seconds: float) -> list[Finding]:
        """Return what there is to say of the hosts within so many seconds, for any run; see `LooksAtHosts`."""
        return self._look_at(self.job.nodes, timeout_seconds, self.job.workers_by_node)

    def _look_at(self, hosts: int, timeout_seconds: float, workers: Sequence[int] = ()) -> list[Finding]:
        self._checks = HostChecks(self.starter, hosts, self.python, workers)
        return self._checks.findings(timeout_seconds)

    def close(self) -> None:
        """End the probes, and the agents by the end of their input: they kill their tasks then."""
        if self._checks is not None:
            self._checks.close()
            self._checks = None
        end_agents(self._agents, END_SECONDS)
        for channel in self._channels:
            channel.stream.close()
        self._agents.clear()

    def interrupt(self) -> None:
        """Have a `start` that waits for the probes raise InterruptedRunError."""
        if self._checks is not None:
            self._checks.interrupt()

    def kill(self) -> None:
        """End what carries the channels; the agents and probes end with it."""
        if self._checks is not None:
            self._checks.kill()
        for agent in self._agents:
            agent.terminate()
        for channel in self._channels:
            if channel.scratch is not None:
                remove_scratch(channel.scratch)
