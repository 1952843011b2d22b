"""Runs whose processes somebody else started: the driver awaits the others, an agent or standby joins the driver."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.console import note
from ..core.errors import RunFailedError, UsageError
from ..core.job import Job
from ..core.process import python
from ..engine.messages import Message, Stream
from .agent import Agent
from .channel import HandshakeError, accept, connect, start_over_stdio
from .contract import Place
from .local import NodeChannel, close_input, send_prepare

__all__ = ["ExternalLauncher", "apply_contract", "join"]

OWN_TO_EACH_NODE = frozenset({"out", "name", "data_dir", "mlflow", "mlflow_experiment"})
"""Fields that may differ between the nodes of one job."""


def apply_contract(job: Job, sources: Mapping[str, str], place: Place) -> tuple[Job, dict[str, str]]:
    """Return the job with the shape that the contract gives it. Raises UsageError where the user asked for another shape."""
    for key, value in place.shape.items():
        given = getattr(job, key)
        if sources[key] != "default" and given != value:
            raise UsageError(
                f"{key}: got {given} (from {sources[key]}), but {place.contract} says {value}; leave it out or make them agree"
            )
    if job.bandwidth is not None or job.cores_per_node is not None or job.network == "isolated":
        raise UsageError(
            f"network: --bandwidth, --cores-per-node and --network isolated are for virtual nodes; these were started by {place.contract}"
        )
    if "ps" in place.shape and job.mode == "sync":
        raise UsageError(f"mode: got 'sync', but {place.contract} has parameter servers; allowed: async")
    shaped = Job.model_validate({**job.model_dump(), **place.shape})
    return shaped, {**sources, **dict.fromkeys(place.shape, place.contract)}


def _comparable(job: Job) -> dict[str, Any]:
    return {key: value for key, value in job.model_dump(mode="json").items() if key not in OWN_TO_EACH_NODE}


@dataclass
class ExternalLauncher:
    """Awaits the agents of nodes 1 … and all standbys on the rendezvous; node 0's agent is a child of this process."""

    job: Job
    place: Place
    secret: bytes
    _server: socket.socket | None = None
    _own: subprocess.Popen[bytes] | None = None
    _channels: list[NodeChannel] = field(default_factory=list)
    _standbys: list[Stream] = field(default_factory=list)
    _exit_code: int = 1

    def start(self) -> list[NodeChannel]:
        """Listen, start the own agent, and await everybody. Raises RunFailedError, naming who is missing, after the start time-out."""
        if not self._channels:
            self._channels = self._await_everybody()
        return self._channels

    def _await_everybody(self) -> list[NodeChannel]:
        self._server = self._listen()
        command = python("crosstrain.launch.agent", "--node", "0", "--parent", str(os.getpid()))
        self._own, stream = start_over_stdio(subprocess.Popen, command)
        channels = {0: self._channel(0, stream, self._own_address(), self._own)}
        standbys: set[tuple[int, int]] = set()
        deadline = time.monotonic() + self.job.start_timeout
        while len(channels) < self.job.nodes or len(standbys) < self.place.standbys:
            stream, peer, message = self._next_joiner(deadline, channels, len(standbys))
            node, local_rank = message["node"], message["local_rank"]
            problem = self._problem(message, channels, standbys)
            if problem:
                stream.send(Message("refused", {"reason": problem}))
                raise UsageError(f"process {local_rank} of node {node} ({peer}): {problem}")
            stream.send(Message("welcome", {}))
            if local_rank == 0:
                channels[node] = self._channel(node, stream, _resolved(self.place.addresses[node]) if self.place.addresses else peer, None)
            else:
                standbys.add((node, local_rank))
                self._standbys.append(stream)
        return [channels[node] for node in sorted(channels)]

    def close(self) -> None:
        """Let the standbys go and end the own agent."""
        for stream in self._standbys:
            try:
                stream.send(Message("finish", {"exit_code": self._exit_code}))
            except OSError:
                continue
        if self._own is not None:
            close_input(self._own)
            try:
                self._own.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._own.kill()
                self._own.wait()
        if self._server is not None:
            self._server.close()

    def kill(self) -> None:
        """Kill the own agent; the others end with their channels."""
        if self._own is not None:
            self._own.kill()

    def ended(self, exit_code: int) -> None:
        """Remember what the standbys are to exit with."""
        self._exit_code = exit_code

    def _listen(self) -> socket.socket:
        host, ports = self.place.rendezvous
        for port in ports:
            try:
                return socket.create_server((host, port), backlog=64)
            except OSError as error:
                problem = error
        tried = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else str(ports[0])
        raise UsageError(f"cannot listen for the other nodes on {host}, port {tried}: {problem.strerror}")

    def _next_joiner(self, deadline: float, channels: Mapping[int, NodeChannel], standbys: int) -> tuple[Stream, str, Message]:
        """Return the next process that knows the secret; those that do not are named on standard error and turned away."""
        if self._server is None:
            raise RuntimeError("not listening")
        while (remaining := deadline - time.monotonic()) > 0:
            self._server.settimeout(min(remaining, 0.5))
            try:
                connection, peer = self._server.accept()
            except TimeoutError:
                continue
            try:
                stream = accept(connection, self.secret)
                message = stream.receive()
            except OSError as error:
                note(f"trainer: turned away a connection from {peer[0]}: {error}")
                continue
            if message is not None and message.kind == "join":
                return stream, peer[0], message
        missing = [node for node in range(self.job.nodes) if node not in channels]
        waiting = f"nodes {missing}" if missing else f"{self.place.standbys - standbys} more processes"
        raise RunFailedError(
            f"{waiting} did not join within {self.job.start_timeout:g} s (--start-timeout); was the same command started everywhere?"
        )

    def _problem(self, message: Message, channels: Mapping[int, NodeChannel], standbys: set[tuple[int, int]]) -> str | None:
        place = (message["node"], message["local_rank"])
        if not 0 <= place[0] < self.job.nodes:
            return f"there is no node {place[0]} among {self.job.nodes}"
        if (place[1] == 0 and place[0] in channels) or place in standbys:
            return f"node {place[0]} has joined already; is a rank used twice?"
        ours, theirs = _comparable(self.job), message["job"]
        different = sorted(key for key in ours if ours[key] != theirs.get(key))
        if different:
            return "its job differs: " + ", ".join(f"{key} {theirs.get(key)!r} instead of {ours[key]!r}" for key in different)
        return None

    def _channel(self, node: int, stream: Stream, address: str, process: subprocess.Popen[bytes] | None) -> NodeChannel:
        send_prepare(stream, self.job)
        return NodeChannel(node, stream, address, None, None, process is not None, process, self.place.ports)

    def _own_address(self) -> str:
        """Return node 0's address: what the contract says, else what the rendezvous stands for; names are resolved for the tasks."""
        return _resolved(self.place.addresses[0] if self.place.addresses else self.place.rendezvous[0])


