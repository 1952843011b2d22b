"""How hard is it to get a core? How long tasks that could run waited for one, and how much of the cores all programs together had.

Formats: the kernel's Documentation/scheduler/sched-stats.rst (a thread's ``schedstat``) and accounting/psi.rst; proc_stat(5).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from .procfs import TICK_SECONDS, read_file

__all__ = ["WaitCounter", "read_machine_cpu_seconds", "read_pressure_seconds"]

_PRESSURE_FILES = ("/proc/pressure/cpu", "/sys/fs/cgroup/cpu.pressure")
"""The machine's; where a container hides it, that of the group at the top of what the container sees."""


class WaitCounter:
    """Seconds that the threads of some processes were ready to run and waited for a core; they add up.

    The kernel counts by thread, and forgets a thread that ends: what it waited since the last look is lost. Raises OSError where the
    kernel does not count.
    """

    def __init__(self) -> None:
        if read_file("/proc/thread-self/schedstat").split() == [b"0"] * 3:  # it has the file and leaves it at that
            raise OSError(errno.ENOTSUP, "not counted by this kernel")
        self.seconds = 0.0
        self._before: dict[tuple[int, int], float] = {}

    def read(self, pids: Iterable[int]) -> float:
        """Bring the count up to date for these processes, and return it."""
        now: dict[tuple[int, int], float] = {}
        for pid in pids:
            for thread in _threads(pid):
                waited = _waited_seconds(pid, thread)
                if waited is not None:
                    now[pid, thread] = waited
        for key, waited in now.items():
            before = self._before.get(key, 0.0)
            self.seconds += waited - before if waited >= before else waited  # a new thread with an old number counts from 0
        self._before = now
        return self.seconds


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _waited_seconds(pid: int, thread: int) -> float | None:
    """Return the second field of a thread's ``schedstat``; None where it has ended."""
    try:
        fields = read_file(f"/proc/{pid}/task/{thread}/schedstat").split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]) / 1e9


def read_machine_cpu_seconds() -> float:
    """Return the CPU seconds that all programs used so far on the cores that this process may use: user, nice and system time.

    Interrupts are left out, since they serve our own traffic too, and so is what a hypervisor took. Raises OSError.
    """
    own = {f"cpu{core}".encode() for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in read_file("/proc/stat").split(b"\n"):
        fields = line.split(maxsplit=4)
        if fields and fields[0] in own:
            ticks += sum(map(int, fields[1:4]))
        elif line.startswith(b"intr"):  # a long line, and no core stands behind it
            break
    return ticks * TICK_SECONDS


def read_pressure_seconds() -> float | None:
    """Return the seconds during which some task waited for a core, on the whole machine; None where the kernel does not tell."""
    for path in _PRESSURE_FILES:
        try:
            some = read_file(path).split(b"\n")[0]
        except OSError:
            continue
        return int(some.rpartition(b"total=")[2]) / 1e6
    return None
