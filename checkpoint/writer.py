"""Writing and removal of checkpoints, under hidden names next to the published ones.

``.step-N.draft-X`` is being written, ``.step-N.gone-X`` is being removed, ``.step-N.old-X`` was renamed for a newer one of its step. The
writing process locks its draft; the kernel releases the lock when the process ends, so the next writer can remove leftovers. Over NFS a
folder cannot be removed while files of it are mapped; the next writer tries again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Literal

from ..core.drafts import lock
from ..data.store.writer import sync_folder
from .files import MANIFEST, FileDigest, digest_of, header, new_hasher, write_manifest
from .meta import META, Meta, write_meta
from .reader import PARAMETERS, ArrayEntry

Kind = Literal["draft", "gone", "old"]
_KINDS: tuple[Kind, ...] = ("draft", "gone", "old")
log = logging.getLogger(__name__)


def rename_hidden(folder: Path, kind: Kind) -> Path:
    """Rename a folder to a unique hidden name; return its new path."""
    target = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{kind}-", dir=folder.parent))
    folder.rename(target)  # rename may replace an empty folder
    return target


def published_name(hidden: Path) -> str:
    """Return the published name of a hidden folder."""
    return hidden.name[1:].rpartition(".")[0]


def remove(folder: Path) -> None:
    """Remove a checkpoint, hiding it first in one rename. Raises OSError if that fails."""
    discard(rename_hidden(folder, "gone"))


def discard(hidden: Path) -> None:
    """Remove a hidden folder, logging a failure."""
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        log.warning("%s could not be removed (%s); the next checkpoint's writer tries it again", hidden, error.strerror or error)


def remove_leftovers(parent: Path) -> None:
    """Remove leftovers of killed processes; restore a renamed checkpoint without a successor."""
    for kind in _KINDS:
        for folder in parent.glob(f".step-*.{kind}-*"):
            if folder.is_symlink() or not folder.is_dir() or (descriptor := lock(folder)) is None:
                continue
            try:
                final = parent / published_name(folder)
                if kind == "old" and any(folder.iterdir()) and not final.exists():
                    folder.rename(final)
                else:
                    shutil.rmtree(folder, ignore_errors=True)  # was logged at the first attempt to remove it
            finally:
                os.close(descriptor)


_PIECE_BYTES = 2**19  # written at a time: whole blocks of any disk
_DIRECT: int = getattr(os, "O_DIRECT", 0)


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint after `step` updates."""
    return f"step-{step:09d}"


class CheckpointWriter:
    """Writes one checkpoint into `parent` as its arrays arrive.

    It is published whole or not at all. `entries` are the arrays in the order of their bytes. Any call may raise OSError (a full disk),
    after which nothing of the checkpoint is left.
    """

    def __init__(self, parent: Path, meta: Meta, entries: Sequence[ArrayEntry]) -> None:
        self._parent, self._meta, self._entries = parent, meta, list(entries)
        self._position = self._filled = 0
        self._files: dict[str, _HashedFile] = {}
        self._draft: Path | None
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_leftovers(parent)
        draft = self._draft = Path(tempfile.mkdtemp(prefix=f".{checkpoint_name(meta.step)}.draft-", dir=parent))
        self._lock = lock(draft)
        with self._abort_on_error():
            self._begin_files(draft)

    def _begin_files(self, draft: Path) -> None:
        for name in dict.fromkeys([PARAMETERS, *(entry.file for entry in self._entries)]):
            file = self._files[name] = _HashedFile(draft / name)
            arrays = [(entry.name, entry.dtype, entry.shape, entry.bytes) for entry in self._entries if entry.file == name]
            file.write(header(arrays, {"format": "np", "step": str(self._meta.step)}))

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Write the next bytes of the arrays. Raises ValueError for more than the entries hold."""
        rest = memoryview(chunk).cast("B")
        with self._abort_on_error():
            while rest:
                entry = self._next_entry()
                part = rest[: entry.bytes - self._filled]
                self._files[entry.file].write(part)
                self._filled += len(part)
                rest = rest[len(part) :]

    def _next_entry(self) -> ArrayEntry:
        while self._position < len(self._entries) and self._filled == self._entries[self._position].bytes:
            self._position += 1
            self._filled = 0
        if self._position == len(self._entries):
            raise ValueError("more bytes than the arrays of the checkpoint hold")
        return self._entries[self._position]

    def seal(self) -> None:
        """Sync all files to disk without publishing them. Raises ValueError if bytes are missing."""
        with self._abort_on_error() as draft:
            missing = sum(entry.bytes for entry in self._entries[self._position :]) - self._filled
            if missing:
                raise ValueError(f"{missing} bytes of the checkpoint's arrays are missing")
            digests = {name: file.finish() for name, file in self._files.items()}
            write_meta(draft, self._meta)
            write_manifest(draft, {**digests, META: digest_of(draft / META)})
            for name in (META, MANIFEST):
                with open(draft / name, "rb") as synced:
                    os.fsync(synced.fileno())
            sync_folder(draft)

    def publish(self) -> Path:
        """Publish a sealed checkpoint, replacing any of the same step; return its path."""
        final = self._parent / checkpoint_name(self._meta.step)
        with self._abort_on_error() as draft:
            old = rename_hidden(final, "old") if final.exists() else None
            draft.rename(final)
            sync_folder(self._parent)
        if old is not None:
            discard(old)
        self._release()
        return final

    @contextmanager
    def _abort_on_error(self) -> Iterator[Path]:
        """Raises ValueError after `abort` or `publish`."""
        if self._draft is None:
            raise ValueError("the checkpoint was given up or finished before")
        try:
            yield self._draft
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written; no effect after `publish` or `abort`."""
        if self._draft is None:
            return
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._draft, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        self._draft = None
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _HashedFile:
    """A file hashed while written, if possible without the page cache (O_DIRECT).

    The cache would take the state's size again.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open_past_the_cache(path)
        self._piece = memoryview(mmap.mmap(-1, _PIECE_BYTES))  # O_DIRECT requires alignment to blocks
        self._filled = 0
        self._bytes = 0
        self._hasher = new_hasher()

    def write(self, part: bytes | memoryview) -> None:
        self._hasher.update(part)
        self._bytes += len(part)
        rest = memoryview(part)
        while rest:
            taken = rest[: _PIECE_BYTES - self._filled]
            self._piece[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            rest = rest[len(taken) :]
            if self._filled == _PIECE_BYTES:
                self._write_piece(_PIECE_BYTES)

    def finish(self) -> FileDigest:
        if self._filled:
            _use_the_cache(self._file)  # the end is no whole block
            self._write_piece(self._filled)
        os.fsync(self._file.fileno())
        self._file.close()
        return FileDigest(self._bytes, self._hasher.hexdigest())

    def close(self) -> None:
        self._file.close()

    def _write_piece(self, count: int) -> None:
        left = self._piece[:count]
        while left:
            try:
                left = left[self._file.write(left) :]
            except OSError as error:  # a limit within a block: the retry reports it
                if error.errno != errno.EINVAL or not _use_the_cache(self._file):
                    raise
        self._filled = 0


def _open_past_the_cache(path: Path) -> FileIO:
    file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    if _DIRECT:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return file


def _use_the_cache(file: FileIO) -> bool:
    """Disable O_DIRECT; return whether it was enabled."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
