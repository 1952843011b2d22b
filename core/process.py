"""Processes: the command of one that runs Python, its end with its parent, and how to tell it from a later one with its number.

``python -m crosstrain.core.process PARENT SIGNAL PROGRAM ARGUMENTS`` becomes a program that ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

__all__ = [
    "NOTICES",
    "InterruptsIgnored",
    "command_ending_with_parent",
    "die_with_parent",
    "ending_in_words",
    "ignore_interrupts",
    "ignores_signal",
    "interrupts_answered",
    "isolated_python",
    "kill_group",
    "pid_namespace",
    "process_state",
    "python",
    "start_of",
    "there_to_work_in",
    "wake_when_parent_ends",
]

_PR_SET_PDEATHSIG = 1

NO_PROGRAM = 127
"""What a shell exits with where there is no such program, and `command_ending_with_parent` as well."""

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""What batch systems send some time before a job is over; nobody presses a key for them."""

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, *NOTICES)


def python(module: str, *arguments: str, interpreter: str | None = None) -> list[str]:
    """Return the command that runs one of our modules, with this interpreter unless another is named; every Python is started by it.

    ``-P`` keeps the working directory off its path: without it a file ``queue.py`` there would be imported instead of the standard
    library's. What the user puts on PYTHONPATH, a model under development for instance, is found by the child as by this process.
    """
    return [interpreter or sys.executable, "-P", "-m", module, *arguments]


def there_to_work_in() -> str:
    """Return the working directory for a child: this process's, or ``/`` where that has been removed, since MKL then loads no library."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return "."


def isolated_python(*arguments: str) -> list[str]:
    """Return the command that runs a script with the standard library alone: neither PYTHONPATH nor any installed package counts."""
    return [sys.executable, "-I", "-S", *arguments]


def ending_in_words(code: int) -> str:
    """Say how a process ended, by its exit code as `subprocess` has it: below 0 for a signal."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, and end at once where that has happened already.

    Elsewhere than on Linux this does nothing: there the end of the control stream ends the process. See prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform != "linux":
        return
    _have_sent_at_parents_end(number)
    if os.getppid() != parent_pid:
        os._exit(70)


def wake_when_parent_ends() -> None:
    """Have the kernel continue this process, where it is stopped then, when the thread that started it ends: so it comes to notice that.

    It does nothing to one that is not stopped, and takes the place of another such order that this process was started with, such as
    one to send it a signal that it ignores. Elsewhere than on Linux this does nothing.
    """
    if sys.platform == "linux":
        _have_sent_at_parents_end(signal.SIGCONT)


def _have_sent_at_parents_end(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def command_ending_with_parent(program: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Return the command that runs `program` as a child of this process's main thread, and no longer than that lives.

    The program keeps the child's id, and the kernel's order to send it the signal when its parent has ended, however that ended.
    """
    return python("crosstrain.core.process", str(os.getpid()), str(int(number)), *program)


def ignore_interrupts() -> None:
    """Ignore what asks a process to end, as do the processes that this one starts: for whoever ends with the channel to its driver.

    Batch systems send these signals to every process of a job; what becomes of the run is for the driver alone to decide.
    """
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupts_answered(answer: Callable[[], None]) -> Iterator[None]:
    """Within the block have a thread call `answer` at each Ctrl-C, and nothing else. For the main thread.

    Processes that this thread starts meanwhile have the signal blocked, so that it does not end them before they have come to ignore it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # somebody has to take it
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


class InterruptsIgnored:
    """The same for as long as the block lasts. For the main thread."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def pid_namespace() -> int:
    """Return the number of the namespace in which this process's and its children's ids count; 0 elsewhere than on Linux."""
    namespace = Path("/proc/self/ns/pid")
    return namespace.stat().st_ino if namespace.exists() else 0


def kill_group(pid: int) -> None:
    """Kill a child with all of its process group; one that has not yet a group of its own is killed alone."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def process_state(pid: int) -> str | None:
    """Return the kernel's state letter of a process (``R S D T Z``), or None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def ignores_signal(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; False where it does not live, or the system does not say so (elsewhere than on Linux)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigIgn:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def start_of(pid: int) -> int:
    """Return the start of a process in clock ticks after boot, or 0 where it does not live: ids are used again, pairs are not."""
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
