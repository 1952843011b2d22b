"""The limits that control groups set on a process: CPU quota and memory, version 1 and 2, its own group and every group above.

Inside a container the process sees its group's path, but perhaps only a part of the tree: what is not visible does not count.
Documentation: cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["QuotaCounter", "cpu_quota_cores", "memory_limit_bytes"]

# Version 1 writes "no limit" as the largest number of whole pages; nothing real comes near.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: the controllers it has (empty in version 2), the group that is its root, and where it is."""

    controllers: frozenset[str]
    root: str
    folder: Path


def cpu_quota_cores(pid: int | None = None) -> float | None:
    """Return the CPU quota in cores: the smallest of all groups that hold the process (default: this one); None without a quota."""
    return _smallest("cpu", pid, _read_quota)


class QuotaCounter:
    """What the CPU quota that limits a process (default: this one) most granted to its group and kept from it, as the kernel counts it."""

    def __init__(self, pid: int | None = None) -> None:
        limited = [(quota, folder) for folder in _groups("cpu", pid) if (quota := _read_quota(folder)) is not None]
        self._limit = min(limited, default=None)

    def read(self) -> tuple[float, float] | None:
        """Return (granted, throttled) in seconds, which add up; None without a quota. Raises OSError where the kernel does not count.

        Granted are the CPU seconds of the quota over all periods in which the group ran at all: in others it asked for nothing. Throttled
        is how long it had to stand still, summed over the cores on which some thread of it was ready to run.
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
    """Return the memory limit: the smallest of all groups that hold the process (default: this one); None without a limit."""
    limit = _smallest("memory", pid, _read_memory_limit)
    return None if limit is None else int(limit)


def _smallest(controller: str, pid: int | None, read: Callable[[Path], float | None]) -> float | None:
    limits = [limit for folder in _groups(controller, pid) if (limit := read(folder)) is not None]
    return min(limits, default=None)


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
    """Return the words of a control file, or None where the group has no such file or does not let us read it."""
    try:
        return path.read_text().split() or None
    except OSError:
        return None


def _groups(controller: str, pid: int | None) -> Iterator[Path]:
    """Yield the folder of each visible group that holds the process, in every hierarchy that could limit `controller`."""
    memberships = _memberships(pid)
    for mount in _mounts():
        if mount.controllers and controller not in mount.controllers:
            continue
        group = next((path for names, path in memberships if names == mount.controllers or controller in names & mount.controllers), None)
        if group is not None:
            yield from _upwards(mount, group)


def _upwards(mount: _Mount, group: str) -> Iterator[Path]:
    """Yield the folders from the group up to the top of the mount."""
    try:
        inside = PurePosixPath(group).relative_to(mount.root)
    except ValueError:  # the mount shows another part of the tree: its top is the nearest group we can see
        inside = PurePosixPath()
    if ".." in inside.parts:  # the process is outside the namespace's part of the tree
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        folder = mount.folder / part
        if folder.is_dir():
            yield folder


def _memberships(pid: int | None) -> list[tuple[frozenset[str], str]]:
    """Return (controllers, path) of each hierarchy, from lines such as ``4:cpu,cpuacct:/jobs/7``; version 2 has no controllers."""
    try:
        lines = Path(f"/proc/{pid or os.getpid()}/cgroup").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(":", 2) for line in lines]
    return [(frozenset(names.split(",")) - {""}, path) for _, names, path in fields]


def _mounts() -> list[_Mount]:
    """Return the mounted cgroup hierarchies of this process's mount namespace. Format: proc_pid_mountinfo(5)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, folder = head.split(" ")[3:5]
        names = frozenset(options.split(",")) if kind == "cgroup" else frozenset()
        mounts.append(_Mount(names, root, Path(folder)))
    return mounts
