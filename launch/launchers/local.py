"""The local launcher: every node is an agent that this process starts on this machine, in a virtual node or on the host's own network."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ...core.errors import UsageError
from ...core.job import Job
from ...engine.protocol.transport import start_over_stdio
from ..node.fork_server_client import ForkServer, open_fork_server
from ..node.scratch import remove_scratch
from ..virtual.errors import MissingCapabilityError, NetworkLostError
from .base import AgentProcess, Launcher, LauncherDefaults, NodeChannel, StartedAgent, agent_command, end_agents, end_lost, send_prepare
from .request import LauncherPlugin, LaunchRequest

if TYPE_CHECKING:
    from ..virtual.network import VirtualNetwork

__all__ = ["LAUNCHER", "LocalLauncher", "make"]


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher of a run whose nodes are all on this machine. Raises UsageError where they are to be elsewhere."""
    elsewhere = "--hosts" if run.hosts else run.membership.contract if run.membership is not None else None
    if elsewhere is not None:
        raise UsageError(
            f"launcher: 'local' starts all nodes on this machine, and {elsewhere} has them elsewhere; leave one of the two out"
        )
    return LocalLauncher(run.job, run.warn)


LAUNCHER = LauncherPlugin(make)


@dataclass
class LocalLauncher(LauncherDefaults):
    """Starts agents as children. `warn` is called with a sentence for the user.

    Depends on the job alone, so that agents can load while their driver does.
    """

    job: Job
    warn: Callable[[str], None]
    network: VirtualNetwork | None = None
    _network_lost: bool = False
    _starter: HostStarter | NamespaceStarter | None = None
    _fork_server: ForkServer | None = None
    _cleanup: ExitStack = field(default_factory=ExitStack)
    _channels: list[NodeChannel] = field(default_factory=list)
    _agents: list[AgentProcess] = field(default_factory=list)

    def prestart(self) -> None:
        """Start the agents, which load what they need meanwhile."""
        self.start()

    def start(self) -> list[NodeChannel]:
        """Start one agent a node; a second call returns the same ones.

        Raises UsageError where isolation was asked for and is not possible here.
        """
        if not self._channels:
            self._fork_server = open_fork_server(self.job)
            network = self._virtual_network()
            self._starter = NamespaceStarter(network) if network else HostStarter()
            self._channels.extend(self._started(node) for node in range(self.job.nodes))
        return self._channels

    def _started(self, node: int) -> NodeChannel:
        assert self._starter is not None
        options = ["--parent", str(os.getpid())]
        if self._fork_server is None:
            agent = self._starter.start(node, agent_command(node, *options))
        else:
            with self._fork_server.connect(*self._starter.place(node)) as connection:
                options += ["--fork-server", str(connection.fileno())]
                agent = self._starter.start(node, agent_command(node, *options), [connection.fileno()])
        self._agents.append(agent.process)
        send_prepare(agent.stream, self.job, node, one_machine=True)
        channel = NodeChannel(node, agent.stream, agent.address, agent.isolated, agent.cores, agent.shares_files, agent.process)
        channel.fork_server = None if self._fork_server is None else self._fork_server.describe_end
        return channel

    def replace(self, node: int) -> NodeChannel | None:
        """Start another agent in the same virtual node, or on this host; in a network of the same kind where the holder has ended."""
        end_lost(self._channels[node], self._agents)
        if self._network_lost:
            self._make_network_again()
        self._channels[node] = self._started(node)
        return self._channels[node]

    def close(self) -> None:
        """End the agents (they kill their tasks when their input closes), then what they live in."""
        end_agents(self._agents)
        if self._fork_server is not None:
            self._fork_server.close()
        for channel in self._channels:
            channel.stream.close()
        self._agents.clear()
        self._remove_scratch()
        self._cleanup.close()

    def check(self) -> None:
        """Raise NetworkLostError where the virtual network's holder has ended, once: from then on `replace` makes another network."""
        if self.network is None or self._network_lost:
            return
        try:
            self.network.check()
        except NetworkLostError:
            self._network_lost = True
            raise

    def kill(self) -> None:
        """Kill the agents at once, and who has forked tasks; the tasks follow them by the parent-death signal."""
        for agent in self._agents:
            agent.kill()
        if self._fork_server is not None:
            self._fork_server.kill()
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        """Remove the temporary files of agents that were killed; the others have removed their own."""
        for channel in self._channels:
            if channel.scratch is not None:
                remove_scratch(channel.scratch)

    def _virtual_network(self) -> VirtualNetwork | None:
        """Start the virtual network, or return None where the nodes are to share, or have to share, the host's."""
        shaped = self.job.bandwidth is not None or self.job.cores_per_node is not None
        if self.job.network == "host":
            self._warn_about_host("as asked by --network host")
            return None
        if self._alone and not shaped and self.job.network == "auto":
            return None
        self._check_cores()
        from ..virtual.network import VirtualNetwork

        network = VirtualNetwork(self.job.nodes, self.job.bandwidth_bits_per_second, self.job.cores_of)
        try:
            self.network = self._cleanup.enter_context(network)
        except MissingCapabilityError as lack:
            if lack.capability != "namespaces" or self.job.network == "isolated" or shaped:
                raise
            self._warn_about_host(str(lack))
        return self.network

    def _make_network_again(self) -> None:
        """Make a network like the one that was lost, which goes with whatever is left in it. Raises OSError where that cannot be done."""
        assert self.network is not None
        self.network.close()
        try:
            self.network.start()
        except (MissingCapabilityError, RuntimeError) as error:
            raise OSError(f"the virtual network cannot be made again: {error}") from error
        self._network_lost = False

    def _check_cores(self) -> None:
        """Raise UsageError where a node is to have more cores than there are: the limit would be one in name alone."""
        if self.job.cores_per_node is None:
            return
        from ...monitor.host import cores_available

        there, most = cores_available(), max(self.job.cores_per_node)
        if there is not None and most > there:
            allowed = f"at most {there:g} cores for a node, which is what this machine has for this command"
            raise UsageError.of("cores_per_node", f"{most:g}", allowed)

    @property
    def _alone(self) -> bool:
        """Whether a single task does it all, and needs no network."""
        return self.job.workers == 1 and self.job.mode == "sync"

    def _warn_about_host(self, why: str) -> None:
        if self._alone:
            return
        text = f"all nodes share 127.0.0.1 ({why}); traffic is counted per task from its sockets"
        from ...backends.loading import load_backend

        own = load_backend(self.job.backend).capabilities.host_network_warning
        self.warn(f"{text}; {own}" if own else text)


