"""Silent peers, deadlines of process starts, stack traces on a signal, exhausted memory."""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .process import catches_signal

__path__: list[str] = []  # former submodules are found by `core/plugins.py`
TICK_SECONDS = 0.25  # how often listeners check for arrivals
MAX_TICK_SECONDS = 2 * TICK_SECONDS  # longest counted tick, so that a paused process does not report silence


class SilenceCounter:
    """Counts how long nothing has arrived from each peer. `now` is in seconds from any origin."""

    def __init__(self, limit_seconds: float, now: float) -> None:
        self.limit_seconds = limit_seconds
        self._ticked_at = now
        self._seen: dict[int, tuple[Hashable, float]] = {}

    def tick(self, now: float, arrivals: Mapping[int, Hashable]) -> list[int]:
        """Return the silent peers; `arrivals` has per peer a value that changes with each arrival."""
        passed = min(now - self._ticked_at, MAX_TICK_SECONDS)
        self._ticked_at = now
        before = self._seen
        self._seen = {
            peer: (mark, before[peer][1] + passed if peer in before and before[peer][0] == mark else 0.0) for peer, mark in arrivals.items()
        }
        return [peer for peer, (_, seconds) in self._seen.items() if seconds >= self.limit_seconds]

    def seconds(self, peer: int) -> float:
        """Return how long a peer was silent at the last tick."""
        return self._seen[peer][1] if peer in self._seen else 0.0


# Frameworks can hang in native code, so a thread reports the stacks at the deadline, and faulthandler's native timer follows.
REPORT_SECONDS = 2.0  # the native timer's margin for a process that reports by itself
FRAMES = 6  # innermost per thread: those of three threads fit into the shown end of a log
_phases: list[tuple[str, bool]] = [("starting", False)]
_listeners: list[Callable[[str], None]] = []


def startup_phase(name: str, *, for_others: bool = False) -> None:
    """Set what the process is doing ("warming up"); `for_others`: it waits for others."""
    _phases[:] = [(name, for_others)]
    for listener in _listeners:
        listener(name)


def add_phase_listener(listener: Callable[[str], None]) -> None:
    """Call `listener` at every phase, so that others know what a stuck process was doing."""
    _listeners.append(listener)


@contextmanager
def startup_deadline(deadline: float, report: Callable[[str], None]) -> Iterator[None]:
    """Exit with 1 after `report` and stack traces if the block exceeds `deadline` (monotonic)."""

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
        timer.join()  # the process may fork next, and must have only one thread


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    shown = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] == main):
        if ident != threading.get_ident():
            frames = traceback.extract_stack(frame)[-FRAMES:]
            shown += [f"thread {names.get(ident, ident)}", *(f'  "{call.filename}", line {call.lineno}, in {call.name}' for call in frames)]
    return "\n".join(shown)


# Faulthandler writes stacks without the interpreter's lock; without a handler the signal ends a process: check `answers_signal`.
DUMP_SIGNAL: int | None = int(signal.SIGRTMIN) + 14 if sys.platform == "linux" else None  # unused by batch systems, NCCL, libc, JVMs
_WORKING = re.compile(r"^working thread (0x[0-9a-f]{16}) (\d+)$", re.MULTILINE)
_descriptor: int | None = None


class WorkingThread(NamedTuple):
    """The thread that does a process's work: its id for faulthandler, and for kernel and py-spy."""

    ident: str
    native_id: str


def write_stacks_on_signal(descriptor: int) -> None:
    """Write the stacks to a file at each `DUMP_SIGNAL`; the calling thread is the working one."""
    global _descriptor
    if DUMP_SIGNAL is None:
        return
    os.set_inheritable(descriptor, False)
    _descriptor = descriptor
    mark_working_thread()
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True)


def mark_working_thread() -> None:
    """Mark the calling thread as the one that does this process's work."""
    if _descriptor is not None:
        os.write(_descriptor, b"working thread 0x%016x %d\n" % (threading.get_ident(), threading.get_native_id()))


def working_thread(written: str) -> WorkingThread | None:
    """Return the thread that was marked last in a process's text, None if none was."""
    marked = _WORKING.findall(written)
    return WorkingThread(*marked[-1]) if marked else None


def answers_signal(pid: int) -> bool:
    """Return whether a process catches `DUMP_SIGNAL`, which would otherwise end it."""
    return DUMP_SIGNAL is not None and catches_signal(pid, DUMP_SIGNAL)


REMEDY = (
    "a smaller --batch-size, or of text --batch-tokens, needs less (--accumulate N makes updates as large again from N such batches), "
    "and so do fewer workers on a node"
)
_OUT_OF_MEMORY = re.compile(  # messages of torch, TensorFlow, the C++ library, numpy and the system; frameworks raise general errors
    r"can't allocate memory|cannot allocate memory|out of memory|failed to allocate memory|OOM when allocating|std::bad_alloc"
    r"|unable to allocate .* for an array",
    re.IGNORECASE,
)
_TF_WORKER = re.compile(r"/job:worker/replica:\d+/task:(\d+)/")


def memory_error_line(error: BaseException | None) -> str | None:
    """Return the line about exhausted memory of an error or its causes; None if there is none."""
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        line = next((line.strip() for line in str(error).splitlines() if _OUT_OF_MEMORY.search(line)), None)
        if line is not None:
            return line[:1000]
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return f"{type(error).__name__}: {error}"[:1000].rstrip(": ")
        error = error.__cause__
    return None


def worker_in(line: str) -> str | None:
    """Return the worker that TensorFlow names in such a line, maybe not the one that raises."""
    match = _TF_WORKER.search(line)
    return f"worker-{match[1]}" if match else None


def kernel_oom_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory; None if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(count) for name, _, count in (line.partition(" ") for line in lines) if name == "oom_kill"), None)
