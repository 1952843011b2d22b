"""How a task has ended: what the kernel says, and what its log says last."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from ...core.liveness.memory_exhaustion import kernel_oom_kills

__all__ = ["Death", "death_of", "never_started", "tail"]

LOG_TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Death:
    """How a task ended. `order` counts the deaths on the node; `signal` is None where the task exited by itself.

    Of one that could not be started there is neither a process number nor a code nor a signal.

    CPU seconds are the kernel's, from wait4(2), with all the task's own children; None where the fork server, which would have heard them,
    has ended as well. `oom_kills` is how many processes of the machine the kernel has killed for want of memory while the task lived; None
    where it does not say, or the task ended by itself.
    """

    task: str
    pid: int | None
    code: int | None
    signal: str | None
    order: int
    cpu_seconds: float | None
    max_rss_bytes: int | None
    oom_kills: int | None = None


def death_of(task: str, pid: int, order: int, status: int, usage: resource.struct_rusage | None, oom_kills_before: int | None) -> Death:
    """Return a death by the status and the usage of wait4(2), and by how many processes the kernel had killed for memory before."""
    killed = os.WIFSIGNALED(status)
    return Death(
        task=task,
        pid=pid,
        code=None if killed else os.WEXITSTATUS(status),
        signal=signal.Signals(os.WTERMSIG(status)).name if killed else None,
        order=order,
        cpu_seconds=None if usage is None else usage.ru_utime + usage.ru_stime,
        max_rss_bytes=None if usage is None else usage.ru_maxrss * 1024,
        oom_kills=_oom_kills_since(oom_kills_before) if killed else None,
    )


def never_started(task: str, order: int) -> Death:
    """Return what stands for the death of a task that could not be started."""
    return Death(task, None, None, None, order, None, None)


def _oom_kills_since(before: int | None) -> int | None:
    now = kernel_oom_kills()
    return None if now is None or before is None else max(0, now - before)


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """Return the last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return [f"(the log {log} could not be read: {error.strerror})"]
