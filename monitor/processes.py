"""What a task's process tree has used: CPU, memory and disk, with the children that have come and gone.

A process's CPU time passes to its parent's ``cutime`` when the parent waits for it, so the sum of (own + waited-for) over the living
members keeps everything that ended in an orderly way. What a member used that ends otherwise (its parent is gone, or ignores it) is
kept from the last time it was seen. Disk bytes move the same way, but without a field of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .procfs import TICK_SECONDS, ProcessStat, last_created_pid, list_pids, read_disk_bytes, read_pss_bytes, read_stat

if TYPE_CHECKING:
    import resource

__all__ = ["Forest", "TaskTree"]

# User and system time are each cut to a clock tick, so a parent may show two ticks less than its child did.
_ROUNDING_SECONDS = 2 * TICK_SECONDS
# A pass that sees a member vanish is repeated; each repeat needs one more to vanish within microseconds.
_MAX_PASSES = 5


class TaskTree:
    """The processes of one task: its first process and everything that descends from it, also after their parents have ended."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        root = read_stat(pid)
        self.members: dict[int, ProcessStat] = {pid: root} if root else {}
        """By process id; a parent stands before its children."""
        self._observed = root is not None
        self._kept_cpu_seconds = 0.0
        self._cpu_seconds = root.cpu_seconds if root else 0.0
        self._disk: dict[int, tuple[int, int]] = {}
        self._kept_disk = (0, 0)
        self.disk_seen: tuple[int, int] | None = None
        """The (read, written) bytes of the tree at the last `read_disk`; they never fall; None where nothing was ever seen."""
        self._reaped = False

    @property
    def alive(self) -> bool:
        """Whether any process of the tree still runs."""
        return any(not stat.ended for stat in self.members.values())

    @property
    def lost(self) -> bool:
        """Whether the tree is gone without `end` having been told about it."""
        return not self.members and not self._reaped

    @property
    def cpu_seconds(self) -> float | None:
        """User and system seconds of the whole tree so far; never falls; None where the process was never seen."""
        return self._cpu_seconds if self._observed else None

    @property
    def rss_bytes(self) -> int | None:
        """Sum of the members' resident memory (pages they share count once for each); None where none is alive."""
        return sum(stat.rss_bytes for stat in self.members.values()) if self.alive else None

    def update(self) -> None:
        """Read every member once; afterwards `cpu_seconds` and `rss_bytes` are those of this moment."""
        before = self.members
        living, vanished = self._read_members()
        self._kept_cpu_seconds += _unpassed_seconds(before, living, vanished)
        self.members = living
        self._cpu_seconds = max(self._cpu_seconds, self._current_cpu_seconds())

    def end(self, usage: resource.struct_rusage) -> None:
        """Take over the exact time that ``wait4`` returned for the first process and the descendants it had waited for."""
        self.update()
        exact = usage.ru_utime + usage.ru_stime + sum(stat.cpu_seconds for stat in self.members.values())
        self._kept_cpu_seconds += max(0.0, exact - self._current_cpu_seconds())
        self._cpu_seconds = max(self._cpu_seconds, self._current_cpu_seconds())
        self._observed = self._reaped = True

    def read_disk(self) -> None:
        """Bring `disk_seen` up to date. Raises PermissionError where the system does not let us see it."""
        before, self._disk = self._disk, {}
        for pid in self.members:
            if (moved := read_disk_bytes(pid)) is not None:
                self._disk[pid] = moved
        for pid in before.keys() - self._disk.keys():
            if self.pid not in self.members:  # nobody in the tree to whom its bytes could have passed
                self._kept_disk = _add(self._kept_disk, before[pid])
        now = self._kept_disk
        for moved in self._disk.values():
            now = _add(now, moved)
        if self._disk or self.disk_seen:
            seen = self.disk_seen or (0, 0)
            self.disk_seen = (max(seen[0], now[0]), max(seen[1], now[1]))

    def pss_bytes(self) -> int | None:
        """Return the tree's proportional memory (costs milliseconds a process); None where none is alive. Raises PermissionError."""
        found = [value for pid in self.members if (value := read_pss_bytes(pid)) is not None]
        return sum(found) if found else None

    def _current_cpu_seconds(self) -> float:
        return self._kept_cpu_seconds + sum(stat.cpu_seconds for stat in self.members.values())

    def _read_members(self) -> tuple[dict[int, ProcessStat], dict[int, ProcessStat]]:
        """Return the living and the vanished.

        Parents are read before their children, and a pass in which one vanishes is repeated: so no time is seen both in a child and in
        the parent that has just waited for it, nor in neither.
        """
        expected, vanished = dict(self.members), {}
        living: dict[int, ProcessStat] = {}
        for _ in range(_MAX_PASSES):
            living = {}
            for pid, known in expected.items():
                stat = read_stat(pid)
                if stat is not None and stat.start_ticks == known.start_ticks:
                    living[pid] = stat
            gone = expected.keys() - living.keys()
            if not gone:
                break
            for pid in gone:
                vanished[pid] = expected.pop(pid)
        return living, vanished


