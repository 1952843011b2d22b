"""Runs one ``trainer`` as a child process: it gets the user's signals exactly once, and ends when this process ends."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

from ...core.process import NOTICES, command_ending_with_parent, python

__all__ = ["ChildOutcome", "SignalsToChild", "run_child"]


class SignalsToChild:
    """Within the block SIGINT, SIGTERM, SIGHUP (unless ignored, as under nohup), SIGUSR1 and SIGUSR2 go to the child.

    Each goes there once, and is remembered. For the main thread.
    """

    def __init__(self) -> None:
        self.received = False
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        numbers = [signal.SIGINT, signal.SIGTERM, *NOTICES]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():  # once interrupted, a late second signal must not change the exit code
            signal.signal(number, signal.SIG_IGN if self.received else handler)

    def watch(self, child: subprocess.Popen[str] | None) -> None:
        """Pass signals on to this child from now on, and one that came while it was being started."""
        self._child = child
        if child is not None and self.received:
            child.send_signal(signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._child is not None:
            self._child.send_signal(number)


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """How a child ended: its exit code (128 + the number of the signal that killed it), and what it wrote to standard output."""

    exit_code: int
    output: str


def run_child(arguments: Sequence[str], signals: SignalsToChild, on_error_line: Callable[[str], None] | None = None) -> ChildOutcome:
    """Run ``trainer`` with these arguments to its end.

    What it writes to standard error goes to `on_error_line`, a line at a time, or where this process's goes. It is the leader of a process
    group, so that Ctrl-C reaches it through this process alone and once; it ends with this process, also where this one is killed.
    """
    with subprocess.Popen(
        command_ending_with_parent(python("crosstrain.cli.main", *arguments)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if on_error_line is None else subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    ) as child:
        signals.watch(child)
        written: list[str] = []
        reader = threading.Thread(target=lambda: written.append(child.stdout.read() if child.stdout else ""), name="output")
        reader.start()
        if on_error_line is not None and child.stderr is not None:
            for line in child.stderr:
                on_error_line(line.rstrip("\n"))
        child.wait()
        signals.watch(None)
        reader.join()
    code = child.returncode
    return ChildOutcome(code if code >= 0 else 128 - code, written[0])
