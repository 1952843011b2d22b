"""Lines of standard input as they arrive: many at once from a file, one at a time from a person, none longer than memory should hold."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator

from ..core.errors import InterruptedRunError, UsageError

__all__ = ["LONGEST_LINE_BYTES", "arriving_lines"]

LONGEST_LINE_BYTES = 1 << 16
"""Of a sentence there are some hundreds; what is longer is passed over to its end, and never held."""

MOST_LINES, MOST_BYTES = 1024, 1 << 22
"""At once, and what those may have together; of those that have arrived the next are taken when these have been dealt with."""

CHUNK_BYTES = 1 << 16

TICK_SECONDS = 0.2
"""How often a wait for input looks whether it is to end."""


class _Lines:
    """What has been read and not yet taken: whole lines without their ends, None for one that is too long, and a line's beginning."""

    def __init__(self) -> None:
        self.whole: list[bytes | None] = []
        self._bytes = 0
        self._rest = b""
        self._passing = False

    def add(self, chunk: bytes) -> None:
        """Take what was read."""
        *ended, rest = (self._rest + chunk).split(b"\n")
        for line in ended:
            kept = None if self._passing or len(line) > LONGEST_LINE_BYTES else line.removesuffix(b"\r")
            self.whole.append(kept)
            self._bytes += len(kept or b"")
            self._passing = False
        self._passing = self._passing or len(rest) > LONGEST_LINE_BYTES
        self._rest = b"" if self._passing else rest

    def end(self) -> None:
        """Nothing follows: what has no line end is a line too, unless it is empty."""
        if self._rest or self._passing:
            self.add(b"\n")

    @property
    def enough(self) -> bool:
        """Whether there are as many as are taken at once."""
        return len(self.whole) >= MOST_LINES or self._bytes >= MOST_BYTES

    def take(self) -> list[bytes | None]:
        """Return the next lines."""
        taken, self.whole = self.whole[:MOST_LINES], self.whole[MOST_LINES:]
        self._bytes -= sum(len(line or b"") for line in taken)
        return taken


def arriving_lines(descriptor: int, stopped: Callable[[], bool]) -> Iterator[list[bytes | None]]:
    """Yield the lines that have arrived, at least one each time, until the input ends; None stands for a line that is too long.

    Raises InterruptedRunError where `stopped` says so.
    """
    lines, open_ = _Lines(), True
    while open_ or lines.whole:
        while open_ and not lines.enough and _readable(descriptor, stopped, wait=not lines.whole):
            try:
                chunk = os.read(descriptor, CHUNK_BYTES)
            except OSError as error:
                raise UsageError(f"standard input cannot be read: {error.strerror}; give it lines.") from error
            lines.add(chunk)
            if not chunk:
                open_ = False
                lines.end()
        if lines.whole:
            yield lines.take()


def _readable(descriptor: int, stopped: Callable[[], bool], *, wait: bool) -> bool:
    """Return whether something, or the end, can be read; with `wait` only when it can."""
    while True:
        if stopped():
            raise InterruptedRunError("interrupted by the user")
        if select.select([descriptor], [], [], TICK_SECONDS if wait else 0.0)[0]:
            return True
        if not wait:
            return False
