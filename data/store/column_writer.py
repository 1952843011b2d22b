"""Writing one split of a store of columns: examples go to the array files block by block, checked as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..base import Split
from ..columns import Column, ColumnSpec
from .manifest import FileEntry, offsets_file, values_file
from .prepared_checks import wrong_sentences
from .writer import HEADER_BYTES, BrokenSourceError, complete

__all__ = ["ColumnWriter"]


class ColumnWriter:
    """Writes the columns of one split into the store's folder; to be used in a ``with`` block.

    `vocabulary_sizes` has, for columns of tokens, how many different ones there are; `sentences` are the columns of a translation.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        columns: tuple[ColumnSpec, ...],
        vocabulary_sizes: Mapping[str, int],
        sentences: Sequence[str] = (),
    ) -> None:
        self._folder, self._split, self._columns, self._vocabulary_sizes = folder, split, columns, vocabulary_sizes
        self._sentences = sentences
        self._open_files = ExitStack()
        self._handles: dict[str, BinaryIO] = {}
        self._elements = {column.name: 0 for column in columns}
        self.count = 0

    def __enter__(self) -> ColumnWriter:
        for column in self._columns:
            self._open(values_file(self._split, column.name))
            if column.varies:
                self._open(offsets_file(self._split, column.name)).write(bytes(8))  # the first example begins at 0
        return self

    def _open(self, name: str) -> BinaryIO:
        self._handles[name] = handle = self._open_files.enter_context((self._folder / name).open("wb"))
        handle.write(bytes(HEADER_BYTES))
        return handle

    def __exit__(self, *exception: object) -> None:
        self._open_files.close()

    def add(self, block: Mapping[str, Column]) -> None:
        """Write some examples. Raises BrokenSourceError, saying what is wrong, where they are not what they ought to be."""
        if not isinstance(block, Mapping):
            raise BrokenSourceError(f"a {self._split} block is of the type {type(block).__name__}, not a mapping from names to columns")
        if set(block) != {column.name for column in self._columns}:
            raise BrokenSourceError(f"a {self._split} block has the columns {', '.join(sorted(map(str, block)))}")
        for name, column in block.items():
            if not isinstance(column, Column) or not isinstance(column.values, np.ndarray):
                raise BrokenSourceError(f"{self._split} {name} of a block is not a Column of an array")
            if not column.values.ndim or not (column.offsets is None or isinstance(column.offsets, np.ndarray)):
                raise BrokenSourceError(f"{self._split} {name} of a block has values without a dimension, or offsets that are no array")
        sizes = {name: len(column) for name, column in block.items()}
        if len(set(sizes.values())) != 1:
            raise BrokenSourceError(f"the columns of a {self._split} block have different numbers of examples: {sizes}")
        for spec in self._columns:
            column = block[spec.name]
            if problem := column.wrong_with(spec):
                raise BrokenSourceError(f"{self._split} {problem}")
            self._check_tokens(spec.name, column)
            if spec.name in self._sentences and (problem := wrong_sentences(column, self.count)):
                raise BrokenSourceError(f"{self._split} {spec.name}: {problem}")
            values = np.ascontiguousarray(column.values, np.dtype(spec.dtype).newbyteorder("<"))
            self._handles[values_file(self._split, spec.name)].write(values.data)
            if column.offsets is not None:
                ends = np.ascontiguousarray(column.offsets[1:] + self._elements[spec.name], "<i8")
                self._handles[offsets_file(self._split, spec.name)].write(ends.data)
            self._elements[spec.name] += len(values)
        self.count += next(iter(sizes.values()))

    def _check_tokens(self, name: str, column: Column) -> None:
        if name in self._vocabulary_sizes and column.values.size:
            least, most = int(column.values.min()), int(column.values.max())
            if least < 0 or most >= self._vocabulary_sizes[name]:
                raise BrokenSourceError(f"{self._split} {name} lie in {least}…{most}, not in 0…{self._vocabulary_sizes[name] - 1}")

    def finish(self) -> dict[str, FileEntry]:
        """Complete the files, put them on the disk and return their rows of the manifest. Raises BrokenSourceError for an empty split."""
        if not self.count:
            raise BrokenSourceError(f"there is no {self._split} example")
        entries: dict[str, FileEntry] = {}
        for spec in self._columns:
            shape = (self._elements[spec.name], *spec.fixed_shape)
            entries |= self._complete(values_file(self._split, spec.name), spec.dtype, shape)
            if spec.varies:
                entries |= self._complete(offsets_file(self._split, spec.name), "int64", (self.count + 1,))
        return entries

    def _complete(self, name: str, dtype: str, shape: tuple[int, ...]) -> dict[str, FileEntry]:
        return {name: complete(self._handles[name], self._folder / name, dtype, shape)}
