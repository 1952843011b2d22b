"""Messages of an agent with one simulated worker, equal to those of a real agent."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from msgspec import convert

from crosstrain.backends.base import CalibrationResult
from crosstrain.backends.loading import recorded_packages
from crosstrain.engine.protocol.messages import ALIVE, INTERVAL_SECONDS, PROTOCOL, Message, RawArray, WireMessage
from crosstrain.engine.protocol.node_messages import (
    Death,
    Hello,
    Host,
    Identity,
    Log,
    Phase,
    Ports,
    Sample,
    Sampled,
    States,
    Stopped,
)
from crosstrain.engine.protocol.task_messages import Calibrated, Done, Ready
from crosstrain.monitor.collector import NodeSampler
from crosstrain.monitor.host import describe_host

from .backend import EVALUATION_SECONDS, step_seconds

START_SECONDS = 1.0
"""A task is ready so long after its start; what a framework takes to load is its own affair."""

END_SECONDS = 0.02
"""Time from a task's order to leave to its end."""

LOG = b"[a task of a simulated node] ready\n" * 10

PHASES = ("opening the dataset and the model", "joining the cluster", "tracing the first step")


class Timers:
    """Scheduled calls in the order of their times."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, moment: float, work: Callable[[], None]) -> None:
        """Do something at `moment` of time.monotonic()."""
        heapq.heappush(self._due, (moment, next(self._numbers), work))

    def run(self) -> float | None:
        """Do what is due; return the seconds until the next is, None where there is none."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None


def sample_of_this_process() -> dict[str, Any]:
    """Return a real sample, of this process as a task, in JSON's types."""
    sampler = NodeSampler(0, isolated=True, interval_seconds=1.0, emit=lambda record: None)
    sampler.watch("worker-0", os.getpid())
    try:
        record: dict[str, Any] = json.loads(json.dumps(asdict(sampler.sample())))
    finally:
        sampler.stop()
    return record


@cache
def described_host(backend: str) -> dict[str, Any]:
    """Describe this machine, for all simulated nodes."""
    return describe_host(recorded_packages(backend))


class SimulatedAgent:
    """Node `node` of the driver that receives `send`'s messages.

    `exit_code` is the driver's at the end, None before.
    `pattern` is a sample to vary. Call `hear` with each message.
    """

    def __init__(self, node: int, send: Callable[[WireMessage], object], timers: Timers, pattern: Mapping[str, Any]) -> None:
        self.exit_code: int | None = None
        self._node = node
        self._send, self._timers = send, timers
        self._task = f"worker-{node}"
        self._sample = {**pattern, "node": node, "cpu_seconds": 0.0, "network_sent_bytes": 0, "network_received_bytes": 0}
        self._began = self._sampled = time.monotonic()
        self._interval_seconds: float | None = None
        self._free_at = 0.0
        self._over = False
        self._alive()

    def hear(self, message: Message) -> None:
        """Answer the driver, immediately or when a real agent would have."""
        fields = json.loads(message.line)
        if message.to is not None:
            self._command(message.kind, fields)
            return
        now = time.monotonic()
        match message.kind:
            case "prepare":
                self._greet(fields["backend"])
            case "reserve":
                self._send(Ports([20_000 + number for number in range(fields["count"])]))
            case "start":
                self._start(fields)
            case "sample_now":
                self._take_sample()
                self._send(Sampled())
            case "stop":
                self._timers.schedule(now + 2 * END_SECONDS, self._stopped)
            case "inspect":
                self._send(States({self._task: "S"}))
            case "finish":
                self.exit_code = int(fields["exit_code"])
                self._over = True

    def _greet(self, backend: str) -> None:
        host = {**described_host(backend), "hostname": f"simulated-{self._node:04}"}
        identity = Identity(f"machine-{self._node}", f"net:[{self._node}]")
        self._send(Hello(PROTOCOL, self._node, os.getpid(), identity, convert(host, Host), b"/tmp/simulated", None))

    def _alive(self) -> None:
        if not self._over:
            self._send(ALIVE)
            self._timers.schedule(time.monotonic() + INTERVAL_SECONDS, self._alive)

    # Its task -------------------------------------------------------------------------------------------------------

    def _start(self, request: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if request["sample_interval_seconds"] is not None:
            self._interval_seconds = request["sample_interval_seconds"]
            self._began = self._sampled = now
            self._take_samples()
        for number, phase in enumerate(PHASES):
            at = now + START_SECONDS * number / len(PHASES)
            self._timers.schedule(at, lambda phase=phase: self._send(Phase(phase, task=self._task)))  # type: ignore[misc]
        self._timers.schedule(now + START_SECONDS, lambda: self._send(Ready("fp32", "cpu", task=self._task)))

    def _command(self, kind: str, command: Mapping[str, Any]) -> None:
        """Have the task carry out a command, after those before it."""
        if kind == "close":
            self._timers.schedule(time.monotonic() + END_SECONDS, self._die)
            return
        takes = {"train": command.get("count", 0) * step_seconds(), "evaluate": EVALUATION_SECONDS}.get(kind, 0.0)
        begins = max(time.monotonic(), self._free_at)
        self._free_at = begins + takes
        seconds, sequence = takes, command.get("sequence", 0)
        if kind == "calibrate":
            count = max(1, command["order"]["count"])
            result = CalibrationResult(self._node, count, count * step_seconds() / 3)
            self._send(Calibrated(result, task=self._task))

        def done() -> None:
            self._send(Done(sequence, kind, seconds, 0.0, task=self._task))

        self._timers.schedule(self._free_at, done)

    def _die(self) -> None:
        spent = self._sample["cpu_seconds"], self._sample["memory_rss_bytes"] or 0
        self._send(Death(self._task, os.getpid(), 0, None, 1, *spent, []))

    def _stopped(self) -> None:
        if self._interval_seconds is not None:
            self._take_sample()
            self._interval_seconds = None
        self._send(Log(self._task, arrays={"text": RawArray("|u1", [len(LOG)], LOG)}))
        self._send(Stopped())

    # Its monitor ----------------------------------------------------------------------------------------------------

    def _take_samples(self) -> None:
        if self._interval_seconds is not None and not self._over:
            self._take_sample()
            self._timers.schedule(time.monotonic() + self._interval_seconds, self._take_samples)

    def _take_sample(self) -> None:
        """Send a sample of a task that uses a core, more or less, and exchanges 10 MB a second."""
        now = time.monotonic()
        seconds, self._sampled = now - self._sampled, now
        sample = self._sample
        cores = 0.8 + 0.2 * ((self._node * 7 + int(now)) % 10) / 10
        sample["time_seconds"], sample["interval_seconds"] = now - self._began, seconds
        sample["cpu_seconds"] += cores * seconds
        sample["cpu_cores_used"] = cores if seconds > 0.1 else None
        sample["cpu_fraction"] = (
            None if sample["cpu_cores_used"] is None or not sample["cores_available"] else cores / sample["cores_available"]
        )
        sample["network_sent_bytes"] += int(1e7 * seconds)
        sample["network_received_bytes"] += int(1e7 * seconds)
        sample["interfaces"] = {"lo": [0, 0], "eth0": [sample["network_sent_bytes"], sample["network_received_bytes"]]}
        task = {**sample["tasks"][0], "task": self._task, "cpu_seconds": sample["cpu_seconds"]}
        self._send(Sample({**sample, "tasks": [task]}))
