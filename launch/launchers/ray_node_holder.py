"""The actor that holds a node for a run, starts commands there and reports their ends.

Sent to the node by value; it imports only Ray and the standard library, as Ray's interpreter may not have our packages.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MAX_LINE_BYTES = 4096
LINES_SECONDS = 0.5  # time limit for the last lines of a command that has ended
MAX_EVENTS = 100  # events that are returned together
OF_THREADS = "OMP_NUM_THREADS"  # Ray sets it to an actor's CPUs unless the user has set it; a task's threads are the job's setting
NO_PROGRAM = 127  # exit code of a shell without the program


class NodeHolder:
    """Starts numbered commands, with the node's address in the variable `address_variable`."""

    def __init__(self, address_variable: str) -> None:
        import ray.util

        self._more = {address_variable: ray.util.get_node_ip_address()}
        self._events: queue.SimpleQueue[tuple[int, str, object]] = queue.SimpleQueue()
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, command: Sequence[str], first_line: str) -> None:
        """Start a command with a line of input; its end is an event, also if it cannot start."""
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
        with suppress(BrokenPipeError), child.stdin:  # it has ended, which is an event
            child.stdin.write(first_line.encode())

    def events(self) -> list[tuple[int, str, object]]:
        """Wait for events: (number, ``line``, standard error) or (number, ``ended``, exit code)."""
        events = [self._events.get()]
        while len(events) < MAX_EVENTS and not self._events.empty():
            events.append(self._events.get())
        return events

    def kill(self, number: int) -> None:
        """Kill a command, if it was started."""
        child = self._children.get(number)
        if child is not None:
            child.kill()

    def end(self, patience_seconds: float) -> None:
        """Wait for all commands to end, and kill those that take longer."""
        deadline = time.monotonic() + patience_seconds
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()

    def _relay(self, number: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        with child.stderr as file:
            while line := file.readline(MAX_LINE_BYTES):
                self._events.put((number, "line", line.decode(errors="replace").rstrip("\r\n")))

    def _await(self, number: int, child: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        code = child.wait()
        reader.join(LINES_SECONDS)
        self._events.put((number, "ended", code))


def _environment() -> dict[str, str]:
    """Return this environment with Ray's assignments, such as GPUs, but not its thread number."""
    environment = dict(os.environ)
    initial = {entry.split(b"=", 1)[0].decode(errors="replace") for entry in Path("/proc/self/environ").read_bytes().split(b"\0")}
    if OF_THREADS not in initial:
        environment.pop(OF_THREADS, None)
    return environment