class Forest:
    """The trees of a node's tasks. Finds new members by looking at the process ids that were not there the time before.

    Full listings of every process would cost more than all the rest where a host runs many.
    """

    def __init__(self) -> None:
        self.trees: dict[str, TaskTree] = {}
        self._seen: set[int] = set()
        self._last_created = -1

    def plant(self, name: str, pid: int) -> TaskTree:
        """Start to follow a task by its first process (children it already has are found too)."""
        tree = self.trees[name] = TaskTree(name, pid)
        self.forget_strangers()
        return tree

    def rename(self, tree: TaskTree, name: str) -> None:
        """Follow a tree under another name, which no other has."""
        del self.trees[tree.name]
        tree.name = name
        self.trees[name] = tree

    def forget_strangers(self) -> None:
        """Look at every process again the next time: an id that was a stranger's may have been given to one of ours."""
        self._seen.clear()
        self._last_created = -1

    def discover(self) -> None:
        """Add the processes that were started since the last call to the trees they belong to."""
        newest = last_created_pid()
        if newest == self._last_created:
            return
        self._last_created = newest
        present = list_pids()
        owners = {pid: tree for tree in self.trees.values() for pid in tree.members}
        strangers = {pid: stat for pid in present - self._seen - owners.keys() if (stat := read_stat(pid)) is not None}
        for pid in strangers:
            _adopt(pid, strangers, owners)
        self._seen = present


def _adopt(pid: int, newcomers: Mapping[int, ProcessStat], owners: dict[int, TaskTree]) -> TaskTree | None:
    """Enter a newcomer into the tree that its parent belongs to, the parent first; None where it belongs to none."""
    if pid in owners:
        return owners[pid]
    stat = newcomers.get(pid)
    if stat is None:
        return None
    tree = _adopt(stat.parent, newcomers, owners)
    if tree is not None:
        owners[pid] = tree
        tree.members[pid] = stat
    return tree


def _unpassed_seconds(before: Mapping[int, ProcessStat], living: Mapping[int, ProcessStat], vanished: Mapping[int, ProcessStat]) -> float:
    """Return the CPU seconds of vanished members that did not turn up in a living ancestor's waited-for time."""
    unpassed = 0.0
    owed: dict[int, float] = {}
    for stat in vanished.values():
        ancestor = stat.parent
        while ancestor in vanished:
            ancestor = vanished[ancestor].parent
        if ancestor in living:
            owed[ancestor] = owed.get(ancestor, 0.0) + stat.cpu_seconds
        else:
            unpassed += stat.cpu_seconds
    for ancestor, seconds in owed.items():
        missing = seconds - (living[ancestor].reaped_cpu_seconds - before[ancestor].reaped_cpu_seconds)
        if missing > _ROUNDING_SECONDS:
            unpassed += missing
    return unpassed


def _add(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    return left[0] + right[0], left[1] + right[1]
