"""Tables of Parquet files, read by pyarrow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..target_classes import wrong
from .rows import Cells, Rows, block_rows, check_names


class ParquetTable:
    """A Parquet file, whose places are rows from 1."""

    unit = "row"

    def __init__(self, path: Path) -> None:
        """Read the file's schema."""
        parquet: Any = importlib.import_module("pyarrow.parquet")
        self.path, self._arrow = path, importlib.import_module("pyarrow")
        try:
            self._file = parquet.ParquetFile(path)
        except (self._arrow.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        self.names = list(self._file.schema_arrow.names)
        check_names(path, self.names)

    def _damaged(self, error: Exception) -> Exception:
        """Return the error of a file's content; those of reading it have a number."""
        if getattr(error, "errno", None) is not None:
            return error
        return wrong(self.path, f"this is no sound Parquet file ({str(error).splitlines()[0][:200]}).")

    def blocks(self) -> Iterator[Rows]:
        """Yield all rows."""
        read, total = 0, max(self._file.metadata.num_rows, 1)
        batches = self._file.iter_batches(batch_size=block_rows(len(self.names)))
        while True:
            try:
                batch = next(batches, None)
            except (self._arrow.ArrowException, OSError) as error:
                raise self._damaged(error) from error
            if batch is None:
                return
            if batch.num_rows:
                places = range(read + 1, read + batch.num_rows + 1)
                read += batch.num_rows
                yield Rows([self._cells(column) for column in batch.columns], places, read / total)

    def _cells(self, column: Any) -> Cells:
        """Return numbers, or texts, also of dates and of what holds several values."""
        types = self._arrow.types
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if types.is_boolean(column.type):
            column = column.cast("int8")
        if types.is_integer(column.type) or types.is_floating(column.type) or types.is_decimal(column.type):
            numbers = column.cast("float64", safe=False).to_numpy(zero_copy_only=False)
            return np.asarray(numbers, np.float64)
        return ["" if value is None else str(value) for value in column.to_pylist()]
