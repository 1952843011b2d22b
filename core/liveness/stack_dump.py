"""Where this process stands: at a signal it writes the Python stacks of all its threads, whatever it is doing, native code included.

faulthandler writes them in the signal's handler itself, without the interpreter's lock. A process that is stopped, or sleeps in the kernel
without interruption (state D), runs no handler. Until `write_stacks_on_signal` the signal would end a process; ask `answers_signal` first.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import NamedTuple

__all__ = ["DUMP_SIGNAL", "WorkingThread", "answers_signal", "mark_working_thread", "working_thread", "write_stacks_on_signal"]

DUMP_SIGNAL: int | None = int(signal.SIGRTMIN) + 14 if sys.platform == "linux" else None
"""A real-time signal: batch systems send none, and NCCL catches none. From the middle of the range: the C library keeps the first for
itself, JVMs and valgrind take the last. None where the system has no such signals."""

_WORKING = re.compile(r"^working thread (0x[0-9a-f]{16}) (\d+)$", re.MULTILINE)

_descriptor: int | None = None


class WorkingThread(NamedTuple):
    """The thread that does a process's work: its number as faulthandler writes it, and that of the kernel, which py-spy writes."""

    ident: str
    native_id: str


def write_stacks_on_signal(descriptor: int) -> None:
    """From now on write the stacks to an open file at each `DUMP_SIGNAL`. The calling thread counts as the one that works."""
    global _descriptor
    if DUMP_SIGNAL is None:
        return
    os.set_inheritable(descriptor, False)
    _descriptor = descriptor
    mark_working_thread()
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True)


def mark_working_thread() -> None:
    """Say that the calling thread does this process's work from now on: where it stands is where the process stands."""
    if _descriptor is not None:
        os.write(_descriptor, b"working thread 0x%016x %d\n" % (threading.get_ident(), threading.get_native_id()))


def working_thread(written: str) -> WorkingThread | None:
    """Return the thread that was marked last in what a process has written, None where none was."""
    marked = _WORKING.findall(written)
    return WorkingThread(*marked[-1]) if marked else None


def answers_signal(pid: int) -> bool:
    """Whether a process would answer `DUMP_SIGNAL`; where it would not, the signal would end it."""
    if DUMP_SIGNAL is None:
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1)
