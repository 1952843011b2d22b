"""Samples of a node's tasks; a failing probe leaves null and a problem."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..records.store.schema import MAX_PROBLEM_CHARACTERS, MAX_PROBLEMS, SystemRecord, TaskSample
from .cpu_limits import QuotaCounter, WaitCounter, read_machine_cpu_seconds, read_pressure_seconds
from .gpu import GpuProbe
from .host import cores_available as host_cores_available
from .network import Bytes, InterfaceCounters, SocketCounters, open_inodes, without_loopback
from .processes import Forest, TaskTree, sum_pairs

if TYPE_CHECKING:
    import resource

T = TypeVar("T")


class Problems:
    """Distinct problems of observation. Not thread-safe."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._new: list[str] = []

    def attempt(self, what: str, probe: Callable[[], T]) -> T | None:
        """Return the probe's result, or None after an exception, which is noted.

        Measuring never ends a run.
        """
        try:
            return probe()
        except Exception as error:  # noqa: BLE001 -- see above; the text is recorded
            reason = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
            self.note(f"{what}: {reason or type(error).__name__}")
            return None

    def note(self, text: str) -> None:
        """Store a new text for `take`, truncated, with non-Unicode characters escaped."""
        text = text.encode(errors="backslashreplace").decode()[:MAX_PROBLEM_CHARACTERS]
        if text not in self._known:
            self._known.add(text)
            self._new.append(text)

    def take(self) -> tuple[str, ...]:
        """Return the texts since the last call, up to a sample's limit; others follow later."""
        new, self._new = tuple(self._new[:MAX_PROBLEMS]), self._new[MAX_PROBLEMS:]
        return new


# interval for a second look at foreign processes and sockets
_FORGET_SECONDS = 10.0
# PSS costs 8 to 31 ms a process: share of one core
_PSS_CORE_SHARE = 0.0025
# waits cost 5 µs a thread, and frameworks have dozens: share of one core
_WAITS_CORE_SHARE = 0.0025
# early enough for a short run, but after the frameworks are imported
_FIRST_PSS_SECONDS = 2.0


