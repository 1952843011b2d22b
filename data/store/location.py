"""Places of prepared datasets, and the lock for building one."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from ...core import plugins
from ...core.console import is_text, spelled
from ...core.errors import UsageError
from ...core.job import Job
from ..base import DatasetSource, HasFolder, HasVocabulary, TakesArguments
from .manifest import SCHEMA
from .writer import call_named_source

CACHE_VARIABLE = "TRAINER_DATA_CACHE"
_PLAIN_ARGUMENTS = re.compile(r"[\w=,.]{1,80}", re.ASCII)
_FINGERPRINT_LENGTH = 16


@runtime_checkable
class HasOriginals(Protocol):
    """A source that knows the files it reads; otherwise every file below `data_dir` counts."""

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the files for `load(data_dir)`. Raises UsageError if they are missing or unused."""


def cache_root() -> Path:
    """Return the folder of all stores, in ``$TRAINER_DATA_CACHE`` or the user's cache.

    It may not exist.
    """
    if configured := os.environ.get(CACHE_VARIABLE):
        return Path(configured).expanduser().absolute()
    cache = user_cache()
    if cache is None:
        raise UsageError(f"data: this user has no home folder for prepared datasets; set {CACHE_VARIABLE} to a folder for them.")
    return cache / "data"


def user_cache() -> Path | None:
    """Return ``$XDG_CACHE_HOME/crosstrain`` or ``~/.cache/crosstrain``.

    None for a user without a home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification requires ignoring a relative path
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "crosstrain"


def store_key(dataset: Resolved) -> str:
    """Return a store's folder name, NAME-vSCHEMA.VERSION+ARGUMENTS-ORIGINALS.

    Raises UsageError for an invalid `data_dir`.
    """
    name, data_dir = dataset.name, dataset.data_dir
    base, arguments = _key_parts(name)
    key = f"{base}-v{SCHEMA}.{dataset.source.version}{arguments}"
    if data_dir is None:
        return key
    if not data_dir.is_dir():
        if dataset.folder_in_name:
            raise UsageError(f"data: got {name!r}, but there is no folder {str(data_dir)!r}.")
        raise UsageError(f"data_dir: {str(data_dir)!r} is no folder; give the folder that holds the original files of {name!r}.")
    return f"{key}-{originals_fingerprint(dataset.source, data_dir)}"


def originals_fingerprint(source: DatasetSource, data_dir: Path) -> str:
    """Return the fingerprint of a source's original files. Raises UsageError if one is missing."""
    if isinstance(source, HasOriginals):
        files = call_named_source(source.name, lambda: list(source.originals(data_dir)))
        if missing := [str(file) for file in files if not os.path.lexists(file)]:
            raise UsageError(f"data_dir: {source.name!r} needs files that do not exist: {', '.join(missing[:5])}.")
    else:
        files = [file for file in data_dir.rglob("*") if file.is_file()]
    return _fingerprint(data_dir, files)


def _key_parts(name: str) -> tuple[str, str]:
    """Return a dataset's plain name and +ARGUMENTS, or their digest if they are no file name."""
    base, _, arguments = name.partition(":")
    if not re.fullmatch(r"\w[\w.-]*", base):
        raise UsageError(f"data: {base!r} cannot name a store; a dataset's name has letters, digits, dot, dash and underscore.")
    if not arguments:
        return base, ""
    return base, f"+{arguments if _PLAIN_ARGUMENTS.fullmatch(arguments) else hashlib.sha256(os.fsencode(arguments)).hexdigest()[:16]}"


def stores_of(name: str, source: DatasetSource, *, any_version: bool = False) -> list[Path]:
    """Return the folders of a dataset's stores.

    Those that depend on no original files come first. `any_version`: include stores of other versions of the source.
    """
    pattern = key_pattern(name, source, any_version=any_version)
    base, _ = _key_parts(name)
    return sorted(folder for folder in cache_root().glob(f"{glob.escape(base)}-v*") if pattern.fullmatch(folder.name) and folder.is_dir())


