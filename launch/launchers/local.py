"""The local launcher: every agent is a child, in a virtual node or on the host's network."""

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
from ..virtual.namespaces import MissingCapabilityError, NetworkLostError
from .base import AgentProcess, Launcher, LauncherDefaults, NodeChannel, StartedAgent, agent_command, end_agents, end_lost, send_prepare
from .registry import LauncherPlugin, LaunchRequest

if TYPE_CHECKING:
    from ..virtual.network import VirtualNetwork


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher of a run on this machine. Raises UsageError for nodes elsewhere."""
    elsewhere = "--hosts" if run.hosts else run.membership.contract if run.membership is not None else None
    if elsewhere is not None:
        raise UsageError(
            f"launcher: 'local' starts all nodes on this machine, and {elsewhere} has them elsewhere; leave one of the two out"
        )
    return LocalLauncher(run.job, run.warn)


LAUNCHER = LauncherPlugin(make)


@dataclass
class LocalLauncher(LauncherDefaults):
    """Starts agents as children, which load while the driver does. `warn` logs for the user."""

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
        """Start the agents, which load their code while the driver does."""
        self.start()

    def start(self) -> list[NodeChannel]:
        """Start one agent per node; idempotent. Raises UsageError if isolation is impossible."""
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
        """Replace an agent in its place, or in a new network if the network's holder has ended."""
        end_lost(self._channels[node], self._agents)
        if self._network_lost:
            self._make_network_again()
        self._channels[node] = self._started(node)
        return self._channels[node]

    def close(self) -> None:
        """End the agents and thereby their tasks, then the network."""
        end_agents(self._agents)
        if self._fork_server is not None:
            self._fork_server.close()
        for channel in self._channels:
            channel.stream.close()
        self._agents.clear()
        self._remove_scratch()
        self._cleanup.close()

    def check(self) -> None:
        """Raise NetworkLostError once if the network's holder has ended; `replace` then renews it."""
        if self.network is None or self._network_lost:
            return
        try:
            self.network.check()
        except NetworkLostError:
            self._network_lost = True
            raise

    def kill(self) -> None:
        """Kill the agents and the fork server; tasks end by the parent-death signal."""
        for agent in self._agents:
            agent.kill()
        if self._fork_server is not None:
            self._fork_server.kill()
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        for channel in self._channels:
            if channel.scratch is not None:
                remove_scratch(channel.scratch)

    def _virtual_network(self) -> VirtualNetwork | None:
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
        assert self.network is not None
        self.network.close()
        try:
            self.network.start()
        except (MissingCapabilityError, RuntimeError) as error:
            raise OSError(f"the virtual network cannot be made again: {error}") from error
        self._network_lost = False

    def _check_cores(self) -> None:
        if self.job.cores_per_node is None:
            return
        from ...monitor.host import cores_available

        available, most = cores_available(), max(self.job.cores_per_node)
        if available is not None and most > available:
            allowed = f"at most {available:g} cores for a node, which is what this machine has for this command"
            raise UsageError.of("cores_per_node", f"{most:g}", allowed)

    @property
    def _alone(self) -> bool:
        return self.job.workers == 1 and self.job.mode == "sync"

    def _warn_about_host(self, why: str) -> None:
        if self._alone:
            return
        text = f"all nodes share 127.0.0.1 ({why}); traffic is counted per task from its sockets"
        from ...backends.loading import load_backend

        backend_warning = load_backend(self.job.backend).capabilities.host_network_warning
        self.warn(f"{text}; {backend_warning}" if backend_warning else text)


class HostStarter:
    """Starts agents on this host, all on 127.0.0.1."""

    name = "this host"

    def start(self, node: int, command: Sequence[str], descriptors: Sequence[int] = ()) -> StartedAgent:
        """Start an agent that inherits `descriptors`; see `AgentStarter`."""

        def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, pass_fds=descriptors, **options)

        started = start_over_stdio(popen, command)
        return StartedAgent(*started, "127.0.0.1", isolated=False, shares_files=True)

    def place(self, node: int) -> tuple[dict[str, int], str]:
        """Return no namespaces or CPU groups; see `VirtualNetwork.place`."""
        return {}, "-"


@dataclass(frozen=True)
class NamespaceStarter:
    """Starts each agent in a virtual node."""

    network: VirtualNetwork
    name = "virtual nodes"

    def start(self, node: int, command: Sequence[str], descriptors: Sequence[int] = ()) -> StartedAgent:
        """Start an agent that inherits `descriptors`; see `AgentStarter`."""
        started = start_over_stdio(partial(self.network.popen, node, pass_fds=descriptors), command)
        return StartedAgent(*started, self.network.addresses[node], isolated=True, cores=self.network.cores(node), shares_files=True)

    def place(self, node: int) -> tuple[dict[str, int], str]:
        """See `VirtualNetwork.place`."""
        return self.network.place(node)
