"""Read the Linux process file system: one small function a file, no state.

Fields and their units: proc(5), and Documentation/filesystems/proc.rst of the kernel.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

__all__ = [
    "TICK_SECONDS",
    "ProcessStat",
    "last_created_pid",
    "list_pids",
    "read_disk_bytes",
    "read_file",
    "read_pss_bytes",
    "read_socket_inodes",
    "read_stat",
]

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 1 << 16
_CPUCLOCK_SCHED = 2
TICK_SECONDS = 1.0 / _TICKS_PER_SECOND


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """``/proc/PID/stat``: who a process is, what it used itself, and what the children it has waited for used.

    `start_ticks` tells two processes with the same id apart. `ended` is true of a process that nobody has waited for yet (its times
    are still there, its memory is not).
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
        """User and system time of the process and of the children it has waited for."""
        return self.own_cpu_seconds + self.reaped_cpu_seconds


def read_file(path: str) -> bytes:
    """Return a small file's content. Raises OSError; on a process that has ended FileNotFoundError or ProcessLookupError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, _READ_BYTES):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def list_pids() -> set[int]:
    """Return the ids of all processes that this process may see."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def last_created_pid() -> int:
    """Return the id that was given to the newest process or thread: while it stays the same, nothing was forked."""
    return int(read_file("/proc/loadavg").split()[-1])


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None where there is none with this id (any more). Raises OSError on anything else."""
    try:
        content = read_file(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in brackets and may hold anything; the numbers start after its last bracket.
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
    """Return a process's CPU time to the nanosecond from its clock; where it has none that we may read, from the ticks in ``stat``.

    The number of the clock follows from the process id (clock_getcpuclockid(3); MAKE_PROCESS_CPUCLOCK in the kernel). Ticks of 10 ms
    would leave an error of 4% in the cores used over half a second.
    """
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return ticks / _TICKS_PER_SECOND


def read_disk_bytes(pid: int) -> tuple[int, int] | None:
    """Return the (read, written) bytes that a process moved from and to storage, with those of the children it has waited for.

    None where the process is gone; raises PermissionError on another user's process.
    """
    try:
        content = read_file(f"/proc/{pid}/io")
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = dict(line.split(b": ") for line in content.splitlines())
    return int(values[b"read_bytes"]), int(values[b"write_bytes"])


def read_pss_bytes(pid: int) -> int | None:
    """Return the process's memory where a page shared by n processes counts as 1/n. Costs the kernel milliseconds.

    None where the process is gone or has given up its memory; raises PermissionError on another user's process.
    """
    try:
        content = read_file(f"/proc/{pid}/smaps_rollup")
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in content.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def read_socket_inodes(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process holds open; empty where it is gone. Raises PermissionError on another user's."""
    inodes: set[int] = set()
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return inodes
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes
