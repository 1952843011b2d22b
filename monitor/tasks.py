"""The tasks of one node together: their process trees and sockets, also of those that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ..records.schema import TaskSample
from .cpu_pressure import WaitCounter
from .network import Bytes, SocketCounters, open_inodes
from .problems import Problems
from .processes import Forest, TaskTree

if TYPE_CHECKING:
    import resource

__all__ = ["NodeTasks"]

# How often everything that belonged to none of the tasks is looked at again.
_FORGET_SECONDS = 10.0
# PSS costs 8 to 31 ms a process: at most this share of one core goes into it, however many processes there are.
_PSS_CORE_SHARE = 0.0025
# Waits for cores cost 5 µs a thread, and frameworks have dozens: no more than this share of one core goes into them.
_WAITS_CORE_SHARE = 0.0025
# The first one soon, so that a short run has one too, but late enough that the frameworks are imported.
_FIRST_PSS_SECONDS = 2.0


class NodeTasks:
    """Watches tasks and adds up what they use. Totals never fall when a task ends. Times are those of the caller's clock."""

    def __init__(self, problems: Problems, with_sockets: bool, pss_interval_seconds: float, now: float) -> None:
        self._problems = problems
        self._forest = Forest()
        self._ended: list[TaskTree] = []
        self._failed: set[TaskTree] = set()
        """Trees whose processes could not be read the last time."""
        self._blind: set[TaskTree] = set()
        """Trees whose sockets we were not allowed to see at some time, so that their counts are incomplete."""
        self._pss: dict[TaskTree, int] = {}
        self._pss_interval = pss_interval_seconds
        self._next_pss = now + min(_FIRST_PSS_SECONDS, pss_interval_seconds)
        self._pss_was_read = False
        self._next_forgetting = now + _FORGET_SECONDS
        self._waits = problems.attempt("waits for cores", WaitCounter)
        self._waited_seconds: float | None = None
        self._next_waits = now
        self._sockets = problems.attempt("TCP byte counts", SocketCounters) if with_sockets else None
        self._sockets_read = False

    def watch(self, name: str, pid: int) -> float:
        """Follow a task by its first process, in place of an older task of that name; return the CPU seconds it used before.

        A process that is followed already, under another name, is so under this one from now on, and has used nothing before.
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
        """Follow a task no longer but keep what it used. An unknown name is no error."""
        tree = self._forest.trees.pop(name, None)
        if tree is not None and tree.cpu_seconds is not None:
            self._ended.append(tree)

    def end(self, name: str, usage: resource.struct_rusage) -> None:
        """Take over the exact CPU seconds of a task that has been waited for. An unknown name is no error."""
        tree = self._forest.trees.get(name)
        if tree is not None:
            self._problems.attempt(f"{name}: CPU", partial(tree.end, usage))

    def update(self, now: float, final: bool) -> None:
        """Read everything once; the figures below are those of this moment. `final`: nothing will be read after this."""
        if now >= self._next_forgetting:
            self._next_forgetting = now + _FORGET_SECONDS
            self._forest.forget_strangers()
            if self._sockets is not None:
                self._sockets.forget_strangers()
        self._problems.attempt("finding child processes", self._forest.discover)
        self._failed = {tree for tree in self._trees if not self._update(tree)}
        self._read_pss(now, final)
        self._read_waits(now, final)
        self._sockets_read = self._sockets is not None and self._read_sockets(self._sockets)

    def samples(self) -> tuple[TaskSample, ...]:
        """Return a sample a watched task."""
        return tuple(self._sample(tree) for tree in self._trees)

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds of all tasks, watched and ended; None where a task's cannot be seen."""
        trees = (*self._trees, *self._ended)
        return None if self._failed else _sum_all(tree.cpu_seconds for tree in trees)

    def rss_bytes(self) -> int | None:
        """Return the resident memory of the living tasks; None where none is alive or one cannot be seen."""
        return None if self._failed else _sum_known(tree.rss_bytes for tree in self._trees)

    def pss_bytes(self) -> int | None:
        """Return the proportional memory of the living tasks, in the samples in which it was read; else None."""
        living = {tree for tree in self._trees if tree.alive}
        return sum(self._pss.values()) if living and living <= self._pss.keys() else None

    def waited_seconds(self) -> float | None:
        """Return how long the tasks' threads waited for cores so far, in the samples in which it was read; else None."""
        return self._waited_seconds

    def disk_bytes(self) -> Bytes | None:
        """Return the (read, written) bytes of all tasks, watched and ended; None where a task's cannot be seen."""
        counts = [tree.disk_seen for tree in (*self._trees, *self._ended)]
        known = [count for count in counts if count is not None]
        return _sum_pairs(known) if len(known) == len(counts) and not self._failed else None

    def socket_bytes(self) -> Bytes | None:
        """Return the (sent, received) payload bytes of all tasks' TCP sockets, watched and ended; None where it is not to be seen."""
        return self._sockets.total() if self._sockets is not None and self._sockets_read and not self._blind else None

    def close(self) -> None:
        """Give the descriptors back."""
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    @property
    def _trees(self) -> list[TaskTree]:
        return list(self._forest.trees.values())

    def _update(self, tree: TaskTree) -> bool:
        """Read a tree's processes and disk counts; return whether its processes could be seen."""

        def read() -> bool:
            tree.update()
            return True

        seen = self._problems.attempt(f"{tree.name}: CPU and memory", read) or False
        self._problems.attempt(f"{tree.name}: disk bytes", tree.read_disk)
        if tree.lost:
            self._problems.note(f"{tree.name}: process {tree.pid} is gone")
        return seen

    def _read_pss(self, now: float, final: bool) -> None:
        """Read PSS where it is due; the more it costs the longer until the next. A run that ended before the first gets one at its end."""
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
        """Read how long the tasks waited for cores where it is due; the more it costs the longer until the next."""
        self._waited_seconds = None
        if self._waits is None or (now < self._next_waits and not final):
            return
        began = time.thread_time()
        members = [pid for tree in self._trees for pid in tree.members]
        self._waited_seconds = self._problems.attempt("waits for cores", partial(self._waits.read, members))
        self._next_waits = now + (time.thread_time() - began) / _WAITS_CORE_SHARE

    def _read_sockets(self, sockets: SocketCounters) -> bool:
        """Bring the socket counts up to date; return whether they could be read."""
        owners: dict[object, Callable[[], set[int]]] = {tree: partial(self._open_inodes, tree) for tree in self._trees}
        notes = self._problems.attempt("TCP byte counts", partial(sockets.read, owners))
        for note in notes or ():
            self._problems.note(note)
        return notes is not None

    def _open_inodes(self, tree: TaskTree) -> set[int]:
        found = self._problems.attempt(f"{tree.name}: open sockets", partial(open_inodes, list(tree.members)))
        if found is None:
            self._blind.add(tree)
        return found or set()

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


def _sum_all(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else sum(value for value in found if value is not None)


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_pairs(pairs: Iterable[Bytes]) -> Bytes:
    first = second = 0
    for left, right in pairs:
        first, second = first + left, second + right
    return first, second
