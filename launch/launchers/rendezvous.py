"""The launcher of externally started processes: the driver waits until all have joined."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...core.console import note
from ...core.errors import InterruptedRunError, RunFailedError, UsageError
from ...core.job import Job
from ...core.listener import AuthenticatingListener
from ...engine.protocol.join_messages import JoinRequest, Welcome
from ...engine.protocol.messages import ALIVE, INTERVAL_SECONDS, PROTOCOL, MessageParser, Stream
from ...engine.protocol.node_messages import Finish
from ...engine.protocol.transport import start_over_stdio
from .base import Launcher, LauncherDefaults, NodeChannel, agent_command, end_agents, send_prepare
from .dial_back import Joiner, prove, refuse
from .environments import Membership, NameResolver
from .joining import another_protocol, difference
from .registry import LauncherPlugin, LaunchRequest
from .ssh import refuse_virtual_nodes

BACKLOG = 1024  # connections that wait to be accepted: as many as nodes may be started at the same moment
LOOK_SECONDS = 0.2  # interval of looking for an interrupt while waiting for the others
_Join = Joiner[JoinRequest]
_JOINS = MessageParser(JoinRequest)


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher for external processes. Raises UsageError without a membership."""
    if run.membership is None:
        raise UsageError(
            "launcher: 'rendezvous' awaits nodes that are started elsewhere; give --rendezvous and --node-rank on each of them"
        )
    return ExternalLauncher(run.job, run.membership, run.secret, run.asked)


LAUNCHER = LauncherPlugin(make)


def apply_membership(job: Job, sources: Mapping[str, str], place: Membership) -> tuple[Job, dict[str, str]]:
    """Return the job with the contract's shape, and its sources. Raises UsageError on conflict."""
    for key, value in place.shape.items():
        configured = getattr(job, key)
        if not sources[key].startswith(("default", "run ")) and configured != value:
            raise UsageError(f"{key}: got {configured}, but {place.contract} says {value}; leave it out or make them agree")
    refuse_virtual_nodes(job, place.contract)
    if "ps" in place.shape and job.mode == "sync":
        raise UsageError(f"mode: got 'sync', but {place.contract} has parameter servers; allowed: async")
    shaped = Job.model_validate({**job.model_dump(), **place.shape})
    return shaped, {**sources, **dict.fromkeys(place.shape, place.contract)}


