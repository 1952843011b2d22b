"""Writing a checkpoint as its arrays arrive: a folder that appears whole under its name, or not at all.

Order: temporary folder beside → files, each synced → manifest, synced → the folder's names synced → rename → the parent's names synced.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from .array_index import PARAMETERS, ArrayEntry
from .draft_folders import create_draft, discard, lock, remove_leftovers, rename_hidden, sync_folder
from .manifest import MANIFEST, FileDigest, digest_of, new_hasher, write_manifest
from .meta import META, Meta, write_meta
from .safetensors_file import header

__all__ = ["CheckpointWriter", "checkpoint_name"]

_PIECE_BYTES = 2**19
"""How much is written at a time: whole blocks of any disk."""

_DIRECT: int = getattr(os, "O_DIRECT", 0)


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a checkpoint taken after `step` updates."""
    return f"step-{step:09d}"


class CheckpointWriter:
    """Writes one checkpoint into `parent`, a run's folder of checkpoints, which is made where it does not exist.

    `entries` are the arrays in the order in which their bytes will come. Leftovers of writers that were killed are removed first. An
    OSError (a full disk) passes through, from whichever call met it, and nothing of the checkpoint is left behind.
    """

    def __init__(self, parent: Path, meta: Meta, entries: Sequence[ArrayEntry]) -> None:
        self._parent = parent
        self._meta = meta
        self._entries = list(entries)
        self._position = 0
        self._filled = 0
        self._files: dict[str, _HashedFile] = {}
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_leftovers(parent)
        self._draft: Path | None = create_draft(parent, checkpoint_name(meta.step))
        self._lock = lock(self._draft)
        try:
            self._begin_files(self._draft)
        except BaseException:
            self.abort()
            raise

    def _begin_files(self, draft: Path) -> None:
        for name in dict.fromkeys([PARAMETERS, *(entry.file for entry in self._entries)]):
            file = self._files[name] = _HashedFile(draft / name)
            own = [(entry.name, entry.dtype, entry.shape, entry.bytes) for entry in self._entries if entry.file == name]
            file.write(header(own, {"format": "np", "step": str(self._meta.step)}))

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the arrays, any number of them. Raises ValueError where there are more than the entries hold."""
        rest = memoryview(chunk).cast("B")
        try:
            while rest:
                entry = self._next_entry()
                part = rest[: entry.bytes - self._filled]
                self._files[entry.file].write(part)
                self._filled += len(part)
                rest = rest[len(part) :]
        except BaseException:
            self.abort()
            raise

    def _next_entry(self) -> ArrayEntry:
        """Return the array that the next byte belongs to."""
        while self._position < len(self._entries) and self._filled == self._entries[self._position].bytes:
            self._position += 1
            self._filled = 0
        if self._draft is None or self._position == len(self._entries):
            raise ValueError("more bytes than the arrays of the checkpoint hold")
        return self._entries[self._position]

    def finish(self) -> Path:
        """Make the checkpoint last and give it its name; return where it is. Raises ValueError where bytes are missing."""
        self.seal()
        return self.publish()

    def seal(self) -> None:
        """Have all of the checkpoint on the disk; it has no name yet. Raises ValueError where bytes are missing."""
        if self._draft is None:
            raise ValueError("the checkpoint was given up or finished before")
        try:
            self._seal(self._draft)
        except BaseException:
            self.abort()
            raise

    def publish(self) -> Path:
        """Give a sealed checkpoint its name; return where it is. What had the name is removed."""
        if self._draft is None:
            raise ValueError("the checkpoint was given up or finished before")
        final = self._parent / checkpoint_name(self._meta.step)
        try:
            old = rename_hidden(final, "old") if final.exists() else None
            self._draft.rename(final)
            sync_folder(self._parent)
        except BaseException:
            self.abort()
            raise
        if old is not None:
            discard(old)
        self._release()
        return final

    def _seal(self, draft: Path) -> None:
        missing = sum(entry.bytes for entry in self._entries[self._position :]) - self._filled
        if missing:
            raise ValueError(f"{missing} bytes of the checkpoint's arrays are missing")
        digests = {name: file.finish() for name, file in self._files.items()}
        write_meta(draft, self._meta)
        write_manifest(draft, {**digests, META: digest_of(draft / META)})
        for name in (META, MANIFEST):
            _sync_file(draft / name)
        sync_folder(draft)

    def abort(self) -> None:
        """Give the checkpoint up and remove what was written; does nothing after `finish` or a second time."""
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
    """A file that is hashed while it is written, past the system's cache where the file system can do that (open(2), O_DIRECT).

    Nobody reads a checkpoint soon. In the cache a large one would take as much memory as the state itself, and each byte of it a copy
    more, on processors that train meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open_past_the_cache(path)
        self._piece = memoryview(mmap.mmap(-1, _PIECE_BYTES))  # begins at a block's boundary, as it has to
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
        """Have the content on the disk and return what it is."""
        if self._filled:
            _use_the_cache(self._file)  # the end is no whole block
            self._write_piece(self._filled)
        os.fsync(self._file.fileno())
        self._file.close()
        return FileDigest(self._bytes, self._hasher.hexdigest())

    def close(self) -> None:
        """Close without caring for the content, which is about to be removed."""
        self._file.close()

    def _write_piece(self, count: int) -> None:
        left = self._piece[:count]
        while left:
            try:
                left = left[self._file.write(left) :]
            except OSError as error:  # a limit that lies within a block, after which the next try says what it is
                if error.errno != errno.EINVAL or not _use_the_cache(self._file):
                    raise
        self._filled = 0


def _open_past_the_cache(path: Path) -> FileIO:
    """Make a file and open it for writing whole blocks; through the cache where the system or the file system knows nothing else."""
    file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    if _DIRECT:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return file


def _use_the_cache(file: FileIO) -> bool:
    """Have the file's next bytes go through the cache, any number of them; return whether they would not have before."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
