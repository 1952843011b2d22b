"""Processes that end with their parent, and how to tell a process from a later one with its number (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = ["die_with_parent", "pid_namespace", "start_of"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, and end at once where that has happened already.

    Elsewhere than on Linux this does nothing: there the end of the control stream ends the process. See prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(70)


def pid_namespace() -> int:
    """Return the number of the namespace in which this process's and its children's ids count; 0 elsewhere than on Linux."""
    namespace = Path("/proc/self/ns/pid")
    return namespace.stat().st_ino if namespace.exists() else 0


def start_of(pid: int) -> int:
    """Return the start of a process in clock ticks after boot, or 0 where it does not live: ids are used again, pairs are not."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(line.rpartition(")")[2].split()[19])
