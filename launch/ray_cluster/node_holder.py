"""The actor that holds a node for a run: it starts commands there, and tells how they end.

It travels to the node as it stands, by value, so it needs nothing there but Ray and the standard library: the interpreter of the commands,
which has our packages, may be another than Ray's.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NodeHolder"]

LONGEST_LINE_BYTES = 4096
LINES_SECONDS = 0.5
"""How long is waited for the last lines of a command that has ended."""

MOST_EVENTS = 100
"""That are told at once."""

OF_THREADS = "OMP_NUM_THREADS"
"""Ray sets it in an actor that has so many CPUs, unless the user has; how many threads a task has is for the job to say."""

NO_PROGRAM = 127
"""As a shell says it."""


class NodeHolder:
    """Starts commands on the node where it lives, each under a number. The node's address stands in `address_variable` of theirs."""

    def __init__(self, address_variable: str) -> None:
        import ray.util

        self._more = {address_variable: ray.util.get_node_ip_address()}
        self._events: queue.SimpleQueue[tuple[int, str, object]] = queue.SimpleQueue()
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, command: Sequence[str], first_line: str) -> None:
        """Start a command, with a line of input. How it ends is an event, also where it cannot be started."""
        environment = {**_environment(), **self._more}
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._events.put((number, "line", str(error)))
            self._events.put((number, "ended", NO_PROGRAM))
            return
        self._children[number] = child
        reader = threading.Thread(target=self._relay, args=(number, child), name=f"lines-{number}", daemon=True)
        reader.start()
        threading.Thread(target=self._await, args=(number, child, reader), name=f"end-{number}", daemon=True).start()
        assert child.stdin is not None
        try:
            with child.stdin:
                child.stdin.write(first_line.encode())
        except BrokenPipeError:
            return  # it has ended, which is told

    def events(self) -> list[tuple[int, str, object]]:
        """Wait for something to happen and return it: (number, ``line``, text of standard error) or (number, ``ended``, exit code)."""
        found = [self._events.get()]
        while len(found) < MOST_EVENTS and not self._events.empty():
            found.append(self._events.get())
        return found

    def kill(self, number: int) -> None:
        """End a command at once; one that has ended already, or never began, is fine."""
        child = self._children.get(number)
        if child is not None:
            child.kill()

    def end(self, patience_seconds: float) -> None:
        """Let all commands end by themselves, and kill those that take longer."""
        deadline = time.monotonic() + patience_seconds
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()

    def _relay(self, number: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        with child.stderr as file:
            while line := file.readline(LONGEST_LINE_BYTES):
                self._events.put((number, "line", line.decode(errors="replace").rstrip("\r\n")))

    def _await(self, number: int, child: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        code = child.wait()
        reader.join(LINES_SECONDS)
        self._events.put((number, "ended", code))


def _environment() -> dict[str, str]:
    """Return this process's environment as its node has it, with what Ray has allotted, such as GPUs."""
    found = dict(os.environ)
    begun_with = {entry.split(b"=", 1)[0].decode(errors="replace") for entry in Path("/proc/self/environ").read_bytes().split(b"\0")}
    if OF_THREADS not in begun_with:
        found.pop(OF_THREADS, None)
    return found
