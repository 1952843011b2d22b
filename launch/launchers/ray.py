"""The launcher of nodes on a Ray cluster, by a client process and an actor per node."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...core.console import note, one_line
from ...core.errors import InterruptedRunError, RunFailedError, UsageError
from ...core.job import Job
from ...core.listener import AuthenticatingListener
from ...core.process import python
from ...engine.protocol.join_messages import CommandJoin
from ...engine.protocol.messages import MessageParser, Stream
from ...engine.protocol.transport import AGENT_BEGINS, start_over_stdio
from ..node.dialled import Summons
from ..preflight.findings import Finding
from .base import Launcher, NodeChannel, StartedAgent, end_agents
from .dial_back import Joiner, LateStream, prove
from .environments import in_ray_job
from .host_list import remote_python
from .ray_messages import (
    EVENTS,
    CommandEnded,
    CommandLine,
    CommandsLost,
    Failed,
    KillCommand,
    Place,
    Placed,
    RayEvent,
    RayRequest,
    StartCommand,
    Waiting,
)
from .registry import LauncherPlugin, LaunchRequest
from .ssh import ErrorLines, RemoteLauncher, end_elsewhere, refuse_virtual_nodes

CLIENT_MODULE = "crosstrain.launch.launchers.ray_client"
LOOK_SECONDS = 0.2  # interval of looking for an interrupt while waiting for nodes
LEAVE_SECONDS = 10.0  # time limit for the client to give the nodes back
LAST_LINES = 4  # lines of a command's standard error that are reported with its end
KILLED = -9
_JOINS = MessageParser(CommandJoin)
_ADDRESS = re.compile(r"auto|(ray://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_][A-Za-z0-9._-]*):[0-9]{1,5}")


def make(run: LaunchRequest) -> Launcher:
    """Return the launcher on a Ray cluster. Raises UsageError for an invalid address or options."""
    address = run.options.get("ray_address", "auto")
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"--ray-address: got {address!r}; allowed: auto, HOST:PORT of a cluster's head, or ray://HOST:PORT.")
    if run.hosts:
        raise UsageError("launcher: 'ray' starts the nodes where Ray gives them; leave --hosts and --hostfile out")
    refuse_virtual_nodes(run.job, "Ray")
    return RayLauncher(run.job, RayStarter(run.job, address, run.python, run.warn), run.python, run.warn)


LAUNCHER = LauncherPlugin(
    make,
    takes=("ray_address", "python"),
    places=in_ray_job,
    nodes_in_words="the nodes of the cluster that runs this job",
    own_cluster=True,
)


@dataclass
class RayLauncher(RemoteLauncher):
    """Awaits Ray's nodes, then proceeds as with any other hosts."""

    starter: RayStarter

    def prestart(self) -> None:
        """Start the client, which requests the nodes and starts commands on them."""
        self.starter.open()
        super().prestart()

    def start(self) -> list[NodeChannel]:
        """Await nodes and findings. Raises as `RemoteLauncher`, and RunFailedError without nodes."""
        self.prestart()
        self.starter.await_nodes()
        return super().start()

    def look(self, timeout_seconds: float) -> list[Finding]:
        """Check all nodes of the cluster with a CPU, also busy ones; see `LooksAtHosts`."""
        self.starter.open(whole_cluster=True)
        self.starter.await_nodes("--timeout")
        return self._look_at(self.starter.nodes, timeout_seconds)

    def close(self) -> None:
        """End probes and agents, and give the nodes back."""
        super().close()
        self.starter.close()

    def interrupt(self) -> None:
        """Make a waiting `start` raise InterruptedRunError soon."""
        self.starter.interrupt()
        super().interrupt()

    def kill(self) -> None:
        """Cut the channels and kill the client, so that agents end and Ray takes the nodes back."""
        super().kill()
        self.starter.kill()

    def check(self) -> None:
        """Raise RunFailedError if the client has ended, as Ray then takes the nodes back."""
        self.starter.check()


