"""The launcher of nodes on other machines: a command of the system's starts an agent on each, and carries its input and output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import UsageError
from ...core.job import Job
from ...core.settings.sweeps import value_text
from .base import AgentStarter, NodeChannel, agent_command, end_agents, send_prepare
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
class RemoteLauncher:
    """Starts an agent a node by `starter`, with the interpreter `python` of the node: by default the path of this one."""

    job: Job
    starter: AgentStarter
    python: Path | None = None
    _channels: list[NodeChannel] = field(default_factory=list)
    _agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def prestart(self) -> None:
        """Start the agents, which are on their way while the driver loads."""
        self.start()

    def start(self) -> list[NodeChannel]:
        """Start one agent a node; a second call returns the same ones. Whether they came to life is heard when they greet."""
        if not self._channels:
            for node in range(self.job.nodes):
                agent = self.starter.start(node, self._command(node))
                self._agents.append(agent.process)
                send_prepare(agent.stream, self.job, node)
                channel = NodeChannel(node, agent.stream, agent.address, agent.isolated, agent.cores, False, agent.process)
                channel.host, channel.explain = agent.host, agent.explain
                self._channels.append(channel)
        return self._channels

    def close(self) -> None:
        """End the agents by the end of their input: they kill their tasks then."""
        end_agents(self._agents, END_SECONDS)
        for channel in self._channels:
            channel.stream.close()
        self._agents.clear()

    def interrupt(self) -> None:
        """Nothing waits for others here."""

    def kill(self) -> None:
        """Kill what carries the channels; the agents end with them."""
        for agent in self._agents:
            agent.kill()

    def check(self) -> None:
        """Nothing to do: the nodes live in nothing of ours."""

    def ended(self, exit_code: int) -> None:
        """Nothing to do: nobody else waits for the code."""

    def _command(self, node: int) -> list[str]:
        """Return the agent's command there. It finds modules where this process does: a model under development lies on PYTHONPATH."""
        _, *arguments = agent_command(node, "--remote")
        command = [str(self.python or sys.executable), *arguments]
        folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        if not folders:
            return command
        return ["env", f"PYTHONPATH={os.pathsep.join(os.path.abspath(folder) for folder in folders)}", *command]
