"""The agent: one process per node that starts, watches and measures the node's tasks.

Started as ``python -m crosstrain.launch.node.agent``, with the control channel as standard input and output; exits when it closes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.console import note
from ...core.liveness import TICK_SECONDS, SilenceCounter
from ...core.process import ignore_interrupts, wake_when_parent_ends
from ...engine.protocol import node_messages as messages
from ...engine.protocol.messages import (
    ALIVE,
    FILE_PIECE_BYTES,
    INTERVAL_SECONDS,
    PROTOCOL,
    Alive,
    Message,
    MessageParser,
    ProtocolError,
    RawArray,
    ReusableBuffer,
    Stream,
    WireMessage,
)
from ...engine.protocol.node_messages import Death
from ...engine.protocol.transport import take_stdio
from ...monitor.gpu import describe_gpus
from .fork_server_client import ForkServerConnection
from .links import PeerProbe
from .scratch import PortBlock, address_for_others, expected_gpus, make_scratch, node_identity, remove_scratch, task_environment
from .stacks import collect_stacks, find_py_spy
from .supervisor import Supervisor, Usage, tail

if TYPE_CHECKING:
    from ...monitor.collector import NodeSampler
    from ...records.store.schema import SystemRecord

ORPHAN_CHECK_SECONDS = 0.5
ORPHAN_PATIENCE_SECONDS = 4.0  # time from the end of the control stream until the agent is killed
DRIVER = 0  # the only peer of the silence counter
HELD_UP_BYTES = 2**16  # with so much unread, the agent is behind and the driver has to wait: nothing more may arrive
_REQUESTS = MessageParser(Alive, messages.ToNode)


def await_silence(stream: Stream, limit_seconds: float, ended: threading.Event) -> str | None:
    """Wait until the driver has been silent for so long; return what to report.

    Returns None once `ended`.
    """
    counter = SilenceCounter(limit_seconds, time.monotonic())
    while not ended.wait(TICK_SECONDS):
        held_up = stream.unread_bytes >= HELD_UP_BYTES
        if counter.tick(time.monotonic(), {} if held_up else {DRIVER: stream.arrivals}):
            return f"the driver has not been heard of for {limit_seconds:g} s (--node-timeout)"
    return None


class Agent:
    """Serves one driver over `stream` until its ``finish`` or its end.

    `remote`: a silent driver is given up; a local one may only be stopped (Ctrl-Z). `loss_exit_code` is for a lost driver.
    """

    def __init__(
        self,
        stream: Stream,
        node: int,
        *,
        remote: bool = False,
        loss_exit_code: int = 1,
        fork_server: ForkServerConnection | None = None,
    ) -> None:
        self._stream = stream
        self._node = node
        self._remote = remote
        self._loss_exit_code = loss_exit_code
        self._leaving = False
        self._node_timeout_seconds = 0.0
        self._listening = False
        self._ended = threading.Event()
        self._ports = PortBlock()
        self._probe = PeerProbe(node)
        self._probing = threading.Thread()
        self._supervisor = Supervisor(self._from_task, self._on_death, self._on_pid, fork_server)
        self._keeps_spares = False
        self._environments: list[Mapping[str, str]] = []
        self._sampler: NodeSampler | None = None
        self._watching = threading.Lock()
        self._inspections: list[threading.Thread] = []
        self._dead: set[int] = set()
        self._scratch = make_scratch()
        self._logs = self._scratch
        self._ships_logs = False

    def serve(self) -> int:
        """Execute requests; return the exit code after all tasks have ended. Raises OSError."""
        room = ReusableBuffer()
        try:
            while (message := self._received(room)) is not None:
                request = self._request_in(message)
                if isinstance(request, messages.Finish):
                    self._ended.set()  # the driver may go now
                    return request.exit_code
                if request is not None and not isinstance(request, Alive):
                    _HANDLERS[type(request)](self, request)
            return self._loss_exit_code
        finally:
            self._supervisor.kill()
            self._supervisor.stop(grace_seconds=0.0)
            self._stop_sampler()
            remove_scratch(self._scratch)
            self._ports.release()
            self._ended.set()

    def _received(self, room: ReusableBuffer) -> Message | None:
        try:
            return self._stream.receive(room)
        except OSError as error:
            note(f"agent of node {self._node}: the driver is gone ({error})")
            return None

    def abandon(self) -> None:
        """Kill the tasks, remove temporary files and exit; for when `serve` does not return."""
        self._supervisor.kill()
        remove_scratch(self._scratch)
        os._exit(self._loss_exit_code)

    def leave(self) -> None:
        """Announce the end of this node to the driver; safe in a signal handler."""
        self._leaving = True

    def _request_in(self, message: Message) -> WireMessage | None:
        """Return the driver's request; pass on a message to a task, and return None."""
        if message.kind != "prepare":
            self._listen()
        if (task := message.to) is not None:
            self._supervisor.send(task, message)
            return None
        try:
            return _REQUESTS.parse(message)
        except ProtocolError as error:
            raise ConnectionError(f"unknown request {message.kind!r}: {error}") from error

    def _reserve(self, message: messages.Reserve) -> None:
        self._send(messages.Ports(self._ports.take(message.count)))

    def _sample_now(self, message: messages.SampleNow) -> None:
        if self._sampler is not None:
            self._on_sample(self._sampler.sample())
        self._send(messages.Sampled())

    def _stop(self, message: messages.Stop) -> None:
        self._supervisor.stop(message.grace_seconds, keep_spares=self._keeps_spares)
        self._stop_sampler()
        self._join_inspections()
        self._ship_logs()
        self._ship_traces()
        self._send(messages.Stopped())

    def _inspect(self, message: messages.Inspect) -> None:
        self._send(messages.States({name: self._supervisor.state_of(name) for name in self._supervisor.alive()}))

    def _find_stacks(self, message: messages.FindStacks) -> None:
        def collect() -> None:
            with self._supervisor.inspected(message.tasks) as inspected:
                stacks: Any = collect_stacks(inspected, find_py_spy())
                self._send(messages.Stacks(message.number, stacks))

        self._inspections.append(threading.Thread(target=collect, name="stacks", daemon=True))
        self._inspections[-1].start()

    def _join_inspections(self) -> None:
        while self._inspections:
            self._inspections.pop().join()

    def _open_probe(self, message: messages.OpenProbe) -> None:
        port = None if self._probing.is_alive() else self._probe.listen(self._ports.take)
        self._send(messages.ProbePort(message.number, port))

    def _probe_peers(self, message: messages.ProbePeers) -> None:
        if self._probing.is_alive():
            raise ConnectionError(f"unknown request {message.kind!r}")

        def probe() -> None:
            self._send(messages.PeersProbed(message.number, **self._probe.run(message.ports, bytes.fromhex(message.token))))

        self._probing = threading.Thread(target=probe, name="probe", daemon=True)
        self._probing.start()

    def _prepare(self, message: messages.Prepare) -> None:
        gpus = describe_gpus(os.environ)
        self._keeps_spares = message.keeps_spares
        expected = expected_gpus(message, gpus["visible_gpus"])
        for visible_as in [*expected, *(expected if self._keeps_spares else ())]:
            self._prestart(message.job, task_environment(os.environ, self._scratch, visible_as))
        from ...backends.loading import recorded_packages
        from ...monitor.host import describe_host

        host = describe_host(recorded_packages(message.backend), gpus)
        about: tuple[Any, ...] = (node_identity(), host, os.fsencode(self._scratch), address_for_others(os.environ))
        self._send(messages.Hello(PROTOCOL, self._node, os.getpid(), *about))
        self._node_timeout_seconds = message.node_timeout_seconds
        threading.Thread(target=self._send_heartbeats, name="alive", daemon=True).start()

    def _prestart(self, job: str, environment: Mapping[str, str]) -> None:
        self._supervisor.prestart(self._scratch, environment, messages.Prepare(job))

    def _keep_spares(self, message: messages.Spares) -> None:
        existing = self._supervisor.spare_environments()
        for environment in self._environments:
            if environment in existing:
                existing.remove(environment)
            else:
                self._prestart(message.job, environment)
        self._watch_spares()

    def _watch_spares(self) -> None:
        for name, pid in self._supervisor.spares().items():
            self._watch(name, pid)

    def _watch(self, name: str, pid: int) -> None:
        with self._watching:
            if self._sampler is not None and pid not in self._dead:
                self._sampler.watch(name, pid)

    def _on_pid(self, name: str, pid: int) -> None:
        if name in self._supervisor.alive():
            self._watch(name, pid)

    def _send_heartbeats(self) -> None:
        """Send heartbeats, also while the main thread waits; ``leaving`` once after `leave`."""
        announced = False
        while not self._ended.wait(INTERVAL_SECONDS):
            try:
                self._stream.send(ALIVE)
                if self._leaving and not announced:
                    announced = True
                    self._stream.send(messages.Leaving())
            except OSError:
                if self._remote:
                    self.leave_driver()
                return  # the end of a parent is noticed by `_watch_parent`

    def _listen(self) -> None:
        """Watch the driver's heartbeats from its first request on; until then it is silent."""
        if self._remote and not self._listening:
            self._listening = True
            threading.Thread(target=self._watch_driver, name="silence", daemon=True).start()

    def _watch_driver(self) -> None:
        if (silence := await_silence(self._stream, self._node_timeout_seconds, self._ended)) is not None:
            note(f"agent of node {self._node}: {silence}")
            self.leave_driver()

    def leave_driver(self) -> None:
        """End the tasks and make `serve` return, or exit without it."""
        self._supervisor.kill()
        self._stream.cut()
        if not self._ended.wait(ORPHAN_PATIENCE_SECONDS):
            self.abandon()

    def _start(self, message: messages.Start) -> None:
        if message.again:
            self._restart(message)
            return
        if message.log_folder is None:
            self._ships_logs = True
        else:
            self._logs = Path(os.fsdecode(message.log_folder))
        if message.sample_interval_seconds is not None and self._sampler is None:
            from ...monitor.collector import NodeSampler

            self._sampler = NodeSampler(
                self._node,
                isolated=bool(message.isolated),
                interval_seconds=message.sample_interval_seconds,
                emit=self._on_sample,
                cores_available=message.cores_available,
                gpu_of_task={task: gpu.gpu for task, gpu in message.gpu_of_task.items() if gpu.gpu is not None},
            )
            self._sampler.start()
        for task in message.tasks[:1]:
            self._probe.addresses = json.loads(task.cluster)["addresses"]
        start_deadline = time.monotonic() + message.start_seconds
        self._environments = [self._start_task(task, message, start_deadline) for task in message.tasks]
        if self._keeps_spares:
            self._watch_spares()
        else:
            self._supervisor.kill_unclaimed()

    def _start_task(self, task: messages.PlacedTask, message: messages.Start, start_deadline: float) -> Mapping[str, str]:
        gpu, name = message.gpu_of_task.get(task.task), task.task
        log = self._log(name)
        environment = task_environment(os.environ, self._scratch, None if gpu is None else gpu.visible_as)
        early_log = self._supervisor.claim(name, log, environment)
        opening = messages.Open(message.job, start_deadline, task, message.normalisation, message.placeholder)
        if early_log is not None:
            opening.log, opening.early_log = os.fsencode(log), os.fsencode(early_log)
        if early_log is None:
            self._supervisor.start(name, log, environment)
        elif (pid := self._supervisor.pid_of(name)) is not None:
            self._watch(name, pid)
        if message.profiles:
            folder = self._scratch / "profile" / name
            folder.mkdir(parents=True, exist_ok=True)
            opening.profile_folder = os.fsencode(folder)
        self._supervisor.send(name, opening)
        return environment

    def _restart(self, message: messages.Start) -> None:
        self._join_inspections()
        for task in message.tasks:
            self._supervisor.end_task(task.task)
            self._start_task(task, message, time.monotonic() + message.start_seconds)

    def _log(self, task: str) -> Path:
        return self._logs / f"{task}.log"

    def _from_task(self, task: str, message: Message) -> None:
        self._send(message.sent_by(task))

    def _on_sample(self, record: SystemRecord) -> None:
        self._send(messages.Sample(record))

    def _on_death(self, death: Death, usage: Usage) -> None:
        with self._watching:
            if death.pid is not None:
                self._dead.add(death.pid)
            if self._sampler is not None:
                if usage is not None:
                    self._sampler.final_cpu(death.task, usage)
                self._sampler.unwatch(death.task)
        death.tail = tail(self._log(death.task))
        self._send(death)

    def _stop_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _ship_logs(self) -> None:
        if not self._ships_logs:
            return
        for log in sorted(self._logs.glob("*.log")):
            self._ship(log, partial(messages.Log, log.stem), "text")

    def _ship_traces(self) -> None:
        folder = self._scratch / "profile"
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            self._ship(path, partial(messages.Trace, path.relative_to(folder).as_posix()), "data")

    def _ship(self, path: Path, kind: Callable[..., WireMessage], array: str) -> None:
        with path.open("rb") as file:
            pieces = iter(partial(file.read, FILE_PIECE_BYTES), b"")
            for data in chain([next(pieces, b"")], pieces):  # an empty file is one empty piece
                self._send(kind(arrays={array: RawArray("|u1", [len(data)], data)}))
        path.unlink()

    def _send(self, message: Message | WireMessage) -> None:
        """Send to the driver; if it is gone, only the end of the stream ends the agent."""
        with suppress(OSError):
            self._stream.send(message)


