"""The sign of life of a run's driver: a file of the run directory, which names the driver by a number of its own, and in which it counts.

Of a driver on another host nobody can say whether its process is there, so it is watched whether the count goes on. Clocks of different
machines are not compared. Whoever goes on with a run puts a file of its own in the place of that one: a driver that comes back, after it
was stopped or cut off from the disk, finds another's there, and writes nothing more into the run.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from ...core.drafts import replacing
from ...core.errors import DiskError, UsageError, writing

__all__ = ["HEARTBEAT", "SILENT_SECONDS", "Heartbeat", "is_silent"]

HEARTBEAT = "heartbeat"
"""The file."""

BEAT_SECONDS = 2.0

UNSURE_SECONDS = 15.0
"""A driver that has not counted for so long looks whose the file is before it writes anything: others may have taken it for gone."""

SILENT_SECONDS = 30.0
"""A count that stands still for so long is of a driver that is gone, stopped, or unable to write: twice what makes itself unsure."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended, where there is such a clock."""


class Heartbeat:
    """Counts in a run directory, from a thread, until it is closed. It takes the place of whoever counted there before."""

    def __init__(self, folder: Path) -> None:
        """Begin. Raises DiskError where the file cannot be written."""
        self._folder, self._path = folder, folder / HEARTBEAT
        self._token = os.urandom(8).hex().encode()
        self._count = 0
        self._taken = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        with writing(self._path), replacing(self._path) as draft:
            draft.write_bytes(self._line())
        self._counted_at = time.clock_gettime(_CLOCK)
        threading.Thread(target=self._go_on, name=HEARTBEAT, daemon=True).start()

    def settle(self) -> None:
        """Wait until a driver that may be there yet has found that it is none any more.

        Raises UsageError where another process has begun to go on with the run at the same time.
        """
        time.sleep(2 * BEAT_SECONDS)
        try:
            self._beat()
        except DiskError as error:
            raise UsageError(f"run: another process has just gone on with {str(self._folder)!r}. Wait until it has ended.") from error

    def check(self) -> None:
        """Raise DiskError where the run is another's now, or where that cannot be known."""
        if self._taken:
            raise DiskError(self._folder, _taken_over())
        if not self._closed.is_set() and time.clock_gettime(_CLOCK) - self._counted_at > UNSURE_SECONDS:
            self._beat()

    def close(self) -> None:
        """Count no more, and remove the file, where it is this one's; a second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            try:
                self._taken = self._taken or _read(self._folder)[: len(self._token)] != self._token
                if not self._taken:
                    self._path.unlink()
            except OSError:  # the folder is gone, or may only be read; nobody counts in the file any more
                return

    def _line(self) -> bytes:
        return b"%s %020d\n" % (self._token, self._count)

    def _go_on(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self._beat()
            except DiskError:  # `check` tries it again, and raises
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
    """Return whether nobody has counted in a run directory while it was watched for so long; None where nobody ever has."""
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
    """Return what is in the file, nothing where there is none (any more).

    It is opened anew, by which file systems of several machines see what another has written.
    """
    try:
        with (folder / HEARTBEAT).open("rb", buffering=0) as file:
            return file.read(64)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return b""
        raise