class NodeTasks:
    """Watched tasks and the sum of their use, which never falls. Times are the caller's clock."""

    def __init__(self, problems: Problems, with_sockets: bool, pss_interval_seconds: float, now: float) -> None:
        self._problems = problems
        self._forest = Forest()
        self._ended: list[TaskTree] = []
        self._failed: set[TaskTree] = set()  # trees that could not be read the last time
        self._blind: set[TaskTree] = set()  # trees with incomplete socket counts, without permission
        self._pss: dict[TaskTree, int] = {}
        self._pss_interval = pss_interval_seconds
        self._next_pss = now + min(_FIRST_PSS_SECONDS, pss_interval_seconds)
        self._pss_was_read = False
        self._next_forgetting = now + _FORGET_SECONDS
        self._waits = problems.attempt("waits for cores", WaitCounter)
        self.waited_seconds: float | None = None  # threads' waits for cores so far, in samples that read them
        self._next_waits = now
        self._sockets = problems.attempt("TCP byte counts", SocketCounters) if with_sockets else None
        self._sockets_read = False

    def watch(self, name: str, pid: int) -> float:
        """Watch a task in place of an older one; return its earlier CPU seconds.

        A process already watched is renamed.
        """
        known = next((tree for tree in self._trees if tree.pid == pid and tree.alive), None)
        if known is not None and known.name == name:
            return 0.0
        self.unwatch(name)
        if known is not None:
            self._forest.rename(known, name)
            return 0.0
        tree = self._problems.attempt(f"{name}: CPU", partial(self._forest.plant, name, pid))
        return (tree.cpu_seconds or 0.0) if tree else 0.0

    def unwatch(self, name: str) -> None:
        """Stop watching a task but retain its use; an unknown name is no error."""
        tree = self._forest.trees.pop(name, None)
        if tree is not None and tree.cpu_seconds is not None:
            self._ended.append(tree)

    def end(self, name: str, usage: resource.struct_rusage) -> None:
        """Set the exact CPU seconds of a reaped task; an unknown name is no error."""
        tree = self._forest.trees.get(name)
        if tree is not None:
            self._problems.attempt(f"{name}: CPU", partial(tree.end, usage))

    def update(self, now: float, final: bool) -> None:
        """Read everything once, for the figures below; `final`: for the last time."""
        if now >= self._next_forgetting:
            self._next_forgetting = now + _FORGET_SECONDS
            self._forest.forget_unowned()
            if self._sockets is not None:
                self._sockets.forget_unowned()
        self._problems.attempt("finding child processes", self._forest.discover)
        self._failed = {tree for tree in self._trees if not self._update(tree)}
        self._read_pss(now, final)
        self._read_waits(now, final)
        self._sockets_read = self._sockets is not None and self._read_sockets(self._sockets)

    def samples(self) -> tuple[TaskSample, ...]:
        """Return a sample of each watched task."""
        return tuple(self._sample(tree) for tree in self._trees)

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds of all tasks, watched and ended; None if unknown."""
        known = [tree.cpu_seconds for tree in (*self._trees, *self._ended) if tree.cpu_seconds is not None]
        return sum(known) if len(known) == len(self._trees) + len(self._ended) and not self._failed else None

    def rss_bytes(self) -> int | None:
        """Return the resident memory of living tasks; None without any or if unknown."""
        known = [tree.rss_bytes for tree in self._trees if tree.rss_bytes is not None]
        return sum(known) if known and not self._failed else None

    def pss_bytes(self) -> int | None:
        """Return the proportional memory of living tasks in samples that read it; else None."""
        living = {tree for tree in self._trees if tree.alive}
        return sum(self._pss.values()) if living and living <= self._pss.keys() else None

    def disk_bytes(self) -> Bytes | None:
        """Return the (read, written) bytes of all tasks, watched and ended; None if unknown."""
        known = [tree.disk_seen for tree in (*self._trees, *self._ended) if tree.disk_seen is not None]
        return sum_pairs(known) if len(known) == len(self._trees) + len(self._ended) and not self._failed else None

    def socket_bytes(self) -> Bytes | None:
        """Return the (sent, received) TCP payload bytes of all tasks, watched and ended.

        None if unreadable.
        """
        return self._sockets.total() if self._sockets is not None and self._sockets_read and not self._blind else None

    def close(self) -> None:
        """Close the descriptors."""
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    @property
    def _trees(self) -> list[TaskTree]:
        return list(self._forest.trees.values())

    def _update(self, tree: TaskTree) -> bool:
        def read() -> bool:
            tree.update()
            return True

        seen = self._problems.attempt(f"{tree.name}: CPU and memory", read) or False
        self._problems.attempt(f"{tree.name}: disk bytes", tree.read_disk)
        if tree.lost:
            self._problems.note(f"{tree.name}: process {tree.pid} is gone")
        return seen

    def _read_pss(self, now: float, final: bool) -> None:
        """Read PSS if due, less often the more it costs; short runs read it at their end."""
        self._pss = {}
        if now < self._next_pss and not (final and not self._pss_was_read):
            return
        began = time.thread_time()
        for tree in self._trees:
            value = self._problems.attempt(f"{tree.name}: PSS", tree.pss_bytes)
            if value is not None:
                self._pss[tree] = value
        spent = time.thread_time() - began
        self._next_pss = now + max(self._pss_interval, spent / _PSS_CORE_SHARE)
        self._pss_was_read = True

    def _read_waits(self, now: float, final: bool) -> None:
        """Read the waits for cores if due, less often the more it costs."""
        self.waited_seconds = None
        if self._waits is None or (now < self._next_waits and not final):
            return
        began = time.thread_time()
        members = [pid for tree in self._trees for pid in tree.members]
        self.waited_seconds = self._problems.attempt("waits for cores", partial(self._waits.read, members))
        self._next_waits = now + (time.thread_time() - began) / _WAITS_CORE_SHARE

    def _read_sockets(self, sockets: SocketCounters) -> bool:
        owners: dict[object, Callable[[], set[int]]] = {tree: partial(self._open_inodes, tree) for tree in self._trees}
        notes = self._problems.attempt("TCP byte counts", partial(sockets.read, owners))
        for note in notes or ():
            self._problems.note(note)
        return notes is not None

    def _open_inodes(self, tree: TaskTree) -> set[int]:
        inodes = self._problems.attempt(f"{tree.name}: open sockets", partial(open_inodes, list(tree.members)))
        if inodes is None:
            self._blind.add(tree)
        return inodes or set()

    def _sample(self, tree: TaskTree) -> TaskSample:
        seen = tree not in self._failed
        traffic = None
        if self._sockets is not None and self._sockets_read and tree.cpu_seconds is not None and tree not in self._blind:
            traffic = self._sockets.total_of(tree)
        return TaskSample(
            task=tree.name,
            pid=tree.pid,
            cpu_seconds=tree.cpu_seconds if seen else None,
            memory_rss_bytes=tree.rss_bytes if seen else None,
            memory_pss_bytes=self._pss.get(tree),
            network_sent_bytes=traffic[0] if traffic else None,
            network_received_bytes=traffic[1] if traffic else None,
        )


_STOP_SECONDS = 5.0
# shorter slopes are noise: the last sample may follow immediately
_MIN_SLOPE_SECONDS = 0.1


class NodeSampler:
    """Sampler of one node's tasks; thread-safe.

    `isolated`: the node has a network namespace or machine, and its traffic is that of interfaces without ``lo``, else of its tasks'
    TCP sockets. `emit` runs in the sampler's thread; its errors become problems. `clock` is monotonic. PSS, which is costly, is null
    between readings, at least `pss_interval_seconds` apart.
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
        """Watch a task by its first process, in place of an older one of the name."""
        with self._lock:
            used_before = self._tasks.watch(task_name, pid)
            if self._last_cpu_seconds is not None:  # earlier use is no part of the next slope
                self._last_cpu_seconds += used_before

    def unwatch(self, task_name: str) -> None:
        """Stop watching a task, keeping its use in totals; an unknown name is no error."""
        with self._lock:
            self._tasks.unwatch(task_name)

    def final_cpu(self, task_name: str, usage: resource.struct_rusage) -> None:
        """Set a task's CPU seconds from ``wait4``; call after reaping and before `unwatch`."""
        with self._lock:
            self._tasks.end(task_name, usage)

    def start(self) -> None:
        """Start a sampling thread. Raises RuntimeError on a second start."""
        if self._thread is not None or self._closed:
            raise RuntimeError("this sampler was started or stopped before")
        with self._lock:
            self._origin = self._last = self._clock()
        self._thread = threading.Thread(target=self._run, name=f"monitor-{self._node}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread, within 5 s; a second call does nothing."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            if self._thread.is_alive():  # `emit` hangs: the daemon thread ends with the process
                return
        with self._lock:
            self._closed = True
            self._gpus.close()
            self._tasks.close()

    def sample(self) -> SystemRecord:
        """Return a record.

        `time_seconds` is since the start, `interval_seconds` since the last sample.
        """
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
            due = max(due + self._interval, time.monotonic())  # a late sample does not crowd the next ones
            stopping = self._stopping.wait(due - time.monotonic())
            self._sample_and_emit()

    def _sample_and_emit(self) -> None:
        """Take a sample and emit it without the lock, as `emit` may block."""
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
        measurable = interval >= min(_MIN_SLOPE_SECONDS, self._interval / 2)
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
            cpu_wait_seconds=tasks.waited_seconds,
            machine_cpu_seconds=self._problems.attempt("CPU of the machine", read_machine_cpu_seconds),
            trainer_cpu_seconds=time.process_time(),
            cpu_pressure_seconds=self._problems.attempt("pressure on the CPU", read_pressure_seconds),
            cpu_granted_seconds=granted,
            cpu_throttled_seconds=throttled,
        )

    def _traffic(self, interfaces: Mapping[str, Bytes] | None) -> tuple[str | None, int | None, int | None]:
        if self._isolated:
            return ("interface", *without_loopback(interfaces)) if interfaces is not None else (None, None, None)
        counts = self._tasks.socket_bytes()
        return ("sockets", *counts) if counts is not None else (None, None, None)
