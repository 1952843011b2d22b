"""Removing stores, which a change of the originals or another release leaves behind."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import TrainerError, UsageError
from .location import cache_root, locked, stores_of
from .resolve import resolve

__all__ = ["RemovedStore", "remove"]


@dataclass(frozen=True, slots=True)
class RemovedStore:
    """A store that is gone, and the bytes that its files had."""

    path: Path
    bytes: int


def remove(name: str) -> list[RemovedStore]:
    """Remove the stores of a dataset, those of earlier releases and earlier originals too; for a name without arguments, with any.

    A run that has one open keeps reading it. Raises UsageError for an unknown name and where there is no store, TrainerError where the
    disk refuses.
    """
    found = resolve(name)
    folders = stores_of(found.name, found.source, any_version=True)
    if not folders:
        raise UsageError(f"data: there is no store of {name!r} in {str(cache_root())!r}, so there is nothing to remove.")
    removed: list[RemovedStore] = []
    for folder in folders:
        try:
            removed.append(_remove(folder))
        except OSError as error:
            raise TrainerError(f"data: the store {str(folder)!r} cannot be removed: {error}.") from error
    return removed


def _remove(folder: Path) -> RemovedStore:
    """Take the store's name away first: what is left of one is never taken for a whole one."""
    with locked(folder.parent, folder.name):
        size = sum(file.stat().st_size for file in folder.iterdir())
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old-", dir=folder.parent))
        folder.rename(aside / "store")
        shutil.rmtree(aside)
    return RemovedStore(folder, size)
