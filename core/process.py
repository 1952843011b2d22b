"""Processes: start commands, end with the parent, signals, identity.

``python -m crosstrain.core.process PARENT SIGNAL PROGRAM ARGUMENTS`` becomes a program that ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
PRIVATE_VARIABLES = ("TRAINER_SECRET", "TRAINER_NOTIFY", "TRAINER_ON_FAILURE")  # of the driver and agents, hidden from other code
NO_PROGRAM = 127  # exit code of a shell and of `command_ending_with_parent` for a missing program
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # batch systems send these some time before the end of a job
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, *NOTICES)


def python(module: str, *arguments: str, interpreter: str | None = None) -> list[str]:
    """Return the command of our module; ``-P`` keeps the working directory off its path."""
    return [interpreter or sys.executable, "-P", "-m", module, *arguments]


def public_environment() -> dict[str, str]:
    """Return the environment for a process of other code, without our secrets."""
    return {name: value for name, value in os.environ.items() if name not in PRIVATE_VARIABLES}


def child_working_directory() -> str:
    """Return a child's working directory: ours, or ``/`` if it was removed, as MKL needs one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return "."


def process_age_seconds() -> float:
    """Return how long this process has existed, within 10 ms.

    psutil adds to the time of the machine's start, which is known in whole seconds, so that it is up to a second off.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), starttime


def isolated_python(*arguments: str) -> list[str]:
    """Return the command of a script with the standard library alone, without PYTHONPATH."""
    return [sys.executable, "-I", "-S", *arguments]


def ending_in_words(code: int) -> str:
    """Describe how a process ended, by its exit code as in `subprocess`: below 0 for a signal."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Request a signal for the end of the parent thread; exit if it has ended. Linux (prctl(2))."""
    if sys.platform == "linux":
        _request_death_signal(number)
        if os.getppid() != parent_pid:
            os._exit(70)


def wake_when_parent_ends() -> None:
    """Request SIGCONT for the parent thread's end, replacing an earlier request. Linux only."""
    if sys.platform == "linux":
        _request_death_signal(signal.SIGCONT)


def _request_death_signal(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def command_ending_with_parent(program: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Return the command that runs `program` and signals it when this main thread has ended."""
    return python("crosstrain.core.process", str(os.getpid()), str(int(number)), *program)


def ignore_interrupts() -> None:
    """Ignore signals that request an end, also in children, as only the driver decides."""
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupts_answered(answer: Callable[[], None]) -> Iterator[None]:
    """Call `answer` in a thread at each Ctrl-C; it is blocked in new children. Main thread only."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one thread has to receive it
        while os.read(reader, 1):
            answer()
        os.close(reader)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=listen, name="ctrl-c", daemon=True).start()
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.close(writer)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore within the block the signals of `ignore_interrupts`. For the main thread."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pid_namespace() -> int:
    """Return the number of this process's namespace of process ids; 0 outside Linux."""
    namespace = Path("/proc/self/ns/pid")
    return namespace.stat().st_ino if namespace.exists() else 0


def kill_group(pid: int) -> None:
    """Kill a child with its process group, or alone if it has no group yet."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def process_state(pid: int) -> str | None:
    """Return a process's state letter (``R S D T Z``), None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def ignores_signal(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; False if it does not exist, or outside Linux."""
    return _in_mask(pid, "SigIgn:", number)


def catches_signal(pid: int, number: int) -> bool:
    """Return whether a process catches a signal; False if it does not exist, or outside Linux."""
    return _in_mask(pid, "SigCgt:", number)


def _in_mask(pid: int, field: str, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next((line.split()[1] for line in lines if line.startswith(field)), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def start_of(pid: int) -> int:
    """Return a process's start in ticks after boot, or 0: ids are reused, pairs are not."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(line.rpartition(")")[2].split()[19])


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent, ending, *command = sys.argv[1:]
    die_with_parent(int(parent), int(ending))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.exit(NO_PROGRAM)
