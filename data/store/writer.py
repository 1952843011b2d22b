"""Writing one split of a store: examples go to the array files block by block, checked as they come."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..base import Block, Split
from ..statistics import PixelCounts
from .manifest import FILES, FileEntry, file_sha256

__all__ = ["HEADER_BYTES", "BrokenSourceError", "SplitWriter", "complete"]

HEADER_BYTES = 128  # room for any shape; numpy's format asks for a multiple of 64
_MAGIC = b"\x93NUMPY\x01\x00"


class BrokenSourceError(Exception):
    """A source does not keep the promises of its interface; the message says which one."""


class SplitWriter:
    """Writes the images and labels of one split into the store's folder; to be used in a ``with`` block.

    Images are written channels last, [n, h, w, c], as convolutions on a CPU read them, so that nobody has to put them in another order.

    `pixels`, where given, counts what is written; `labels` are those that were.
    """

    def __init__(self, folder: Path, split: Split, input_shape: tuple[int, int, int], classes: int, pixels: PixelCounts | None) -> None:
        self._split = split
        self._input_shape = input_shape
        self._classes = classes
        self._pixels = pixels
        self._images_path, self._labels_path = (folder / FILES[split, kind] for kind in ("images", "labels"))
        self._open_files = ExitStack()
        self._images: BinaryIO
        self._labels: BinaryIO
        self.count = 0
        self.labels: set[int] = set()

    def __enter__(self) -> SplitWriter:
        self._images = self._open_files.enter_context(open(self._images_path, "wb"))
        self._labels = self._open_files.enter_context(open(self._labels_path, "wb"))
        for handle in (self._images, self._labels):
            handle.write(bytes(HEADER_BYTES))
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_files.close()

    def add(self, block: Block) -> None:
        """Write some examples. Raises BrokenSourceError, saying what is wrong, where they are not what they ought to be."""
        if not isinstance(block, tuple) or len(block) != 2 or not all(isinstance(array, np.ndarray) for array in block):
            raise BrokenSourceError(f"a {self._split} block is of the type {type(block).__name__}, not two arrays, (images, labels)")
        images, labels = block
        self._check(images, labels)
        self._images.write(np.ascontiguousarray(images.transpose(0, 2, 3, 1)).data)
        self._labels.write(np.ascontiguousarray(labels, dtype="<i8").data)
        if self._pixels is not None:
            self._pixels.add(images)
        self.labels.update(np.unique(labels).tolist())
        self.count += len(images)

    def finish(self) -> dict[str, FileEntry]:
        """Complete both files, put them on the disk and return their rows of the manifest. Raises BrokenSourceError for an empty split."""
        if not self.count:
            raise BrokenSourceError(f"there is no {self._split} example")
        channels, height, width = self._input_shape
        image_entry = complete(self._images, self._images_path, "uint8", (self.count, height, width, channels))
        label_entry = complete(self._labels, self._labels_path, "int64", (self.count,))
        return {self._images_path.name: image_entry, self._labels_path.name: label_entry}

    def _check(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        split = self._split
        if images.dtype != np.uint8 or images.ndim != 4:
            raise BrokenSourceError(f"{split} images are {images.dtype} {list(images.shape)}, not uint8 [n, channels, height, width]")
        if images.shape[1:] != self._input_shape:
            raise BrokenSourceError(f"{split} images have the shape {list(images.shape[1:])}, not {list(self._input_shape)}")
        if labels.dtype != np.int64 or labels.shape != (len(images),):
            raise BrokenSourceError(f"{split} labels are {labels.dtype} {list(labels.shape)}, not int64 [{len(images)}]")
        if len(labels) and (labels.min() < 0 or labels.max() >= self._classes):
            raise BrokenSourceError(f"{split} labels lie in {labels.min()}…{labels.max()}, not in 0…{self._classes - 1}")


def complete(handle: BinaryIO, path: Path, dtype: str, shape: tuple[int, ...]) -> FileEntry:
    """Write the header of numpy's format 1.0 into the room kept for it: only now is the number of examples known."""
    handle.seek(0)
    handle.write(_header(np.dtype(dtype).newbyteorder("<").str, shape))
    handle.flush()
    os.fsync(handle.fileno())
    path.chmod(0o444)
    return FileEntry(sha256=file_sha256(path), bytes=path.stat().st_size, dtype=dtype, shape=shape)


def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode("latin1")
    room = HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"
