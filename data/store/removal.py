"""Removing stores, which a change of the originals or another release leaves behind."""

from __future__ import annotations

import glob
import shutil
from pathlib import Path

from ...core.errors import TrainerError, UsageError
from .location import cache_root, locked, put_aside, stores_of
from .resolve import resolve

__all__ = ["find_stores", "remove_store"]


def find_stores(name: str) -> list[Path]:
    """Return the stores of a dataset, those of earlier releases and earlier originals too; for a name without arguments, with any.

    Raises UsageError for an unknown name and where there is no store.
    """
    found = resolve(name)
    folders = stores_of(found.name, found.source, any_version=True)
    if not folders:
        raise UsageError(f"data: there is no store of {name!r} in {str(cache_root())!r}, so there is nothing to remove.")
    return folders


def remove_store(folder: Path) -> int:
    """Remove one store and return the bytes that it had; a run that has it open keeps reading it. Raises TrainerError.

    Its name goes first: what is left of a store is never taken for a whole one.
    """
    try:
        with locked(folder.parent, folder.name):
            size = sum(file.stat().st_size for file in folder.iterdir())
            shutil.rmtree(put_aside(folder))
            for work in folder.parent.glob(f".{glob.escape(folder.name)}.work"):  # of a making that was interrupted
                shutil.rmtree(work)
    except OSError as error:
        raise TrainerError(f"data: the store {str(folder)!r} cannot be removed: {error}.") from error
    return size
