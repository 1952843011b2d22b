"""Errors for users: problem, value and fix; only our own bugs give a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .suggestions import did_you_mean

MAX_SHOWN_CHARACTERS = 10_000  # of a rejected value in a message


class TrainerError(Exception):
    """An error that is reported without a traceback."""

    exit_code = 1


class UsageError(TrainerError):
    """A wrong request; nothing was started and nothing was lost."""

    exit_code = 2

    @classmethod
    def of(cls, key: str, value: object, allowed: str, names: Iterable[str] = (), source: str | None = None) -> UsageError:
        """Return the error for a value: key, value, source, what is allowed, the nearest right name."""
        where, text = f" (from {source})" if source else "", str(value)
        shown = text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
        return cls(f"{key}: got {shown!r}{where}; allowed: {allowed}.{did_you_mean(text, names)}")


class MissingPackageError(UsageError):
    """A framework or package is missing; the message has the command that installs it."""


class DamagedStoreError(TrainerError):
    """A prepared dataset does not match its manifest; the message names the file and the remedy."""


class DiskError(TrainerError):
    """A file or folder cannot be written; the message names it and the system's reason."""

    def __init__(self, path: Path, refusal: OSError) -> None:
        super().__init__(f"{str(path)!r} cannot be written: {refusal.strerror or refusal}.")


class OutputError(TrainerError):
    """Standard output cannot be written, for example to a full device."""

    def __init__(self, refusal: OSError) -> None:
        super().__init__(f"standard output cannot be written ({refusal.strerror or refusal}); what was to be printed there is not whole.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError within the block into a DiskError about `path`."""
    try:
        yield
    except OSError as error:
        raise DiskError(path, error) from error


class RunFailedError(TrainerError):
    """A run that started and failed; `task` failed first, `run` is the run directory."""

    run: Path | None = None

    def __init__(self, message: str, task: str | None = None) -> None:
        super().__init__(message)
        self.task = task


class StalledRunError(RunFailedError):
    """A run in which no step was finished for the stall timeout."""


class InterruptedRunError(TrainerError):
    """A run that the user ended (Ctrl-C or SIGTERM); `run` is the run directory."""

    exit_code = 130
    run: Path | None = None


class ResumableRunError(InterruptedRunError):
    """A run that the user ended after it had saved a checkpoint to resume from."""

    exit_code = 75


MAX_RAISED_CHARACTERS = 2_000


def raised(error: BaseException) -> str:
    """Return an exception of external code as one line: type, message, file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if "_sitebuiltins" not in frame.filename), frames[-1])  # the definition of `exit`
    try:
        message = " ".join(str(error)[:MAX_RAISED_CHARACTERS].encode(errors="backslashreplace").decode().split())
    except Exception:  # noqa: BLE001 -- the class is external, too
        message = "its text cannot be read"
    return f"{type(error).__name__}{': ' if message else ''}{message} ({at.filename}, line {at.lineno})"
