"""Arrays of an .npz file, block by block.

Neither pickles nor more bytes than the headers say are read.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ....core.console import one_line
from ..target_classes import wrong

Array = NDArray[Any]
MAX_ARRAYS = 1000
BLOCK_BYTES = 16 << 20
MAX_TRANSPOSED_BYTES = 1 << 30  # an array in Fortran's order is read as a whole
MAX_CHARACTER = 0x10FFFF
_READABLE = "biufUS"  # kinds of numpy's types
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Header:
    """Shape and type of an array, and whether its first axis changes fastest."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    transposed: bool

    @property
    def size_bytes(self) -> int:
        """The size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class NpzFile:
    """The arrays of a file, as ``numpy.savez`` writes it."""

    def __init__(self, path: Path) -> None:
        """Read the headers. Raises UsageError for what is no such file."""
        self.path = path
        with self._reading("is no .npz file"), zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename.removesuffix(".npy") for entry in entries]
            if len(entries) > MAX_ARRAYS:
                raise wrong(path, f"there are {len(entries):,} arrays, and at most {MAX_ARRAYS:,} are possible.")
            if repeated := [name for number, name in enumerate(names) if name in names[:number]]:
                raise wrong(path, f"two arrays are called {one_line(repeated[0])!r}.")
            self.arrays = {name: self._header(archive, entry) for name, entry in zip(names, entries, strict=True)}

    def _header(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Header:
        with archive.open(entry) as file:
            header = _read_header(file)
            name = one_line(entry.filename.removesuffix(".npy"))
            if header.dtype.kind not in _READABLE:
                raise wrong(self.path, f"the array {name!r} is of the type {header.dtype}; only numbers and texts are read.")
            if header.size_bytes != entry.file_size - file.tell():
                raise wrong(self.path, f"the array {name!r} has not the size that its header says.")
            if header.transposed and header.size_bytes > MAX_TRANSPOSED_BYTES:
                raise wrong(self.path, f"the array {name!r} is in Fortran's order; save np.ascontiguousarray of it.")
        return header

    @contextmanager
    def _reading(self, text: str) -> Iterator[None]:
        try:
            yield
        except _BROKEN as error:
            raise wrong(self.path, f"this {text} ({one_line(str(error)) or type(error).__name__}).") from error

    def blocks(self, name: str, most_rows: int = 1 << 16) -> Iterator[Array]:
        """Yield an array [n, …] in parts of at most so many rows."""
        header = self.arrays[name]
        rows, row_bytes = header.shape[0], header.size_bytes // max(header.shape[0], 1)
        most = min(most_rows, max(1, BLOCK_BYTES // max(row_bytes, 1)))
        with (
            self._reading(f"file is damaged at the array {one_line(name)!r}"),
            zipfile.ZipFile(self.path) as archive,
            archive.open(_entry(archive, name)) as file,
        ):
            _read_header(file)
            if header.transposed:
                whole = np.frombuffer(_exactly(file, header.size_bytes), header.dtype).reshape(header.shape, order="F")
                for first in range(0, rows, most):
                    yield np.ascontiguousarray(whole[first : first + most])
                return
            for first in range(0, rows, most):
                count = min(most, rows - first)
                content = _exactly(file, count * row_bytes)
                if header.dtype.kind == "U" and (np.frombuffer(content, header.dtype.str[0] + "u4") > MAX_CHARACTER).any():
                    raise ValueError("its texts have characters that do not exist")
                yield np.frombuffer(content, header.dtype).reshape(count, *header.shape[1:])

    def whole(self, name: str) -> Array:
        """Return an array, which has to fit into memory."""
        parts = list(self.blocks(name))
        return np.concatenate(parts) if parts else np.zeros(self.arrays[name].shape, self.arrays[name].dtype)


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    return next(entry for entry in archive.infolist() if entry.filename.removesuffix(".npy") == name)


def _read_header(file: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format is not known")
    try:
        shape, transposed, dtype = _HEADERS[version](file)
    except Exception as error:
        raise ValueError(f"a header cannot be read: {type(error).__name__}") from error
    if any(size < 0 for size in shape):
        raise ValueError(f"an array has the shape {list(shape)}")
    return Header(shape, dtype, transposed and len(shape) > 1)


def _exactly(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise EOFError("the values end early")
    return content
