"""The agent: one process per node that starts, watches and measures the node's tasks.

Started as ``python -m crosstrain.launch.node.agent``, with the control channel as standard input and output; exits when it closes.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.console import note
from ...core.liveness import TICK_SECONDS, SilenceCounter
from ...core.process import ignore_interrupts, wake_when_parent_ends
from ...engine.protocol.messages import ALIVE, FILE_PIECE_BYTES, INTERVAL_SECONDS, PROTOCOL, Message, RawArray, ReusableBuffer, Stream
from ...engine.protocol.transport import AGENT_BEGINS
from ...monitor.gpu import describe_gpus
from .fork_server_client import ForkServerConnection
from .links import PeerProbe
from .scratch import PortBlock, address_for_others, expected_gpus, make_scratch, node_identity, remove_scratch, task_environment
from .stacks import collect_stacks, find_py_spy
from .supervisor import Death, Supervisor, tail

if TYPE_CHECKING:
    from ...monitor.collector import NodeSampler
    from ...records.store.schema import SystemRecord

ORPHAN_CHECK_SECONDS = 0.5
ORPHAN_PATIENCE_SECONDS = 4.0  # time from the end of the control stream until the agent is killed
DRIVER = 0  # the only peer of the silence counter
HELD_UP_BYTES = 2**16  # with so much unread, the agent is behind and the driver has to wait: nothing more may arrive


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
                if message.kind == "finish":
                    self._ended.set()  # the driver may go now
                    return int(message["exit_code"])
                self._handle(message)
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

    def _handle(self, message: Message) -> None:
        if message.kind != "prepare":
            self._listen()
        task = message.get("to")
        if task is not None:
            fields = {key: value for key, value in message.fields.items() if key != "to"}
            self._supervisor.send(task, Message(message.kind, fields, message.arrays))
        elif message.kind in _HANDLERS:
            _HANDLERS[message.kind](self, message)
        elif message.kind != ALIVE.kind:
            raise ConnectionError(f"unknown request {message.kind!r}")

    def _reserve(self, message: Message) -> None:
        self._send(Message("ports", {"ports": self._ports.take(message["count"])}))

    def _sample_now(self, message: Message) -> None:
        if self._sampler is not None:
            self._on_sample(self._sampler.sample())
        self._send(Message("sampled", {}))

    def _stop(self, message: Message) -> None:
        self._supervisor.stop(message["grace_seconds"], keep_spares=self._keeps_spares)
        self._stop_sampler()
        self._join_inspections()
        self._ship_logs()
        self._ship_traces()
        self._send(Message("stopped", {}))

    def _inspect(self, message: Message) -> None:
        self._send(Message("states", {"states": {name: self._supervisor.state_of(name) for name in self._supervisor.alive()}}))

    def _find_stacks(self, message: Message) -> None:
        def collect() -> None:
            with self._supervisor.inspected(message["tasks"]) as inspected:
                self._send(Message("stacks", {"number": message["number"], "stacks": collect_stacks(inspected, find_py_spy())}))

        self._inspections.append(threading.Thread(target=collect, name="stacks", daemon=True))
        self._inspections[-1].start()

    def _join_inspections(self) -> None:
        while self._inspections:
            self._inspections.pop().join()

    def _open_probe(self, message: Message) -> None:
        port = None if self._probing.is_alive() else self._probe.listen(self._ports.take)
        self._send(Message("probe_port", {"number": message["number"], "port": port}))

    def _probe_peers(self, message: Message) -> None:
        if self._probing.is_alive():
            raise ConnectionError(f"unknown request {message.kind!r}")

        def probe() -> None:
            ports = {int(node): port for node, port in message["ports"].items()}
            self._send(Message("peers_probed", {"number": message["number"], **self._probe.run(ports, bytes.fromhex(message["token"]))}))

        self._probing = threading.Thread(target=probe, name="probe", daemon=True)
        self._probing.start()

    def _prepare(self, message: Message) -> None:
        gpus = describe_gpus(os.environ)
        self._keeps_spares = bool(message["job"].get("spare_processes"))
        expected = expected_gpus(message, gpus["visible_gpus"])
        for visible_as in [*expected, *(expected if self._keeps_spares else ())]:
            self._prestart(message, task_environment(os.environ, self._scratch, visible_as))
        from ...backends.loading import recorded_packages
        from ...monitor.host import describe_host

        host = describe_host(recorded_packages(message["job"]["backend"]), gpus)
        greeting = {"protocol": PROTOCOL, "node": self._node, "pid": os.getpid(), "identity": node_identity(), "host": host}
        self._send(Message("hello", {**greeting, "scratch": str(self._scratch), "address": address_for_others(os.environ)}))
        self._node_timeout_seconds = message["job"]["node_timeout"]
        threading.Thread(target=self._send_heartbeats, name="alive", daemon=True).start()

    def _prestart(self, message: Message, environment: Mapping[str, str]) -> None:
        self._supervisor.prestart(self._scratch, environment, Message("prepare", {"job": message["job"]}))

    def _keep_spares(self, message: Message) -> None:
        existing = self._supervisor.spare_environments()
        for environment in self._environments:
            if environment in existing:
                existing.remove(environment)
            else:
                self._prestart(message, environment)
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
                    self._stream.send(Message("leaving"))
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
        counter = SilenceCounter(self._node_timeout_seconds, time.monotonic())
        while not self._ended.wait(TICK_SECONDS):
            held_up = self._stream.unread_bytes >= HELD_UP_BYTES
            if counter.tick(time.monotonic(), {} if held_up else {DRIVER: self._stream.arrivals}):
                note(f"agent of node {self._node}: the driver has not been heard of for {counter.limit_seconds:g} s (--node-timeout)")
                self.leave_driver()
                return

    def leave_driver(self) -> None:
        """End the tasks and make `serve` return, or exit without it."""
        self._supervisor.kill()
        self._stream.cut()
        if not self._ended.wait(ORPHAN_PATIENCE_SECONDS):
            self.abandon()

    def _start(self, message: Message) -> None:
        if message["log_folder"] is None:
            self._ships_logs = True
        else:
            self._logs = Path(message["log_folder"])
        if message["sample_interval_seconds"] is not None and self._sampler is None:
            from ...monitor.collector import NodeSampler

            self._sampler = NodeSampler(
                self._node,
                isolated=message["isolated"],
                interval_seconds=message["sample_interval_seconds"],
                emit=self._on_sample,
                cores_available=message["cores_available"],
                gpu_of_task={task: gpu["gpu"] for task, gpu in message["gpu_of_task"].items() if gpu["gpu"] is not None},
            )
            self._sampler.start()
        for task in message["tasks"]:
            self._probe.addresses = task["cluster"]["addresses"]
        start_deadline = time.monotonic() + message["start_seconds"]
        self._environments = [self._start_task(fields, message, start_deadline) for fields in message["tasks"]]
        if self._keeps_spares:
            self._watch_spares()
        else:
            self._supervisor.kill_unclaimed()

    def _start_task(self, fields: Mapping[str, Any], message: Message, start_deadline: float) -> Mapping[str, str]:
        gpus: Mapping[str, Mapping[str, Any]] = message["gpu_of_task"]
        name: str = fields["task"]
        log = self._log(name)
        environment = task_environment(os.environ, self._scratch, gpus[name]["visible_as"] if name in gpus else None)
        early_log = self._supervisor.claim(name, log, environment)
        moving = {} if early_log is None else {"log": str(log), "early_log": str(early_log)}
        if early_log is None:
            self._supervisor.start(name, log, environment)
        elif (pid := self._supervisor.pid_of(name)) is not None:
            self._watch(name, pid)
        profile: dict[str, str] = {}
        if message["job"].get("profile"):
            folder = self._scratch / "profile" / name
            folder.mkdir(parents=True, exist_ok=True)
            profile = {"profile_folder": str(folder)}
        common = {"job": message["job"], "start_deadline": start_deadline}
        common |= {field: message.get(field) for field in ("normalisation", "placeholder")}
        self._supervisor.send(name, Message("open", {**fields, **moving, **profile, **common}))
        return environment

    def _start_again(self, message: Message) -> None:
        self._join_inspections()
        for fields in message["tasks"]:
            self._supervisor.end_task(fields["task"])
            self._start_task(fields, message, time.monotonic() + message["start_seconds"])

    def _log(self, task: str) -> Path:
        return self._logs / f"{task}.log"

    def _from_task(self, task: str, message: Message) -> None:
        self._send(Message(message.kind, {**message.fields, "from": task}, message.arrays))

    def _on_sample(self, record: SystemRecord) -> None:
        self._send(Message("sample", {"record": asdict(record)}))

    def _on_death(self, death: Death, usage: resource.struct_rusage | None) -> None:
        with self._watching:
            if death.pid is not None:
                self._dead.add(death.pid)
            if self._sampler is not None:
                if usage is not None:
                    self._sampler.final_cpu(death.task, usage)
                self._sampler.unwatch(death.task)
        self._send(Message("death", {**asdict(death), "tail": tail(self._log(death.task))}))

    def _stop_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _ship_logs(self) -> None:
        if not self._ships_logs:
            return
        for log in sorted(self._logs.glob("*.log")):
            self._ship(log, "log", {"task": log.stem}, "text")

    def _ship_traces(self) -> None:
        folder = self._scratch / "profile"
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            self._ship(path, "trace", {"path": path.relative_to(folder).as_posix()}, "data")

    def _ship(self, path: Path, kind: str, fields: Mapping[str, str], array: str) -> None:
        with path.open("rb") as file:
            pieces = iter(partial(file.read, FILE_PIECE_BYTES), b"")
            for data in chain([next(pieces, b"")], pieces):  # an empty file is one empty piece
                self._send(Message(kind, fields, {array: RawArray("|u1", [len(data)], data)}))
        path.unlink()

    def _send(self, message: Message) -> None:
        """Send to the driver; if it is gone, only the end of the stream ends the agent."""
        try:
            self._stream.send(message)
        except OSError:
            return


_HANDLERS: Mapping[str, Callable[[Agent, Message], None]] = {
    "prepare": Agent._prepare,
    "reserve": Agent._reserve,
    "start": Agent._start,
    "start_again": Agent._start_again,
    "kill": lambda agent, message: agent._supervisor.kill_task(message["task"]),
    "sample_now": Agent._sample_now,
    "spares": Agent._keep_spares,
    "stop": Agent._stop,
    "inspect": Agent._inspect,
    "open_probe": Agent._open_probe,
    "probe_peers": Agent._probe_peers,
    "find_stacks": Agent._find_stacks,
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
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if options.remote:
        writer.write(b"\n" + AGENT_BEGINS + b"\n")
        writer.flush()
    server = None if options.fork_server is None else ForkServerConnection(socket.socket(fileno=options.fork_server))
    agent = Agent(Stream(sys.stdin.buffer, writer), options.node, remote=options.remote, fork_server=server)
    threading.Thread(target=_watch_parent, args=(agent, options.parent or os.getppid()), name="parent", daemon=True).start()
    try:
        agent.serve()
    except OSError as error:
        note(f"agent of node {options.node}: it cannot do what the driver asks: {error}")
        raise


if __name__ == "__main__":
    main()
