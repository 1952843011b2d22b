"""Removing stores, which a change of the originals or another release leaves behind, and what interrupted preparations left."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...core.errors import TrainerError, UsageError
from .interrupted import folder_bytes, leftovers, preparations_of
from .location import cache_root, locked, put_aside, stores_of
from .resolve import resolve

__all__ = ["find_stores", "remove_store"]


def find_stores(name: str) -> list[Path]:
    """Return the stores of a dataset, those of earlier releases and earlier originals too; for a name without arguments, with any.

    So are those whose preparation was interrupted: folders that there are not yet. Raises UsageError for an unknown name and where there
    is neither.
    """
    found = resolve(name)
    begun = [preparation.store for preparation in preparations_of(found.name, found.source, any_version=True)]
    folders = [*stores_of(found.name, found.source, any_version=True), *begun]
    if not folders:
        raise UsageError(f"data: there is no store of {name!r} in {str(cache_root())!r}, so there is nothing to remove.")
    return folders


def remove_store(folder: Path) -> int:
    """Remove one store with what preparations left of it, and return the bytes; a run that has the store open keeps reading it.

    Its name goes first: what is left of a store is never taken for a whole one. Raises UsageError, and removes nothing, while a process
    makes the store; TrainerError where the system refuses.
    """
    try:
        with locked(folder.parent, folder.name, wait=False):
            size = sum(map(folder_bytes, leftovers(folder)))
            if folder.exists():
                size += folder_bytes(folder)
                put_aside(folder)
            for leftover in leftovers(folder):
                shutil.rmtree(leftover)
    except BlockingIOError as error:
        raise UsageError(f"data: {str(folder)!r} is being prepared now, and stays. End that first, or wait until it has ended.") from error
    except OSError as error:
        raise TrainerError(f"data: the store {str(folder)!r} cannot be removed: {error}.") from error
    return size
