"""The local launcher: every agent is a child, in a virtual node or on the host's network."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ...core.errors import UsageError
from ...core.job import Job
from ...engine.protocol.transport import start_over_stdio
from ..node.fork_server_client import ForkServer, open_fork_server
from ..node.scratch import remove_scratch
from ..virtual.namespaces import MissingCapabilityError, NetworkLostError
from .base import AgentProcess, Launcher, LauncherDefaults, NodeChannel, agent_command, end_agents, end_lost, send_prepare
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
            self._make_network()
            self._channels.extend(self._started(node) for node in range(self.job.nodes))
        return self._channels

    def _started(self, node: int) -> NodeChannel:
        network, fork_server = self.network, self._fork_server
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen if network is None else partial(network.popen, node)
        command = agent_command(node, "--parent", str(os.getpid()))
        if fork_server is None:
            process, stream = start_over_stdio(popen, command)
        else:
            with fork_server.connect(*(({}, "-") if network is None else network.place(node))) as connection:
                command += ["--fork-server", str(connection.fileno())]
                process, stream = start_over_stdio(partial(popen, pass_fds=[connection.fileno()]), command)
        self._agents.append(process)
        send_prepare(stream, self.job, node, one_machine=True)
        address, cores = ("127.0.0.1", None) if network is None else (network.addresses[node], network.cores(node))
        described = None if fork_server is None else fork_server.describe_end
        return NodeChannel(node, stream, address, network is not None, cores, True, process, fork_server=described)

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

    def _make_network(self) -> None:
        """Make the virtual network, unless the job needs none or none is possible."""
        shaped = self.job.bandwidth is not None or self.job.cores_per_node is not None
        if self.job.network == "host":
            self._warn_about_host("as asked by --network host")
            return
        if self._is_single_process and not shaped and self.job.network == "auto":
            return
        self._check_cores()
        from ..virtual.network import VirtualNetwork

        network = VirtualNetwork(self.job.nodes, self.job.bandwidth_bits_per_second, self.job.cores_of)
        try:
            self.network = self._cleanup.enter_context(network)
        except MissingCapabilityError as error:
            if error.capability != "namespaces" or self.job.network == "isolated" or shaped:
                raise
            self._warn_about_host(str(error))

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
    def _is_single_process(self) -> bool:
        return self.job.workers == 1 and self.job.mode == "sync"

    def _warn_about_host(self, why: str) -> None:
        if self._is_single_process:
            return
        text = f"all nodes share 127.0.0.1 ({why}); traffic is counted per task from its sockets"
        from ...backends.loading import load_backend

        backend_warning = load_backend(self.job.backend).capabilities.host_network_warning
        self.warn(f"{text}; {backend_warning}" if backend_warning else text)