class HostStarter:
    """Starts agents on this host, all on 127.0.0.1."""

    name = "this host"

    def start(self, node: int, command: Sequence[str], descriptors: Sequence[int] = ()) -> StartedAgent:
        """Start an agent, which inherits `descriptors`; see `AgentStarter`."""

        def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, pass_fds=descriptors, **options)

        started = start_over_stdio(popen, command)
        return StartedAgent(*started, "127.0.0.1", isolated=False, shares_files=True)

    def place(self, node: int) -> tuple[dict[str, int], str]:
        """Return what a process joins to be on the node: nothing; see `VirtualNetwork.place`."""
        return {}, "-"


@dataclass(frozen=True)
class NamespaceStarter:
    """Starts each agent in a virtual node, which has an address, counters and maybe a CPU limit of its own."""

    network: VirtualNetwork
    name = "virtual nodes"

    def start(self, node: int, command: Sequence[str], descriptors: Sequence[int] = ()) -> StartedAgent:
        """Start an agent, which inherits `descriptors`; see `AgentStarter`."""
        started = start_over_stdio(partial(self.network.popen, node, pass_fds=descriptors), command)
        return StartedAgent(*started, self.network.addresses[node], isolated=True, cores=self.network.cores(node), shares_files=True)

    def place(self, node: int) -> tuple[dict[str, int], str]:
        """Return what a process joins to be on the node."""
        return self.network.place(node)