@dataclass
class ExternalLauncher(LauncherDefaults):
    """Awaits the agents of nodes 1 … and all standbys; node 0's agent is its own child."""

    job: Job
    place: Membership
    secret: bytes
    asked: Mapping[str, Any]
    _listener: AuthenticatingListener[_Join] | None = None
    _agent: subprocess.Popen[bytes] | None = None
    _channels: list[NodeChannel] = field(default_factory=list)
    _standbys: list[Stream] = field(default_factory=list)
    _exit_code: int = 1
    _arrived: queue.Queue[tuple[_Join, str]] = field(default_factory=queue.Queue)
    _over: str | None = None
    _interrupted: bool = False
    _names: NameResolver = field(init=False)
    _closing: threading.Event = field(default_factory=threading.Event)
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._names = NameResolver(self.job.start_timeout, lambda: self._interrupted)

    def start(self) -> list[NodeChannel]:
        """Listen, start node 0's agent, and await the others. Raises RunFailedError."""
        if self._channels:
            return self._channels
        proof = partial(prove, secret=self.secret, joins=_JOINS)
        self._listener = AuthenticatingListener(self._listen(), proof, self._arrive, lambda text: note(f"trainer: {text}"))
        why = "the run did not start"
        try:
            channels = self._gather()
            why = "every process of this run has joined already; is a rank used twice?"
        except UsageError as error:
            why = f"{why}: {error}"
            raise
        finally:
            self._shut_door(why)
        self._channels = [channels[node] for node in sorted(channels)]
        return self._channels

    def _gather(self) -> dict[int, NodeChannel]:
        command = agent_command(0, "--parent", str(os.getpid()))
        self._agent, stream = start_over_stdio(subprocess.Popen, command)
        channels = {0: self._channel(0, stream, self._address(0), self._agent)}
        standbys: set[tuple[int, int]] = set()
        deadline = time.monotonic() + self.job.start_timeout
        while self._awaits(channels) or len(standbys) < self.place.standbys:
            joiner, peer = self._next_joiner(deadline, channels, len(standbys))
            stream, message = joiner
            node, local_rank = message.node, message.local_rank
            if self.place.starts_again and local_rank == 0 and 0 < node < self.job.nodes and node in channels:
                self._give_up(channels, node, "has been started again")
            problem = self._problem(message, channels, standbys)
            if problem:
                refuse(joiner, problem)
                raise UsageError(f"process {local_rank} of node {node} ({peer}): {problem}")
            try:
                stream.send(Welcome(self.job.node_timeout, PROTOCOL))
                stream.limit_silence(2 * self.job.node_timeout)  # the heartbeat comes first; this is for what nobody reads or writes
            except OSError as error:
                note(f"trainer: process {local_rank} of node {node} ({peer}) went away before it was welcomed: {error}")
                continue  # it joins again, or is missing in the end
            if local_rank == 0:
                channels[node] = self._channel(node, stream, self._address(node) or peer, None)
            else:
                standbys.add((node, local_rank))
                self._standbys.append(stream)
        for stream in self._standbys:
            threading.Thread(target=_send_heartbeats, args=(stream, self._closing), name="alive", daemon=True).start()
        return channels

    def _awaits(self, channels: dict[int, NodeChannel]) -> bool:
        if self.place.starts_again:
            for node in [node for node, channel in channels.items() if channel.stream.peer_ended]:
                self._give_up(channels, node, "has gone before the others had come, and is awaited again")
        return len(channels) < self.job.nodes

    def _give_up(self, channels: dict[int, NodeChannel], node: int, why: str) -> None:
        if node == 0:
            return  # a child of this process, whose end is reported by its channel's reader
        note(f"trainer: node {node} {why}")
        channels.pop(node).stream.cut()

    def close(self) -> None:
        """Release the standbys and end node 0's agent."""
        self._closing.set()
        for stream in self._standbys:
            with contextlib.suppress(OSError):
                stream.send(Finish(self._exit_code))
        if self._agent is not None:
            end_agents([self._agent])
        self._shut_door("the run has ended")

    def interrupt(self) -> None:
        """Make a waiting `start` raise InterruptedRunError soon; safe in a signal handler."""
        self._interrupted = True  # no more than that: the handler may interrupt the queue's own code

    def kill(self) -> None:
        """Kill node 0's agent; the others end with their channels."""
        if self._agent is not None:
            self._agent.kill()

    def ended(self, exit_code: int) -> None:
        """Remember the standbys' exit code."""
        self._exit_code = exit_code

    def _listen(self) -> socket.socket:
        """Listen at the rendezvous, whose name may still resolve to a former address."""
        host, ports = self.place.rendezvous
        while (listening := self._listen_on(self._names.address(host), ports)) is None:
            self._names.wait_for_retry(host, "is not an address of this machine, and node 0 has to have it")
        return listening

    def _listen_on(self, address: str, ports: Sequence[int]) -> socket.socket | None:
        """Return the socket; None if the address is remote. Raises UsageError without a free port."""
        host = self.place.rendezvous[0]
        for port in ports:
            try:
                return socket.create_server((address, port), backlog=BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and address != host:
                    return None
                problem = error
        tried = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else str(ports[0])
        elsewhere = "; node 0 has to have this address" if problem.errno == errno.EADDRNOTAVAIL else ""
        raise UsageError(f"cannot listen for the other nodes on {host}, port {tried}: {problem.strerror}{elsewhere}")

    def _arrive(self, joiner: _Join, host: str) -> None:
        with self._deciding:
            if self._over is None:
                self._arrived.put((joiner, host))
                return
        refuse(joiner, self._over, for_now=True)

    def _shut_door(self, why: str) -> None:
        if self._listener is None:
            return
        self._listener.close()
        with self._deciding:
            self._over = self._over or why
        while not self._arrived.empty():
            refuse(self._arrived.get()[0], why, for_now=True)

    def _next_joiner(self, deadline: float, channels: Mapping[int, NodeChannel], standbys: int) -> tuple[_Join, str]:
        while not self._interrupted:
            left = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return self._arrived.get(timeout=max(0.0, min(left, LOOK_SECONDS)))
            if left <= 0:
                within = f"within {self.job.start_timeout:g} s (--start-timeout)"
                raise RunFailedError(f"{self._awaited(channels, standbys)} did not join {within}; was the same command started everywhere?")
        raise InterruptedRunError(f"interrupted by the user, while {self._awaited(channels, standbys)} had not joined yet")

    def _awaited(self, channels: Mapping[int, NodeChannel], standbys: int) -> str:
        missing = [node for node in range(self.job.nodes) if node not in channels]
        return f"nodes {missing}" if missing else f"{self.place.standbys - standbys} more processes"

    def _problem(self, message: JoinRequest, channels: Mapping[int, NodeChannel], standbys: set[tuple[int, int]]) -> str | None:
        place = (message.node, message.local_rank)
        if message.protocol != PROTOCOL:
            return another_protocol("it", message.protocol, "the driver")
        if not 0 <= place[0] < self.job.nodes:
            return f"there is no node {place[0]} among {self.job.nodes}"
        if (place[1] == 0 and place[0] in channels) or place in standbys:
            return f"node {place[0]} has joined already; is a rank used twice?"
        if place[1] < 0 or (place[1] > 0 and len(standbys) >= self.place.standbys):
            return f"node {place[0]} has no process {place[1]}; was it started in another way than the driver?"
        return difference(self.asked, message.asked)

    def _channel(self, node: int, stream: Stream, address: str, process: subprocess.Popen[bytes] | None) -> NodeChannel:
        send_prepare(stream, self.job, node)
        return NodeChannel(node, stream, address, None, None, process is not None, process, ports=self.place.ports)

    def _address(self, node: int) -> str:
        if self.place.addresses:
            return self._names.address(self.place.addresses[node])
        return self._names.address(self.place.rendezvous[0]) if node == 0 else ""


def _send_heartbeats(standby: Stream, closing: threading.Event) -> None:
    with contextlib.suppress(OSError):  # its launcher notices its end
        standby.send(ALIVE)
        while not closing.wait(INTERVAL_SECONDS):
            standby.send(ALIVE)