_HANDLERS: Mapping[type[WireMessage], Callable[[Agent, Any], None]] = {
    messages.Prepare: Agent._prepare,
    messages.Reserve: Agent._reserve,
    messages.Start: Agent._start,
    messages.Kill: lambda agent, message: agent._supervisor.kill_task(message.task),
    messages.SampleNow: Agent._sample_now,
    messages.Spares: Agent._keep_spares,
    messages.Stop: Agent._stop,
    messages.Inspect: Agent._inspect,
    messages.OpenProbe: Agent._open_probe,
    messages.ProbePeers: Agent._probe_peers,
    messages.FindStacks: Agent._find_stacks,
}  # how each kind of request of the driver is executed


def _watch_parent(agent: Agent, parent: int) -> None:
    """End an agent that outlives its parent (driver, shell, ssh daemon, Ray actor)."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_SECONDS)
    agent.leave_driver()


def main(arguments: list[str] | None = None) -> None:
    """Run an agent on standard input and output."""
    parser = argparse.ArgumentParser(prog="crosstrain.launch.node.agent")
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--parent", type=int, help="the driver's process number, where the agent is a child of the driver")
    parser.add_argument("--fork-server", type=int, help="the descriptor of a connection to the fork server of this machine")
    parser.add_argument("--remote", action="store_true", help="the driver is on another machine, and may be cut off from this one")
    options = parser.parse_args(arguments)
    ignore_interrupts()
    wake_when_parent_ends()
    stream = take_stdio(announce=options.remote)
    server = None if options.fork_server is None else ForkServerConnection(socket.socket(fileno=options.fork_server))
    agent = Agent(stream, options.node, remote=options.remote, fork_server=server)
    threading.Thread(target=_watch_parent, args=(agent, options.parent or os.getppid()), name="parent", daemon=True).start()
    try:
        agent.serve()
    except OSError as error:
        note(f"agent of node {options.node}: it cannot do what the driver asks: {error}")
        raise


if __name__ == "__main__":
    main()
