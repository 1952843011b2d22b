"""Processes of tasks, by proc(5) and Documentation/filesystems/proc.rst of the kernel."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import resource

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 1 << 16
_CPUCLOCK_SCHED = 2
TICK_SECONDS = 1.0 / _TICKS_PER_SECOND


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """``/proc/PID/stat`` of a process and reaped children.

    `start_ticks` identifies it if its id is reused; zombies are `ended`.
    """

    pid: int
    parent: int
    start_ticks: int
    ended: bool
    own_cpu_seconds: float
    reaped_cpu_seconds: float
    rss_bytes: int

    @property
    def cpu_seconds(self) -> float:
        """User and system time of the process and reaped children."""
        return self.own_cpu_seconds + self.reaped_cpu_seconds


def read_file(path: str) -> bytes:
    """Return the content of a small file, such as one of /proc.

    Raises OSError; of an ended process FileNotFoundError or ProcessLookupError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, _READ_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[str]:
    """Return a text file's lines, none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


_GONE = (FileNotFoundError, ProcessLookupError)


def read_process_file(pid: int, name: str) -> bytes | None:
    """Return a file below ``/proc/PID``, None if the process has ended. Raises PermissionError."""
    try:
        return read_file(f"/proc/{pid}/{name}")
    except _GONE:
        return None


def list_process_folder(pid: int, name: str) -> list[str]:
    """Return the names in a folder below ``/proc/PID``, none if the process has ended.

    Raises PermissionError.
    """
    try:
        return os.listdir(f"/proc/{pid}/{name}")
    except _GONE:
        return []


def read_stat(pid: int) -> ProcessStat | None:
    """Return a process's state, None if missing. Raises OSError."""
    content = read_process_file(pid, "stat")
    if content is None:
        return None
    # the program's name in brackets may contain anything; numbers follow its last bracket
    fields = content[content.rindex(b")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        parent=int(fields[1]),
        start_ticks=int(fields[19]),
        ended=fields[0] in (b"Z", b"X"),
        own_cpu_seconds=_own_cpu_seconds(pid, int(fields[11]) + int(fields[12])),
        reaped_cpu_seconds=(int(fields[13]) + int(fields[14])) / _TICKS_PER_SECOND,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def _own_cpu_seconds(pid: int, ticks: int) -> float:
    """Return CPU time from the process's clock (clock_getcpuclockid(3)), else from ``stat``.

    The ticks of ``stat`` are 10 ms.
    """
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return ticks / _TICKS_PER_SECOND


def read_disk_bytes(pid: int) -> tuple[int, int] | None:
    """Return (read, written) storage bytes with reaped children, None if gone.

    Raises PermissionError.
    """
    content = read_process_file(pid, "io")
    if content is None:
        return None
    values = dict(line.split(b": ") for line in content.splitlines())
    return int(values[b"read_bytes"]), int(values[b"write_bytes"])


def read_pss_bytes(pid: int) -> int | None:
    """Return the proportional set size (PSS), or None if the process is gone.

    Takes milliseconds. Raises PermissionError.
    """
    match = re.search(rb"^Pss:\s*(\d+)", read_process_file(pid, "smaps_rollup") or b"", re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


def read_socket_inodes(pid: int) -> set[int]:
    """Return the inodes of open sockets, empty if gone. Raises PermissionError."""
    inodes: set[int] = set()
    for name in list_process_folder(pid, "fd"):
        with suppress(*_GONE):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return inodes


# Reaped CPU time is in the parent's ``cutime``, disk bytes in no field; unreaped members retain their last reading.

# Times are cut to clock ticks, so a parent may show two ticks less than its child did.
_ROUNDING_SECONDS = 2 * TICK_SECONDS
# A pass is repeated where a member vanishes; each repeat needs another to vanish within microseconds.
_MAX_PASSES = 5


class TaskTree:
    """Processes of one task: its first process and all descendants, also of ended parents."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        root = read_stat(pid)
        self.members: dict[int, ProcessStat] = {pid: root} if root else {}  # parents before children
        self._observed = root is not None
        self._kept_cpu_seconds = 0.0
        self._cpu_seconds = root.cpu_seconds if root else 0.0
        self._disk: dict[int, tuple[int, int]] = {}
        self._kept_disk = (0, 0)
        self.disk_seen: tuple[int, int] | None = None  # (read, written) at the last `read_disk`, which never fall
        self._reaped = False

    @property
    def alive(self) -> bool:
        """Whether any process of the tree still runs."""
        return any(not stat.ended for stat in self.members.values())

    @property
    def lost(self) -> bool:
        """Whether the tree is gone without `end`."""
        return not self.members and not self._reaped

    @property
    def cpu_seconds(self) -> float | None:
        """User and system seconds of the whole tree so far, which never fall; None if never seen."""
        return self._cpu_seconds if self._observed else None

    @property
    def rss_bytes(self) -> int | None:
        """Sum of resident memory (shared pages count for each); None if none is alive."""
        return sum(stat.rss_bytes for stat in self.members.values()) if self.alive else None

    def update(self) -> None:
        """Read every member once, for `cpu_seconds` and `rss_bytes`."""
        before = self.members
        living, vanished = self._read_members()
        self._kept_cpu_seconds += _unpassed_seconds(before, living, vanished)
        self.members = living
        self._cpu_seconds = max(self._cpu_seconds, self._current_cpu_seconds())

    def end(self, usage: resource.struct_rusage) -> None:
        """Set the exact time of ``wait4`` for the first process and reaped descendants."""
        self.update()
        exact = usage.ru_utime + usage.ru_stime + sum(stat.cpu_seconds for stat in self.members.values())
        self._kept_cpu_seconds += max(0.0, exact - self._current_cpu_seconds())
        self._cpu_seconds = max(self._cpu_seconds, self._current_cpu_seconds())
        self._observed = self._reaped = True

    def read_disk(self) -> None:
        """Update `disk_seen`. Raises PermissionError."""
        before, self._disk = self._disk, {}
        for pid in self.members:
            if (moved := read_disk_bytes(pid)) is not None:
                self._disk[pid] = moved
        if self.pid not in self.members:  # no member could have inherited the bytes
            self._kept_disk = sum_pairs([self._kept_disk, *(before[pid] for pid in before.keys() - self._disk.keys())])
        now = sum_pairs([self._kept_disk, *self._disk.values()])
        if self._disk or self.disk_seen:
            seen = self.disk_seen or (0, 0)
            self.disk_seen = (max(seen[0], now[0]), max(seen[1], now[1]))

    def pss_bytes(self) -> int | None:
        """Return proportional memory (costs milliseconds a process), None if none is alive.

        Raises PermissionError.
        """
        values = [value for pid in self.members if (value := read_pss_bytes(pid)) is not None]
        return sum(values) if values else None

    def _current_cpu_seconds(self) -> float:
        return self._kept_cpu_seconds + sum(stat.cpu_seconds for stat in self.members.values())

    def _read_members(self) -> tuple[dict[int, ProcessStat], dict[int, ProcessStat]]:
        """Return the living and the vanished members.

        Parents are read first, and all again if one vanishes, so that reaped time counts once.
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
    """Trees of a node's tasks; only new process ids are examined, as reading all is costly."""

    def __init__(self) -> None:
        self.trees: dict[str, TaskTree] = {}
        self._seen: set[int] = set()
        self._last_created = -1

    def plant(self, name: str, pid: int) -> TaskTree:
        """Watch a task by its first process, with its existing children."""
        tree = self.trees[name] = TaskTree(name, pid)
        self.forget_unowned()
        return tree

    def rename(self, tree: TaskTree, name: str) -> None:
        """Give a tree another, unused name."""
        del self.trees[tree.name]
        tree.name = name
        self.trees[name] = tree

    def forget_unowned(self) -> None:
        """Examine every process the next time, as foreign ids may be reused."""
        self._seen.clear()
        self._last_created = -1

    def discover(self) -> None:
        """Add new processes to their trees."""
        newest = int(read_file("/proc/loadavg").split()[-1])  # process or thread id, unchanged without forks
        if newest == self._last_created:
            return
        self._last_created = newest
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        owners = {pid: tree for tree in self.trees.values() for pid in tree.members}
        unowned = {pid: stat for pid in present - self._seen - owners.keys() if (stat := read_stat(pid)) is not None}
        for pid in unowned:
            _adopt(pid, unowned, owners)
        self._seen = present


def _adopt(pid: int, newcomers: Mapping[int, ProcessStat], owners: dict[int, TaskTree]) -> TaskTree | None:
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
    """Return vanished members' CPU seconds missing in living ancestors' reaped time."""
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


def sum_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums of both parts of pairs."""
    return sum(first for first, _ in pairs), sum(second for _, second in pairs)
