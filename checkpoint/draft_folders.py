"""Folders in the making and on their way out, under hidden names beside the checkpoints.

``.step-N.draft-X`` is being written, ``.step-N.gone-X`` is being removed, ``.step-N.old-X`` stepped aside for a newer one of its step.
A draft is locked by the process that writes it. The kernel frees the lock when the process ends, however it ends; so a leftover is told
from work in progress, and the next writer removes it. Shared locks hold checkpoints that somebody reads (`folder.read_lock`).

What cannot be removed stays under its hidden name, and the next writer tries once more: over NFS a folder lives on while files of it are
mapped. It keeps no checkpoint from being saved.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

__all__ = ["create_draft", "discard", "lock", "published_name", "remove", "remove_leftovers", "rename_hidden", "sync_folder"]

Kind = Literal["draft", "gone", "old"]
_KINDS: tuple[Kind, ...] = ("draft", "gone", "old")

log = logging.getLogger(__name__)


def create_draft(parent: Path, name: str) -> Path:
    """Make an empty folder for what will be called `name`, readable by its owner alone."""
    return Path(tempfile.mkdtemp(prefix=f".{name}.draft-", dir=parent))


def rename_hidden(folder: Path, kind: Kind) -> Path:
    """Give a folder a hidden name that no other has, in one move; return where it is now."""
    target = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{kind}-", dir=folder.parent))
    folder.rename(target)  # onto an empty folder, which a rename may replace
    return target


def published_name(hidden: Path) -> str:
    """Return the name that a hidden folder had or was to have."""
    return hidden.name[1:].rpartition(".")[0]


def remove(folder: Path) -> None:
    """Remove a checkpoint: it disappears in one move, whatever happens while its files are removed. Raises OSError where it stays."""
    discard(rename_hidden(folder, "gone"))


def discard(hidden: Path) -> None:
    """Remove what lies under a hidden name; what of it cannot be removed is told in the log, and stays."""
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        log.warning("%s could not be removed (%s); the next checkpoint's writer tries it again", hidden, error.strerror or error)


def lock(folder: Path) -> int | None:
    """Lock a folder for this process; return the descriptor that holds the lock, or None where somebody else holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes left; one that stepped aside and whose successor never came gets its name back.

    What is no folder was left by nobody who writes checkpoints, and is let alone.
    """
    for kind in _KINDS:
        for folder in parent.glob(f".step-*.{kind}-*"):
            if folder.is_symlink() or not folder.is_dir() or (descriptor := lock(folder)) is None:
                continue
            try:
                final = parent / published_name(folder)
                if kind == "old" and any(folder.iterdir()) and not final.exists():
                    folder.rename(final)
                else:
                    shutil.rmtree(folder, ignore_errors=True)  # what stays was told of when it was to go
            finally:
                os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Ask the disk to keep the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
