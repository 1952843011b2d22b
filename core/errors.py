"""Errors meant for people: what was asked, what was found, what to do.

The command line prints ``str(error)`` on standard error and exits with ``exit_code``; a traceback is for our own mistakes only.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .suggestions import nearest

__all__ = [
    "DamagedStoreError",
    "DiskError",
    "InterruptedRunError",
    "MissingPackageError",
    "OutputError",
    "ResumableRunError",
    "RunFailedError",
    "StalledRunError",
    "TrainerError",
    "UsageError",
    "raised",
    "writing",
]


class TrainerError(Exception):
    """Base of every error that is reported without a traceback."""

    exit_code = 1


class UsageError(TrainerError):
    """The request was wrong; nothing was started and nothing was lost."""

    exit_code = 2

    @classmethod
    def of(cls, key: str, given: object, allowed: str, names: Iterable[str] = (), source: str | None = None) -> UsageError:
        """Build the one message for a wrong value: the key, what was given and by whom, what is allowed, the nearest right name."""
        where = f" (from {source})" if source else ""
        near = nearest(str(given), list(names)) if names else None
        hint = f" Did you mean {near!r}?" if near else ""
        return cls(f"{key}: got {str(given)!r}{where}; allowed: {allowed}.{hint}")


class MissingPackageError(UsageError):
    """A framework or an optional package is not installed; the message says how to get it."""


class DamagedStoreError(TrainerError):
    """A prepared dataset does not match its manifest; the message names the file and how to make it again."""


class DiskError(TrainerError):
    """The disk refuses what a command has to write; the message names the file or folder and the system's reason."""

    def __init__(self, path: Path, refusal: OSError) -> None:
        super().__init__(f"{str(path)!r} cannot be written: {refusal.strerror or refusal}.")


class OutputError(TrainerError):
    """Standard output refuses what a command has to print, such as on a full device."""

    def __init__(self, refusal: OSError) -> None:
        super().__init__(f"standard output cannot be written ({refusal.strerror or refusal}); what was to be printed there is not whole.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskError about `path` where the disk refuses something within the block."""
    try:
        yield
    except OSError as error:
        raise DiskError(path, error) from error


class RunFailedError(TrainerError):
    """The run started and failed; `task` names the task that failed first, where it is known, and `run` is the run directory."""

    run: Path | None = None

    def __init__(self, message: str, task: str | None = None) -> None:
        super().__init__(message)
        self.task = task


class StalledRunError(RunFailedError):
    """No step was finished for longer than the stall time-out."""


class InterruptedRunError(TrainerError):
    """The user ended the run (Ctrl-C or SIGTERM); `run` is the run directory."""

    exit_code = 130
    run: Path | None = None


class ResumableRunError(InterruptedRunError):
    """The user ended the run, and it has saved a checkpoint to go on from."""

    exit_code = 75


def raised(error: BaseException) -> str:
    """Return what code of somebody else's raised, as one line: the kind, the message, and the file and line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if "_sitebuiltins" not in frame.filename), frames[-1])  # where `exit` is
    said = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if said else ''}{said} ({at.filename}, line {at.lineno})"
