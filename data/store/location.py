"""Where prepared datasets lie: the cache folder, the name of a dataset's store in it, and the lock for making one."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from ...core.errors import UsageError
from ..base import DatasetSource
from .manifest import SCHEMA
from .source_calls import of_source

__all__ = [
    "CACHE_VARIABLE",
    "HasOriginals",
    "cache_root",
    "is_locked",
    "key_pattern",
    "key_without_originals",
    "locked",
    "originals_fingerprint",
    "put_aside",
    "store_key",
    "stores_of",
    "user_cache",
]

CACHE_VARIABLE = "TRAINER_DATA_CACHE"
_PLAIN_ARGUMENTS = re.compile(r"[\w=,.]{1,80}", re.ASCII)
_FINGERPRINT_LENGTH = 16


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
    own = user_cache()
    if own is None:
        raise UsageError(f"data: this user has no home folder for prepared datasets; set {CACHE_VARIABLE} to a folder for them.")
    return own / "data"


def user_cache() -> Path | None:
    """Return ``$XDG_CACHE_HOME/crosstrain`` or ``~/.cache/crosstrain``, which may not exist yet; None where the user has no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification: a relative path is to be ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "crosstrain"


def store_key(name: str, source: DatasetSource, data_dir: Path | None, *, in_name: bool = False) -> str:
    """Return the folder name of a store: dataset, versions, arguments, and a fingerprint of the originals where the user gave some.

    `in_name`: the name says the folder. Raises UsageError where `data_dir` is no folder or lacks what the source needs.
    """
    key = key_without_originals(name, source)
    if data_dir is None:
        return key
    if not data_dir.is_dir():
        if in_name:
            raise UsageError(f"data: got {name!r}, but there is no folder {str(data_dir)!r}.")
        raise UsageError(f"data_dir: {str(data_dir)!r} is no folder; give the folder that holds the original files of {name!r}.")
    return f"{key}-{originals_fingerprint(source, data_dir)}"


def originals_fingerprint(source: DatasetSource, data_dir: Path) -> str:
    """Return what tells the original files of a source, as they are now, from others, or from what they were before.

    Raises UsageError where one that the source reads is missing.
    """
    if isinstance(source, HasOriginals):
        files = of_source(source.name, lambda: list(source.originals(data_dir)))
        if missing := [str(file) for file in files if not os.path.lexists(file)]:
            raise UsageError(f"data_dir: {source.name!r} needs files that do not exist: {', '.join(missing[:5])}.")
    else:
        files = [file for file in data_dir.rglob("*") if file.is_file()]
    return _fingerprint(data_dir, files)


def key_without_originals(name: str, source: DatasetSource) -> str:
    """Return NAME-vSCHEMA.VERSION, with +ARGUMENTS (or their digest, where they cannot stand in a file name) for a name that has some."""
    base, arguments = _key_parts(name)
    return f"{base}-v{SCHEMA}.{source.version}{arguments}"


def _key_parts(name: str) -> tuple[str, str]:
    """Return what comes before and after the versions."""
    base, _, arguments = name.partition(":")
    if not re.fullmatch(r"\w[\w.-]*", base):
        raise UsageError(f"data: {base!r} cannot name a store; a dataset's name has letters, digits, dot, dash and underscore.")
    if not arguments:
        return base, ""
    return base, f"+{arguments if _PLAIN_ARGUMENTS.fullmatch(arguments) else hashlib.sha256(os.fsencode(arguments)).hexdigest()[:16]}"


def stores_of(name: str, source: DatasetSource, *, any_version: bool = False) -> list[Path]:
    """Return the stores of a dataset in the cache, those made without originals first; for a name without arguments, with any.

    `any_version`: also those of other versions of the dataset or the store, which nothing reads any more.
    """
    pattern = key_pattern(name, source, any_version=any_version)
    base, _ = _key_parts(name)
    return sorted(folder for folder in cache_root().glob(f"{glob.escape(base)}-v*") if pattern.fullmatch(folder.name) and folder.is_dir())


def key_pattern(name: str, source: DatasetSource, *, any_version: bool = False) -> re.Pattern[str]:
    """Return what the folder names of a dataset's stores look like; arguments as in `stores_of`."""
    base, own = _key_parts(name)
    version = r"\d+(\.\d+)?" if any_version else re.escape(f"{SCHEMA}.{source.version}")
    arguments = re.escape(own) if own else r"(\+[^/]*)?"
    return re.compile(f"{re.escape(base)}-v{version}{arguments}(-[0-9a-f]{{{_FINGERPRINT_LENGTH}}})?")


def _fingerprint(data_dir: Path, files: Sequence[Path]) -> str:
    """Tell one set of originals from another by folder, names, sizes and times of change; contents would be too slow for large sets."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve()))
    for file in sorted(files):
        status = file.stat() if file.exists() else file.lstat()  # a link may lead nowhere
        digest.update(b"\0" + os.fsencode(file.relative_to(data_dir)) + f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:_FINGERPRINT_LENGTH]


@contextmanager
def locked(root: Path, key: str, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock for making one store; others wait. The kernel frees it when the process ends, however it ends.

    Without `wait` it raises BlockingIOError where a process holds the lock, which makes the store now. The lock's file goes where there is
    then neither a store nor a part of one, as of a name that was refused; who has waited for it looks for the next one.
    """
    path = root / f".{key}.lock"
    while True:
        with open(path, "ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if not _is_named(path, handle):
                continue  # whoever held it has removed it: that locks nobody out any more
            try:
                yield
            finally:
                if not (root / key).exists() and not (root / f".{key}.work").exists():
                    path.unlink(missing_ok=True)
            return


def _is_named(path: Path, handle: IO[bytes]) -> bool:
    """Return whether a path still leads to a file that was opened by it."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_locked(root: Path, key: str) -> bool:
    """Return whether a process makes that store now; writes nothing."""
    try:
        with open(root / f".{key}.lock", "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def put_aside(store: Path) -> Path:
    """Take a store's name away at once, and return the hidden folder that it is in now, for removal; who has it open keeps reading it."""
    aside = Path(tempfile.mkdtemp(prefix=f".{store.name}.old-", dir=store.parent))
    store.rename(aside / "store")
    return aside