def key_pattern(name: str, source: DatasetSource, *, any_version: bool = False) -> re.Pattern[str]:
    """Return the pattern of the folder names of a dataset's stores; arguments as in `stores_of`."""
    base, plain_arguments = _key_parts(name)
    version = r"\d+(\.\d+)?" if any_version else re.escape(f"{SCHEMA}.{source.version}")
    arguments = re.escape(plain_arguments) if plain_arguments else r"(\+[^/]*)?"
    return re.compile(f"{re.escape(base)}-v{version}{arguments}(-[0-9a-f]{{{_FINGERPRINT_LENGTH}}})?")


def _fingerprint(data_dir: Path, files: Sequence[Path]) -> str:
    """Digest folder, names, sizes and modification times.

    Contents would be too slow for large sets.
    """
    digest = hashlib.sha256(os.fsencode(data_dir.resolve()))
    for file in sorted(files):
        status = file.stat() if file.exists() else file.lstat()  # a link may be broken
        digest.update(b"\0" + os.fsencode(file.relative_to(data_dir)) + f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:_FINGERPRINT_LENGTH]


@contextmanager
def locked(root: Path, key: str, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock for building one store; the kernel releases it when the process ends.

    Without `wait`, raises BlockingIOError if another process holds it. The lock's file is removed if neither a store nor a part of one
    exists afterwards; a process that waited for it then locks the next one.
    """
    path = root / f".{key}.lock"
    while True:
        with open(path, "ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if not _is_named(path, handle):
                continue  # the previous holder has removed this file, so it excludes no other process
            try:
                yield
            finally:
                if not (root / key).exists() and not (root / f".{key}.work").exists():
                    path.unlink(missing_ok=True)
            return


def _is_named(path: Path, handle: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_locked(root: Path, key: str) -> bool:
    """Return whether a process is building that store."""
    try:
        with open(root / f".{key}.lock", "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def put_aside(store: Path) -> Path:
    """Rename a store to a hidden folder, for removal, and return that; open maps stay valid."""
    aside = Path(tempfile.mkdtemp(prefix=f".{store.name}.old-", dir=store.parent))
    store.rename(aside / "store")
    return aside


@dataclass(frozen=True, slots=True)
class Resolved:
    """A requested dataset; `name` is canonical.

    `folder_in_name`: `data_dir` comes from the name.
    """

    name: str
    source: DatasetSource
    data_dir: Path | None
    folder_in_name: bool = False


def resolve(name: str, data_dir: Path | None = None) -> Resolved:
    """Return the source of NAME or NAME:ARGUMENTS.

    Raises UsageError for invalid ones, or a folder given twice.
    """
    resolved = _resolve(name, data_dir)
    for key, text in (("data", resolved.name), ("data_dir", str(resolved.data_dir))):
        if not is_text(text):
            raise UsageError(f"{key}: got '{spelled(text)}', which is not UTF-8; rename the folder, or give a link to it.")
    return resolved


def _resolve(name: str, data_dir: Path | None) -> Resolved:
    base, colon, text = name.partition(":")
    source = _load_source(plugins.find("dataset", base))
    if not colon:
        return Resolved(base, source, data_dir)
    if not isinstance(source, TakesArguments):
        raise UsageError(f"data: got {name!r}, but {base!r} takes no arguments. Leave {colon + text!r} out.")
    with_arguments = call_named_source(base, source.with_arguments, text)
    full_name = _full_name(base, with_arguments)
    if not (isinstance(with_arguments, HasFolder) and with_arguments.folder):
        return Resolved(full_name, with_arguments, data_dir)
    if data_dir is not None:
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but {name!r} names a folder too; give one of the two.")
    return Resolved(full_name, with_arguments, with_arguments.folder, folder_in_name=True)


def _load_source(plugin: plugins.Plugin) -> DatasetSource:
    source: DatasetSource = plugins.load(plugin, "dataset")
    with plugins.plugin_code(plugin, "dataset", "its declaration"):
        for member, kind in (("name", str), ("description", str), ("version", int)):
            if not isinstance(value := getattr(source, member), kind):
                raise TypeError(f"{member} is {type(value).__name__}, not {kind.__name__}")
        if not any(callable(getattr(source, member, None)) for member in ("load", "load_in")):
            raise TypeError("it has neither `load` nor `load_in`")
    return source


def _full_name(base: str, source: DatasetSource) -> str:
    rest = source.name.partition(":")[2]
    return f"{base}:{rest}" if rest else base


def whole_path(data_dir: Path) -> Path:
    """Return a folder's absolute path."""
    return data_dir.expanduser().absolute()


def written_out(job: Job) -> Job:
    """Return the job with the canonical name and absolute folder of its data.

    Raises UsageError, also for invalid vocabularies.
    """
    data_dir = None if job.data_dir is None else whole_path(job.data_dir)
    name = full_name(job.data, data_dir, job.vocabulary)
    return job.model_copy(update={"data": name, "data_dir": data_dir, "vocabulary": None})


def full_name(data: str, data_dir: Path | None, vocabulary: int | None) -> str:
    """Return a dataset's full name, with a given vocabulary size.

    Raises UsageError as `written_out` does.
    """
    name = resolve(data, data_dir).name
    if vocabulary is None:
        return name
    _refuse_another_size(data, vocabulary)
    return _with_vocabulary(name, vocabulary)


def _refuse_another_size(data: str, size: int) -> None:
    rest = data.partition(":")[2]
    arguments = rest.rpartition("?")[2] if "?" in rest else "" if ":" in rest else rest
    for argument in re.split("[&,]", arguments):
        key, _, value = (part.strip() for part in argument.partition("="))
        if key == "vocabulary" and value.isdecimal() and int(value) != size:
            raise UsageError(f"vocabulary: got {size}, but {data!r} asks for {value} pieces; give one of the two.")


_DUTIES = "Mend it: with_vocabulary has to return a source whose name says the size, and with_arguments to take that."


def _with_vocabulary(name: str, size: int) -> str:
    """Raises UsageError if the new name does not resolve to the requested vocabulary."""
    source = resolve(name).source
    if not isinstance(source, HasVocabulary):
        raise UsageError(f"vocabulary: got {size}, but {name!r} is no text, or its vocabulary has one size. Choose text: trainer data list")
    base = name.partition(":")[0]
    if not isinstance(source, TakesArguments):
        raise UsageError(f"vocabulary: got {size}, but the source of {base!r} has no with_arguments to find it again by. {_DUTIES}")
    with _refused_as_vocabulary(size):
        named = _full_name(base, call_named_source(base, source.with_vocabulary, size))
    if named in _names_of_other_sizes(base, source, size):
        raise UsageError(f"vocabulary: got {size}, but {named!r} is the name that its source has with another size as well. {_DUTIES}")
    with _refused_as_vocabulary(size):
        found_name = resolve(named).name
    if found_name != named:
        raise UsageError(f"vocabulary: got {size}, but the name {named!r} that {base!r} has with it leads to {found_name!r}. {_DUTIES}")
    return named


@contextmanager
def _refused_as_vocabulary(size: int) -> Iterator[None]:
    """Name the option --vocabulary in a source's error about a size."""
    try:
        yield
    except UsageError as error:
        allowed = str(error).partition("; allowed: ")[2]
        reason = f"; allowed: {allowed}" if allowed else f", and its source refuses that: {str(error).removeprefix('data: ')}"
        raise UsageError(f"vocabulary: got {size}{reason}") from error


def _names_of_other_sizes(base: str, source: HasVocabulary, size: int) -> Iterator[str]:
    """Yield the names of a source with other sizes; that of the default size may not contain it."""
    for near_size in (size - 1, size + 1):
        with suppress(UsageError):
            yield _full_name(base, call_named_source(base, source.with_vocabulary, near_size))
