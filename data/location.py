"""Where prepared datasets lie: the cache folder, the name of a dataset's store in it, and the lock for making one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..core.errors import UsageError
from .base import DatasetSource

__all__ = ["CACHE_VARIABLE", "HasOriginals", "cache_root", "locked", "store_key"]

CACHE_VARIABLE = "TRAINER_DATA_CACHE"


@runtime_checkable
class HasOriginals(Protocol):
    """A source that knows which files of a `data_dir` it reads. Without it, every file below the folder counts."""

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the files that `load(data_dir)` reads.

        Raises UsageError where they are missing, or where the dataset is not made from files at all.
        """
        ...


def cache_root() -> Path:
    """Return ``$TRAINER_DATA_CACHE``, ``$XDG_CACHE_HOME/crosstrain/data`` or ``~/.cache/crosstrain/data``; it may not exist yet."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification: a relative path is to be ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise UsageError(
                f"data: this user has no home folder for prepared datasets; set {CACHE_VARIABLE} to a folder for them."
            ) from error
    return base / "crosstrain" / "data"


def store_key(name: str, source: DatasetSource, data_dir: Path | None) -> str:
    """Return the folder name of a store: dataset, source version, and a fingerprint of the originals where the user gave some.

    Raises UsageError where `data_dir` is no folder or lacks what the source needs.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(f"data: {name!r} cannot name a store; a dataset's name has letters, digits, dot, dash and underscore.")
    key = f"{name}-v{source.version}"
    if data_dir is None:
        return key
    if not data_dir.is_dir():
        raise UsageError(f"data_dir: {str(data_dir)!r} is no folder; give the folder that holds the original files of {name!r}.")
    files = source.originals(data_dir) if isinstance(source, HasOriginals) else [file for file in data_dir.rglob("*") if file.is_file()]
    return f"{key}-{_fingerprint(data_dir, files)}"


def _fingerprint(data_dir: Path, files: Sequence[Path]) -> str:
    """Tell one set of originals from another by folder, names, sizes and times of change; contents would be too slow for large sets."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve()))
    for file in sorted(files):
        status = file.stat()
        digest.update(b"\0" + os.fsencode(file.relative_to(data_dir)) + f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


@contextmanager
def locked(root: Path, key: str) -> Iterator[None]:
    """Hold the lock for making one store; others wait. The kernel frees it when the process ends, however it ends."""
    with open(root / f".{key}.lock", "ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
