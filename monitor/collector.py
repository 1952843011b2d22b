"""Sample one node: a thread in its agent that reads what the node's tasks use and hands each record on.

A probe that fails leaves its fields null, is named once in ``problems``, and is tried again the next time; nothing ends the sampler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..records.schema import SystemRecord
from .cpu_limits import QuotaCounter
from .cpu_pressure import read_machine_cpu_seconds, read_pressure_seconds
from .gpu import GpuProbe
from .host import cores_available as host_cores_available
from .network import Bytes, InterfaceCounters, without_loopback
from .problems import Problems
from .tasks import NodeTasks

if TYPE_CHECKING:
    import resource

__all__ = ["NodeSampler"]

_STOP_SECONDS = 5.0
# Over less than this (or half the sampling interval) a slope is noise: the last sample may follow the one before at once.
_SHORTEST_SLOPE_SECONDS = 0.1


class NodeSampler:
    """Watches the tasks of one node. Every method may be called from any thread.

    `isolated` says whose traffic the node's figures are: True where the node has a network namespace or a machine of its own (sum over
    its interfaces without ``lo``), False on a shared host (sum over its tasks' TCP sockets). `cores_available` is what the node's tasks
    may use, where a limit is set on them that this process does not have; default: what this process may use. `emit` is called from the
    sampler's thread; what it raises is noted as a problem. `clock` returns seconds and never falls. PSS, which is costly, is read every
    `pss_interval_seconds` at most and null in between. `gpu_of_task` has the number of the GPU that a task was given.
    """

    def __init__(
        self,
        node: int,
        isolated: bool,
        interval_seconds: float,
        emit: Callable[[SystemRecord], None],
        clock: Callable[[], float] = time.monotonic,
        pss_interval_seconds: float = 10.0,
        cores_available: float | None = None,
        gpu_of_task: Mapping[str, int] | None = None,
    ) -> None:
        self._node, self._isolated, self._interval = node, isolated, interval_seconds
        self._emit, self._clock = emit, clock
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._origin = self._last = clock()
        self._last_cpu_seconds: float | None = 0.0
        self._spent_seconds = 0.0
        self._problems = Problems()
        self._cores = cores_available if cores_available is not None else self._problems.attempt("cores available", host_cores_available)
        self._tasks = NodeTasks(self._problems, not isolated, pss_interval_seconds, self._origin)
        self._interfaces = self._problems.attempt("interface counters", InterfaceCounters)
        self._quota = self._problems.attempt("CPU quota", QuotaCounter)
        self._gpus = GpuProbe(gpu_of_task or {})

    def watch(self, task_name: str, pid: int) -> None:
        """Follow a task from now on by its first process. A name that is watched already is let go first."""
        with self._lock:
            used_before = self._tasks.watch(task_name, pid)
            if self._last_cpu_seconds is not None:  # what was used before we looked is no part of the next slope
                self._last_cpu_seconds += used_before

    def unwatch(self, task_name: str) -> None:
        """Follow a task no longer; what it used stays in the node's totals. An unknown name is no error."""
        with self._lock:
            self._tasks.unwatch(task_name)

    def final_cpu(self, task_name: str, usage: resource.struct_rusage) -> None:
        """Make a task's CPU seconds exact by what ``wait4`` returned for it; call it after reaping and before `unwatch`."""
        with self._lock:
            self._tasks.end(task_name, usage)

    def start(self) -> None:
        """Sample every interval from a thread of its own. Raises RuntimeError on a second start."""
        if self._thread is not None or self._closed:
            raise RuntimeError("this sampler was started or stopped before")
        with self._lock:
            self._origin = self._last = self._clock()
        self._thread = threading.Thread(target=self._run, name=f"monitor-{self._node}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample, end the thread and give its descriptors back; a second call does nothing. Waits 5 s at most."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            if self._thread.is_alive():  # `emit` hangs: the thread is a daemon and ends with the process
                return
        with self._lock:
            self._closed = True
            self._gpus.close()
            self._tasks.close()

    def sample(self) -> SystemRecord:
        """Return a record of this moment. `time_seconds` counts from the sampler's start, `interval_seconds` from the sample before."""
        with self._lock:
            began = time.thread_time()
            now = self._clock()
            self._tasks.update(now, final=self._stopping.is_set())
            record = self._record(now, began)
            self._last, self._last_cpu_seconds = now, record.cpu_seconds
            self._spent_seconds += time.thread_time() - began
            return record

    def _run(self) -> None:
        due = time.monotonic()
        stopping = False
        while not stopping:
            due = max(due + self._interval, time.monotonic())  # a late sample does not make the next ones crowd
            stopping = self._stopping.wait(due - time.monotonic())
            self._sample_and_emit()

    def _sample_and_emit(self) -> None:
        """Take a sample and hand it on, without the lock: whatever `emit` waits for must not keep the agent from watching tasks."""
        outcome = Problems()
        record = outcome.attempt("sampling", self.sample)
        began = time.thread_time()
        if record is not None:
            outcome.attempt("handing a sample on", partial(self._emit, record))
        with self._lock:
            for text in outcome.take():
                self._problems.note(text)
            self._spent_seconds += time.thread_time() - began

    def _record(self, now: float, began: float) -> SystemRecord:
        interval, cpu, tasks = now - self._last, self._tasks.cpu_seconds(), self._tasks
        before = self._last_cpu_seconds
        measurable = interval >= min(_SHORTEST_SLOPE_SECONDS, self._interval / 2)
        cores_used = (cpu - before) / interval if cpu is not None and before is not None and measurable else None
        interfaces = self._problems.attempt("interface counters", self._interfaces.read) if self._interfaces else None
        source, sent, received = self._traffic(interfaces)
        disk = tasks.disk_bytes()
        granted, throttled = (self._problems.attempt("CPU quota", self._quota.read) if self._quota else None) or (None, None)
        gpus = self._gpus.read()
        if self._gpus.problem:
            self._problems.note(f"GPUs: {self._gpus.problem}")
        return SystemRecord(
            node=self._node,
            time_seconds=now - self._origin,
            interval_seconds=interval,
            cpu_seconds=cpu,
            cpu_cores_used=cores_used,
            cpu_fraction=cores_used / self._cores if cores_used is not None and self._cores else None,
            cores_available=self._cores,
            memory_rss_bytes=tasks.rss_bytes(),
            memory_pss_bytes=tasks.pss_bytes(),
            network_source=source,
            network_sent_bytes=sent,
            network_received_bytes=received,
            interfaces=interfaces,
            disk_read_bytes=disk[0] if disk else None,
            disk_written_bytes=disk[1] if disk else None,
            gpus=gpus,
            tasks=tasks.samples(),
            problems=self._problems.take(),
            monitor_cpu_seconds=self._spent_seconds + time.thread_time() - began,
            cpu_wait_seconds=tasks.waited_seconds(),
            machine_cpu_seconds=self._problems.attempt("CPU of the machine", read_machine_cpu_seconds),
            trainer_cpu_seconds=time.process_time(),
            cpu_pressure_seconds=self._problems.attempt("pressure on the CPU", read_pressure_seconds),
            cpu_granted_seconds=granted,
            cpu_throttled_seconds=throttled,
        )

    def _traffic(self, interfaces: Mapping[str, Bytes] | None) -> tuple[str | None, int | None, int | None]:
        """Return the node's network source and its sent and received bytes."""
        if self._isolated:
            return ("interface", *without_loopback(interfaces)) if interfaces is not None else (None, None, None)
        counts = self._tasks.socket_bytes()
        return ("sockets", *counts) if counts is not None else (None, None, None)
