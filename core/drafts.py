"""Atomic replacement of files, and locks of folders."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_KEPT_CHARACTERS = 32  # of the file's name, in the draft's: even with four bytes each far below 255


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft's name; the file written there replaces `path`, unless the block fails."""
    draft = path.with_name(f".{path.name[:_KEPT_CHARACTERS]}.{os.urandom(8).hex()}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with suppress(OSError):  # already moved, or on a read-only file system
            draft.unlink()


def lock(folder: Path) -> int | None:
    """Lock a folder for this process; return the lock's descriptor, or None if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
