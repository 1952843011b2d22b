"""Preparations without an end: what they leave beside the stores, how large it is, and whether one is at work there now."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..base import DatasetSource
from .location import cache_root, is_locked, key_pattern

__all__ = ["Preparation", "folder_bytes", "leftovers", "preparations_of"]

_LEFTOVER = re.compile(r"\.(.+)\.(work|(draft|old)-[^.]+)")
"""The folders that `build` and `removal` use: what has been done so far, a store half written, and one that is on its way out."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What was begun and has no store; `at_work`: a process holds its lock now."""

    store: Path
    bytes: int
    at_work: bool


def preparations_of(name: str, source: DatasetSource, *, any_version: bool = False) -> list[Preparation]:
    """Return the preparations of a dataset that have left something but no store; arguments as in `location.stores_of`."""
    root, pattern = cache_root(), key_pattern(name, source, any_version=any_version)
    found = (_LEFTOVER.fullmatch(folder.name) for folder in root.glob(".*") if folder.is_dir())
    keys = sorted({match[1] for match in found if match and pattern.fullmatch(match[1])})
    return [
        Preparation(root / key, sum(map(folder_bytes, leftovers(root / key))), is_locked(root, key))
        for key in keys
        if not (root / key).exists()
    ]


def leftovers(store: Path) -> list[Path]:
    """Return the hidden folders beside a store, or beside where it would be, that belong to it."""
    matches = ((folder, _LEFTOVER.fullmatch(folder.name)) for folder in store.parent.glob(".*") if folder.is_dir())
    return sorted(folder for folder, match in matches if match and match[1] == store.name)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; one that goes meanwhile counts nothing."""
    size = 0
    for file in folder.rglob("*"):
        try:
            size += file.lstat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return size
