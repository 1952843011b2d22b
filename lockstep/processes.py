"""The processes of the two sides, which answer requests in turn."""

from __future__ import annotations

import io
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, cast

import msgspec

from ..core.errors import RunFailedError, UsageError
from ..core.process import child_working_directory, command_ending_with_parent, ending_in_words, public_environment, python
from .serving import READY, Answer, End

KEPT_LINES = 40
MAX_LINE_BYTES = 1 << 20
END_SECONDS = 20.0
MAX_LAYERS_SECONDS = 600.0  # for computing layers, with code of a user
TRAINING, LAYERS, REFERENCE = "crosstrain.lockstep.side", "crosstrain.lockstep.replaying", "crosstrain.lockstep.graph_tape"


class SideProcess:
    """A process of a side; requests are awaited after both sides have theirs, so that both work.

    `shown`: the side's name in errors.
    """

    def __init__(self, module: str, name: str, shown: str, interpreter: str | None, environment: Mapping[str, str]) -> None:
        self.name, self._shown = name, shown
        self._process = subprocess.Popen(
            command_ending_with_parent(python(module, interpreter=interpreter)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=child_working_directory(),
            env={**public_environment(), **environment},
            start_new_session=True,
            bufsize=0,
        )
        self._unread, self._started = b"", False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._keep, name=f"output of {name}", daemon=True)
        self._reader.start()

    def _keep(self) -> None:
        with io.BufferedReader(cast(io.RawIOBase, self._process.stderr)) as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                self._lines.append(line.decode(errors="replace").rstrip())

    @property
    def output(self) -> IO[bytes]:
        """Where answers come from."""
        assert self._process.stdout is not None
        return self._process.stdout

    def await_start(self, seconds: float) -> None:
        """Wait for the process to be ready, if it was not before.

        Raises RunFailedError for a program that does not become so.
        """
        if self._started:
            return
        unready = " before it was ready; is it a Python with crosstrain?"
        line = self._read_line(seconds, "did not start within {:.0f} s (start_timeout)", unready)
        if line != READY:
            raise RunFailedError(f"{self._shown}: this is no Python with a crosstrain that compares updates; it wrote {_excerpt(line)}")
        self._started = True

    def _read_line(self, seconds: float | None, doing: str, ended: str = "") -> bytes:
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.output], [], [], left)[0]:
                raise RunFailedError(f"the process of {self._shown} {doing.format(seconds)}")
            part = os.read(self.output.fileno(), MAX_LINE_BYTES)
            if not part:
                raise self._ended(ended)
            self._unread += part
            if len(self._unread) > MAX_LINE_BYTES:
                raise RunFailedError(f"the process of {self._shown} wrote more than a line of {MAX_LINE_BYTES:,} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self, when: str) -> RunFailedError:
        code = self._process.wait()
        self._reader.join(1.0)
        last = next((text for text in reversed(self._lines) if text.strip()), "")
        return RunFailedError(f"the process of {self._shown} {ending_in_words(code)}{when}{f': {last[:400]}' if last else ''}")

    def send(self, request: msgspec.Struct) -> None:
        """Send a request."""
        with suppress(BrokenPipeError):  # its end is noticed by `receive`
            if self._process.stdin is not None:
                self._process.stdin.write(msgspec.json.encode(request) + b"\n")
                self._process.stdin.flush()

    def receive(self, seconds: float | None = None) -> Answer:
        """Wait for the answer to the oldest request, for so many seconds if given.

        Raises UsageError or RunFailedError for a problem.
        """
        line = self._read_line(seconds, "did not answer within {:.0f} s")
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError as error:
            raise RunFailedError(f"the process of {self._shown} answered {_excerpt(line)}") from error
        if answer.problem is not None:
            raise (UsageError if answer.code == UsageError.exit_code else RunFailedError)(f"{self._shown}: {answer.problem}")
        return answer

    def ask(self, request: msgspec.Struct) -> Answer:
        """Send a request and wait for its answer."""
        self.send(request)
        return self.receive()

    def kill(self) -> None:
        """End the process at once, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(1.0)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def end(self) -> None:
        """End the process, which was sent `End`, and its tasks, when these have ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()


def _excerpt(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))


def receive_all(processes: Sequence[SideProcess]) -> list[Answer]:
    """Wait for an answer of each process, in their order; the end of one is noticed at once."""
    answers: dict[str, Answer] = {}
    with selectors.DefaultSelector() as waiting:
        for process in processes:
            waiting.register(process.output, selectors.EVENT_READ, process)
        while len(answers) < len(processes):
            for key, _ in waiting.select():
                answers[key.data.name] = key.data.receive()
                waiting.unregister(key.fileobj)
    return [answers[process.name] for process in processes]


def layers_computed(processes: Sequence[SideProcess], requests: Sequence[msgspec.Struct]) -> list[str | None]:
    """Have each process compute layers; return for each why it could not."""
    for process, request in zip(processes, requests, strict=True):
        process.send(request)
    problems: list[str | None] = []
    for process in processes:
        try:
            problems.append(process.receive(MAX_LAYERS_SECONDS).uncomputed)
        except RunFailedError as error:
            problems.append(str(error))
    return problems


class SideProcesses:
    """The processes of a side by module: one trains, and others compute layers."""

    def __init__(self, name: str, shown: str, interpreter: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._arguments = (name, shown, interpreter, environment or {})
        self._running: dict[str, SideProcess] = {}

    def process(self, module: str) -> SideProcess:
        """Return the process of a module."""
        if module not in self._running:
            self._running[module] = SideProcess(module, *self._arguments)
        return self._running[module]

    def kill(self) -> None:
        """End the processes without waiting for their work."""
        for process in self._running.values():
            process.kill()

    def send_end(self) -> None:
        """Have the processes end."""
        for process in self._running.values():
            process.send(End())

    def await_end(self) -> None:
        """Wait until the processes have ended."""
        for process in self._running.values():
            process.end()


def started(sides: Sequence[SideProcesses], module: str, seconds: float) -> list[SideProcess]:
    """Return each side's process of a module, once all are ready, within so many seconds."""
    processes = [side.process(module) for side in sides]
    for process in processes:
        process.await_start(seconds)
    return processes


@contextmanager
def ending(sides: Sequence[SideProcesses]) -> Iterator[None]:
    """End sides' processes with the block."""
    try:
        yield
    except BaseException:
        for side in sides:
            side.kill()
        raise
    for side in sides:
        side.send_end()
    for side in sides:
        side.await_end()
