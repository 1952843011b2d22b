"""CPU and memory limits of control groups (version 1 and 2), and contention for cores.

Documentation: cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from .processes import TICK_SECONDS, list_process_folder, read_file, read_lines, read_process_file

# version 1 writes "no limit" as the largest number of whole pages
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class _Mount:
    controllers: frozenset[str]
    root: str
    folder: Path


def cpu_quota_cores(pid: int | None = None) -> float | None:
    """Return the smallest CPU quota, in cores, of all groups of the process, or None.

    The default is this process.
    """
    limit = _smallest("cpu", pid, _read_quota)
    return None if limit is None else limit[0]


class QuotaCounter:
    """Kernel counters of the tightest CPU quota of a process (default: this one)."""

    def __init__(self, pid: int | None = None) -> None:
        self._limit = _smallest("cpu", pid, _read_quota)

    def read(self) -> tuple[float, float] | None:
        """Return cumulative (granted, throttled) seconds, None without a quota.

        Raises OSError if not counted.
        Granted is the quota of periods in which the group ran; throttled is summed over cores with a runnable thread.
        """
        if self._limit is None:
            return None
        quota, folder = self._limit
        counts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        period = _read_period_seconds(folder)
        if period is None or "nr_periods" not in counts:
            raise OSError(errno.ENOTSUP, "the group counts no periods")
        throttled = int(counts["throttled_usec"]) / 1e6 if "throttled_usec" in counts else int(counts["throttled_time"]) / 1e9
        return int(counts["nr_periods"]) * period * quota, throttled


def memory_limit_bytes(pid: int | None = None) -> int | None:
    """Return the smallest memory limit of all groups of the process, or None.

    The default is this process.
    """
    limit = _smallest("memory", pid, _read_memory_limit)
    return None if limit is None else int(limit[0])


def _smallest(controller: str, pid: int | None, read: Callable[[Path], float | None]) -> tuple[float, Path] | None:
    groups = (folder for _, folders in control_groups(controller, pid) for folder in folders)
    return min(((limit, folder) for folder in groups if (limit := read(folder)) is not None), default=None)


def _read_quota(folder: Path) -> float | None:
    if (words := _words(folder / "cpu.max")) is not None:  # version 2: "max 100000" or "150000 100000"
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    if quota is None or period is None or int(quota[0]) <= 0:
        return None
    return int(quota[0]) / int(period[0])


def _read_period_seconds(folder: Path) -> float | None:
    if (words := _words(folder / "cpu.max")) is not None:
        return int(words[1]) / 1e6
    period = _words(folder / "cpu.cfs_period_us")
    return None if period is None else int(period[0]) / 1e6


def _read_memory_limit(folder: Path) -> float | None:
    words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
    if words is None or words[0] == "max" or int(words[0]) >= _UNLIMITED_BYTES:
        return None
    return int(words[0])


def _words(path: Path) -> list[str] | None:
    return " ".join(read_lines(path)).split() or None


def control_groups(controller: str, pid: int | None = None) -> Iterator[tuple[Literal[1, 2], list[Path]]]:
    """Yield version and visible groups of each hierarchy that may limit `controller`.

    The first group is that of the process (default: this one).
    """
    memberships = _memberships(pid)
    for mount in _mounts():
        if mount.controllers and controller not in mount.controllers:
            continue
        group = next((path for names, path in memberships if names == mount.controllers or controller in names & mount.controllers), None)
        if group is not None:
            yield 1 if mount.controllers else 2, list(_upwards(mount, group))


def _upwards(mount: _Mount, group: str) -> Iterator[Path]:
    try:
        inside = PurePosixPath(group).relative_to(mount.root)
    except ValueError:  # the mount shows another part: its top is the nearest visible group
        inside = PurePosixPath()
    if ".." in inside.parts:  # outside the namespace
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        folder = mount.folder / part
        if folder.is_dir():
            yield folder


def _memberships(pid: int | None) -> list[tuple[frozenset[str], str]]:
    """Return (controllers, path) per hierarchy from lines ``4:cpu,cpuacct:/jobs/7``.

    Version 2 has no controllers.
    """
    fields = [line.split(":", 2) for line in read_lines(Path(f"/proc/{pid or os.getpid()}/cgroup"))]
    return [(frozenset(names.split(",")) - {""}, path) for _, names, path in fields]


def _mounts() -> list[_Mount]:
    """Return this mount namespace's cgroup hierarchies. Format: proc_pid_mountinfo(5)."""
    mounts = []
    for line in read_lines(Path("/proc/self/mountinfo")):
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, folder = head.split(" ")[3:5]
        names = frozenset(options.split(",")) if kind == "cgroup" else frozenset()
        mounts.append(_Mount(names, root, Path(folder)))
    return mounts


# Formats: Documentation/scheduler/sched-stats.rst and accounting/psi.rst of the kernel; proc_stat(5)
_PRESSURE_FILES = ("/proc/pressure/cpu", "/sys/fs/cgroup/cpu.pressure")  # the machine's, or in a container the top visible group's


class WaitCounter:
    """Cumulative seconds that threads waited for a core, except right before their end.

    Raises OSError if not counted.
    """

    def __init__(self) -> None:
        if read_file("/proc/thread-self/schedstat").split() == [b"0"] * 3:
            raise OSError(errno.ENOTSUP, "not counted by this kernel")
        self.seconds = 0.0
        self._before: dict[tuple[int, int], float] = {}

    def read(self, pids: Iterable[int]) -> float:
        """Update and return the count for these processes."""
        now: dict[tuple[int, int], float] = {}
        for pid in pids:
            for thread in map(int, list_process_folder(pid, "task")):
                content = read_process_file(pid, f"task/{thread}/schedstat")
                if content is not None:
                    now[pid, thread] = int(content.split()[1]) / 1e9
        for key, waited in now.items():
            before = self._before.get(key, 0.0)
            self.seconds += waited - before if waited >= before else waited  # a new thread with a reused number counts from 0
        self._before = now
        return self.seconds


def read_machine_cpu_seconds() -> float:
    """Return all programs' user, nice and system seconds on usable cores. Raises OSError.

    Interrupts and steal do not count.
    """
    usable = {f"cpu{core}".encode() for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in read_file("/proc/stat").split(b"\n"):
        fields = line.split(maxsplit=4)
        if fields and fields[0] in usable:
            ticks += sum(map(int, fields[1:4]))
        elif line.startswith(b"intr"):  # long line after the last core
            break
    return ticks * TICK_SECONDS


def read_pressure_seconds() -> float | None:
    """Return the seconds in which a task of the machine waited for a core; None if unavailable."""
    for path in _PRESSURE_FILES:
        try:
            some = read_file(path).split(b"\n")[0]
        except OSError:
            continue
        return int(some.rpartition(b"total=")[2]) / 1e6
    return None