def _resolved(host: str) -> str:
    """Return a host's address: inside a node names may not resolve. Raises UsageError where it does not resolve here either."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(f"the host {host!r} has no address: {error.strerror}") from error


def join(job: Job, place: Place, secret: bytes) -> int:
    """Join the driver as a node's agent or as a standby; return the run's exit code when it has ended."""
    stream = _reach(place, secret, job.start_timeout)
    stream.send(Message("join", {"node": place.node, "local_rank": place.local_rank, "job": _comparable(job)}))
    answer = stream.receive()
    if answer is None or answer.kind != "welcome":
        reason = answer["reason"] if answer is not None and answer.kind == "refused" else "it closed the connection"
        raise UsageError(f"the driver turned this process away: {reason}")
    if place.local_rank == 0:
        return Agent(stream, place.node).serve()
    while (message := stream.receive()) is not None:
        if message.kind == "finish":
            return int(message["exit_code"])
    raise RunFailedError("the driver has gone")


def _reach(place: Place, secret: bytes, timeout_seconds: float) -> Stream:
    """Connect to the driver, which may not be listening yet. Raises RunFailedError after the time, HandshakeError for a wrong secret."""
    host, ports = place.rendezvous
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        for port in ports:
            try:
                return connect((host, port), secret, timeout_seconds=5.0)
            except HandshakeError as error:
                if len(ports) == 1:
                    raise UsageError(f"the handshake with {host}:{port} failed: {error}") from error
            except OSError:
                continue
        time.sleep(0.2)
    raise RunFailedError(f"the driver could not be reached at {host}, port {ports[0]}, within {timeout_seconds:g} s (--start-timeout)")
