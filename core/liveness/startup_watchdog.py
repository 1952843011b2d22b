"""How far a process has come in its start, and the end of a start that takes too long.

A framework may get stuck where no exception comes from: in native code, or waiting for a process that never answers. So the time runs in a
thread, which says where the others stand; and once more in native code (faulthandler), for a start that holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["REPORT_SECONDS", "add_phase_listener", "startup_deadline", "startup_phase"]

REPORT_SECONDS = 2.0
"""How long after the time of a start the native clock ends a process that has not reported by itself."""

FRAMES = 6
"""Innermost frames shown of each thread: with three threads they fit in the end of a log that a failed run shows."""

_phases: list[tuple[str, bool]] = [("starting", False)]
_listeners: list[Callable[[str], None]] = []


def startup_phase(name: str, *, for_others: bool = False) -> None:
    """Say what the process does from now on, in the form "warming up", until it says something else or is ready.

    `for_others`: it waits for other processes. One of those that is stuck itself is then the first to report.
    """
    _phases[:] = [(name, for_others)]
    for listener in _listeners:
        listener(name)


def add_phase_listener(listener: Callable[[str], None]) -> None:
    """Have every phase from now on told to `listener`: of a process that cannot report any more others know what it was doing."""
    _listeners.append(listener)


@contextmanager
def startup_deadline(deadline: float, report: Callable[[str], None]) -> Iterator[None]:
    """End the process with code 1 where the block has not ended by `deadline`, of time.monotonic().

    `report` is called before with what the process was doing, in a sentence; where every thread stands is written to standard error.
    """

    def end() -> None:
        doing, for_others = _phases[0]
        stacks = _stacks()
        time.sleep(REPORT_SECONDS / 2 if for_others else 0.0)
        report(f"{doing} has not ended within --start-timeout; the log says where it stands")
        sys.stderr.write(f"{doing} has not ended in time; each thread's innermost calls, the main thread last:\n{stacks}\n")
        sys.stderr.flush()
        os._exit(1)

    seconds = max(deadline - time.monotonic(), 0.0)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + REPORT_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
        timer.join()  # whoever forks next must be the only thread; one that has begun to end the process ends this one too


def _stacks() -> str:
    """Return the innermost frames of all threads but this one, the main thread's last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    shown = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] == main):
        if ident != threading.get_ident():
            frames = traceback.extract_stack(frame)[-FRAMES:]
            shown += [f"thread {names.get(ident, ident)}", *(f'  "{one.filename}", line {one.lineno}, in {one.name}' for one in frames)]
    return "\n".join(shown)