class RayStarter:
    """Starts commands on Ray's nodes; a command's channel waits until it has its node."""

    name = "Ray"

    def __init__(self, job: Job, address: str, interpreter: Path | None, warn: Callable[[str], None]) -> None:
        self.nodes = job.nodes
        self._job, self._address, self._python, self._warn = job, address, interpreter, warn
        self._secret = secrets.token_hex(32)
        self._client: subprocess.Popen[bytes] | None = None
        self._errors: ErrorLines | None = None
        self._requests: queue.SimpleQueue[RayRequest | None] = queue.SimpleQueue()
        self._listener: AuthenticatingListener[Joiner[CommandJoin]] | None = None
        self._listening_at: tuple[str, int] | None = None
        self._commands: dict[int, _Command] = {}
        self._unsent: list[_Command] = []
        self._lock = threading.Lock()
        self._waiting = "does not hear of Ray"
        self._failed: str | None = None
        self._interrupted = False
        self._closing = False

    def open(self, *, whole_cluster: bool = False) -> None:
        """Start the client and request the nodes, or one place per node of the cluster; idempotent."""
        if self._client is not None:
            return

        def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stderr=subprocess.PIPE, **options)

        self._client, stream = start_over_stdio(popen, python(CLIENT_MODULE))
        assert self._client.stderr is not None
        self._errors = ErrorLines("Ray", self._client.stderr, should_log=lambda: False)
        job = self._job
        self._requests.put(Place(self._address, job.workers_by_node, job.threads, job.device, whole_cluster))
        for work, name in ((self._send_requests, "to-ray"), (self._receive_events, "from-ray")):
            threading.Thread(target=work, args=(stream,), name=name, daemon=True).start()

    def start(self, node: int, command: Sequence[str]) -> StartedAgent:
        """Request a command on a node or its replacement, without waiting."""
        with self._lock:
            number = len(self._commands)
            started = _Command(node, number, command, self._requests)
            self._commands[number] = started
            if self._failed is not None:
                started.end(None, self._failed)
            elif self._listening_at is None:
                self._unsent.append(started)
            else:
                self._summon(started)
        return StartedAgent(started, started.stream, "", isolated=None, explain=started.explain)

    def await_nodes(self, option: str = "--start-timeout") -> None:
        """Wait for the nodes (time-out: `option`). Raises RunFailedError, InterruptedRunError."""
        deadline = time.monotonic() + self._job.start_timeout
        while self._listening_at is None:
            self.check()
            if self._interrupted:
                raise InterruptedRunError("interrupted by the user, while the run was waiting for nodes of Ray's")
            if time.monotonic() >= deadline:
                raise RunFailedError(f"Ray has not given the nodes within {self._job.start_timeout:g} s ({option}): {self._waiting}")
            time.sleep(LOOK_SECONDS)

    def check(self) -> None:
        """Raise RunFailedError if Ray has failed."""
        if self._failed is not None:
            raise RunFailedError(f"Ray: {self._failed}")

    def interrupt(self) -> None:
        """Make `await_nodes` raise InterruptedRunError soon; safe in a signal handler."""
        self._interrupted = True

    def close(self) -> None:
        """Give the nodes back and end the client; idempotent."""
        if self._client is None or self._closing:
            return
        self._closing = True
        if self._listener is not None:
            self._listener.close()
        self._requests.put(None)
        end_agents([self._client], LEAVE_SECONDS)

    def kill(self) -> None:
        """End the client immediately; safe in a signal handler."""
        if self._client is not None:
            self._client.kill()

    def _send_requests(self, stream: Stream) -> None:
        """Send requests, in a thread, as a hanging call to Ray would block the driver."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, which `_receive_events` sees, or `close` has ended it
            while (request := self._requests.get()) is not None:
                stream.send(request)

    def _receive_events(self, stream: Stream) -> None:
        with contextlib.suppress(OSError):
            while (message := stream.receive()) is not None:
                self._handle(EVENTS.parse(message))
        last_lines = self._errors.behind() if self._errors is not None else ""
        self._fail(f"its client process has ended{last_lines}")

    def _handle(self, event: RayEvent) -> None:
        if isinstance(event, Placed):
            self.nodes = event.nodes
            self._listen(event.own_address)
        elif isinstance(event, Waiting):
            self._waiting = event.text
            self._warn(f"Ray: the run waits for {self._waiting}")
        elif isinstance(event, Failed):
            self._fail(event.text)
        elif isinstance(event, CommandLine):
            self._commands[event.number].take_line(event.value)
        elif isinstance(event, CommandEnded):
            self._commands[event.number].end(event.value, None)
        elif isinstance(event, CommandsLost):
            for number in event.numbers:
                self._commands[number].lose(f"has gone with Ray's actor there: {event.text}")

    def _fail(self, why: str) -> None:
        with self._lock:
            self._failed = self._failed or why
            commands = [*self._commands.values()]
        for command in commands:
            command.lose(f"has gone with Ray: {why}")

    def _listen(self, address: str) -> None:
        try:
            listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=128)
        except OSError as error:
            self._fail(f"the nodes would reach this machine at {address}, where it cannot listen: {error.strerror}")
            return
        proof = partial(prove, secret=self._secret.encode(), joins=_JOINS)
        self._listener = AuthenticatingListener(listening, proof, self._connect_command, lambda text: note(f"trainer: {text}"))
        with self._lock:
            self._listening_at = (address, listening.getsockname()[1])
            for command in self._unsent:
                self._summon(command)
            self._unsent.clear()

    def _summon(self, started: _Command) -> None:
        assert self._listening_at is not None
        host, port = self._listening_at
        summons = Summons(host, port, self._secret, started.number, 2 * self._job.node_timeout)
        command = remote_python(self._python, "crosstrain.launch.node.dialled", *started.command)
        self._requests.put(StartCommand(started.node, started.number, [*map(os.fsencode, command)], summons.line()))

    def _connect_command(self, joiner: Joiner[CommandJoin], host: str) -> None:
        command = self._commands.get(joiner.message.number)
        joiner.stream.limit_silence(2 * self._job.node_timeout)  # the heartbeat comes first; this is for what nobody reads or writes
        if command is None or not command.stream.connect(joiner.stream):
            joiner.stream.close()  # no command of this number is awaited


class _Command:
    def __init__(self, node: int, number: int, command: Sequence[str], requests: queue.SimpleQueue[RayRequest | None]) -> None:
        self.node, self.number, self.command = node, number, command
        self.stream = LateStream(AGENT_BEGINS)
        self._requests = requests
        self._ended = threading.Event()
        self._code = KILLED
        self._why: str | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def stdin(self) -> _Command:
        """Its input: the channel."""
        return self

    def close(self) -> None:
        """End the input."""
        self.stream.cut()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; see `AgentProcess`."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
        return self._code

    def terminate(self) -> None:
        """Cut the channel, which ends the command, without waiting."""
        self.lose("has been cut off")

    def kill(self) -> None:
        """Request its kill, without waiting."""
        self._requests.put(KillCommand(self.node, self.number))
        self.lose(None)

    def take_line(self, line: str) -> None:
        """Take a line of its standard error; logged once its messages have begun."""
        text = one_line(line)
        if text.strip():
            self._lines.append(text)
            if self.stream.begun:
                note(f"node {self.node}: {text}")

    def end(self, code: int | None, why: str | None) -> None:
        """Take its exit code, or why that is unknown. Earlier messages can still be received."""
        if not self._ended.is_set():
            self._code, self._why = KILLED if code is None else code, why
            self._ended.set()
        self.stream.give_up_waiting()

    def lose(self, why: str | None) -> None:
        """Mark it as ended without an exit code, and cut its channel."""
        self.end(None, why)
        self.stream.cut()

    def explain(self, code: int) -> str:
        """Describe its end, with its last lines."""
        if self._why is None:
            return end_elsewhere(self.command, code, [*self._lines])
        return self._why + "".join(f": {line}" for line in self._lines)
