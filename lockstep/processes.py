"""The processes of the two sides, which answer requests in turn."""

from __future__ import annotations

import io
import os
import select
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

import msgspec

from ..core.errors import RunFailedError, UsageError
from ..core.process import child_working_directory, command_ending_with_parent, ending_in_words, public_environment, python
from .side import READY, Answer, End, Request

KEPT_LINES = 40
MAX_LINE_BYTES = 1 << 20
END_SECONDS = 20.0


class SideProcess:
    """A side's process; requests are awaited after both sides have theirs, so that both work."""

    def __init__(self, name: str, shown: str, interpreter: str | None, environment: Mapping[str, str]) -> None:
        self.name, self._shown = name, shown
        self._process = subprocess.Popen(
            command_ending_with_parent(python("crosstrain.lockstep.side", interpreter=interpreter)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=child_working_directory(),
            env={**public_environment(), **environment},
            start_new_session=True,
            bufsize=0,
        )
        self._unread = b""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._keep, name=f"output of {name}", daemon=True)
        self._reader.start()

    def _keep(self) -> None:
        stream = io.BufferedReader(cast(io.RawIOBase, self._process.stderr))
        while line := stream.readline(MAX_LINE_BYTES):
            self._lines.append(line.decode(errors="replace").rstrip())

    @property
    def output(self) -> IO[bytes]:
        """Where answers come from."""
        assert self._process.stdout is not None
        return self._process.stdout

    def await_start(self, seconds: float) -> None:
        """Wait for the process to be ready.

        Raises RunFailedError for a program that does not become so.
        """
        line = self._read_line(seconds)
        if line != READY:
            raise RunFailedError(f"{self._shown}: this is no Python with a crosstrain that compares updates; it wrote {_excerpt(line)}")

    def _read_line(self, seconds: float | None = None) -> bytes:
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.output], [], [], left)[0]:
                raise RunFailedError(f"the process of {self._shown} did not start within {seconds:.0f} s (start_timeout)")
            part = os.read(self.output.fileno(), MAX_LINE_BYTES)
            if not part:
                raise self._ended("" if seconds is None else " before it was ready; is it a Python with crosstrain?")
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

    def send(self, request: Request) -> None:
        """Send a request."""
        with suppress(BrokenPipeError):  # its end is noticed by `receive`
            if self._process.stdin is not None:
                self._process.stdin.write(msgspec.json.encode(request) + b"\n")
                self._process.stdin.flush()

    def receive(self) -> Answer:
        """Wait for the answer to the oldest request.

        Raises UsageError or RunFailedError for a problem.
        """
        line = self._read_line()
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError as error:
            raise RunFailedError(f"the process of {self._shown} answered {_excerpt(line)}") from error
        if answer.problem is not None:
            raise (UsageError if answer.code == UsageError.exit_code else RunFailedError)(f"{self._shown}: {answer.problem}")
        return answer

    def ask(self, request: Request) -> Answer:
        """Send a request and wait for its answer."""
        self.send(request)
        return self.receive()

    def kill(self) -> None:
        """End the process at once; its tasks end with it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(1.0)

    def end(self) -> None:
        """End the process and its tasks, when these have ended."""
        self.send(End())
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)


def _excerpt(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))


def receive_all(sides: Sequence[SideProcess]) -> list[Answer]:
    """Wait for an answer of each side, in their order; the end of one is noticed at once."""
    answers: dict[str, Answer] = {}
    with selectors.DefaultSelector() as waiting:
        for side in sides:
            waiting.register(side.output, selectors.EVENT_READ, side)
        while len(answers) < len(sides):
            for key, _ in waiting.select():
                answers[key.data.name] = key.data.receive()
                waiting.unregister(key.fileobj)
    return [answers[side.name] for side in sides]


@contextmanager
def two_sides(
    names: tuple[str, str],
    interpreters: tuple[str | None, str | None],
    environments: tuple[Mapping[str, str], ...],
    start_seconds: float,
) -> Iterator[Any]:
    """Start both processes within so many seconds; they end with the block."""
    sides: list[SideProcess] = []
    try:
        for name, shown, interpreter, environment in zip(("A", "B"), names, interpreters, environments, strict=True):
            sides.append(SideProcess(name, shown, interpreter, environment))
        for side in sides:
            side.await_start(start_seconds)
        yield tuple(sides)
    except BaseException:
        for side in sides:
            side.kill()
        raise
    for side in sides:
        side.end()
