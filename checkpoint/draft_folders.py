"""Folders in the making and on their way out, under hidden names beside the checkpoints.

``.step-N.draft-X`` is being written, ``.step-N.gone-X`` is being removed, ``.step-N.old-X`` stepped aside for a newer one of its step.
A draft is locked by the process that writes it. The kernel frees the lock when the process ends, however it ends; so a leftover is told
from work in progress, and the next writer removes it. Shared locks hold checkpoints that somebody reads (`folder.read_lock`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

__all__ = ["create_draft", "lock", "published_name", "remove", "remove_leftovers", "rename_hidden", "sync_folder"]

Kind = Literal["draft", "gone", "old"]
_KINDS: tuple[Kind, ...] = ("draft", "gone", "old")


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
    """Remove a checkpoint: it disappears in one move, whatever happens while its files are removed."""
    shutil.rmtree(rename_hidden(folder, "gone"))


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
    """Remove what killed processes left; one that stepped aside and whose successor never came gets its name back."""
    for kind in _KINDS:
        for folder in parent.glob(f".step-*.{kind}-*"):
            descriptor = lock(folder)
            if descriptor is None:
                continue
            final = parent / published_name(folder)
            if kind == "old" and any(folder.iterdir()) and not final.exists():
                folder.rename(final)
            else:
                shutil.rmtree(folder)
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Ask the disk to keep the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
