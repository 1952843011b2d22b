"""Heartbeat file of a run's driver: token and count.

Only the count shows life on another host, as clocks differ; a suspended driver finds the resuming one's token, and stops writing.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from ...core.drafts import replacing
from ...core.errors import DiskError, UsageError, writing

HEARTBEAT = "heartbeat"
BEAT_SECONDS = 2.0
UNSURE_SECONDS = 15.0  # a driver without a count for so long checks the token before it writes
SILENT_SECONDS = 30.0  # without a change for so long a driver is gone, suspended or unable to write
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # includes suspended time, if available


class Heartbeat:
    """Heartbeat thread, which replaces an earlier heartbeat."""

    def __init__(self, folder: Path) -> None:
        """Start the thread. Raises DiskError where the file cannot be written."""
        self._folder, self._path = folder, folder / HEARTBEAT
        self._token = os.urandom(8).hex().encode()
        self._count = 0
        self._taken = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        with writing(self._path), replacing(self._path) as draft:
            draft.write_bytes(self._line())
        self._counted_at = time.clock_gettime(_CLOCK)
        threading.Thread(target=self._count_beats, name=HEARTBEAT, daemon=True).start()

    def settle(self) -> None:
        """Wait until a former driver has noticed.

        Raises UsageError where another process has resumed the run.
        """
        time.sleep(2 * BEAT_SECONDS)
        try:
            self._beat()
        except DiskError as error:
            raise UsageError(f"run: another process has just gone on with {str(self._folder)!r}. Wait until it has ended.") from error

    def check(self) -> None:
        """Raise DiskError where another driver has taken over, or where that is unreadable."""
        if self._taken:
            raise DiskError(self._folder, _taken_over())
        if not self._closed.is_set() and time.clock_gettime(_CLOCK) - self._counted_at > UNSURE_SECONDS:
            self._beat()

    def close(self) -> None:
        """Stop counting, and remove this heartbeat's file; a second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            try:
                self._taken = self._taken or _read(self._folder)[: len(self._token)] != self._token
                if not self._taken:
                    self._path.unlink()
            except OSError:  # folder gone or read-only
                return

    def _line(self) -> bytes:
        return b"%s %020d\n" % (self._token, self._count)

    def _count_beats(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self._beat()
            except DiskError:  # `check` retries, and raises
                continue

    def _beat(self) -> None:
        with self._lock, writing(self._folder):
            if self._closed.is_set():
                return
            with self._path.open("r+b", buffering=0) as file:
                self._taken = self._taken or not file.read(64).startswith(self._token)
                if self._taken:
                    raise _taken_over()
                self._count += 1
                os.pwrite(file.fileno(), self._line(), 0)
            self._counted_at = time.clock_gettime(_CLOCK)


def is_silent(folder: Path, seconds: float = SILENT_SECONDS) -> bool | None:
    """Return whether no driver counts within so many seconds; None without a heartbeat."""
    if not (folder / HEARTBEAT).exists():
        return None
    first = _read(folder)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(BEAT_SECONDS / 2, left))
        if _read(folder) != first:
            return False
    return True


def _taken_over() -> OSError:
    return OSError(errno.EBUSY, "another process has gone on with this run, and this one ends")


def _read(folder: Path) -> bytes:
    """Return the file's content, empty if missing; reopened, as network file systems cache."""
    try:
        with (folder / HEARTBEAT).open("rb", buffering=0) as file:
            return file.read(64)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return b""
        raise
