"""Tables of Parquet files, read by pyarrow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..target_classes import wrong
from .cells import EMPTY, Cells, Notation
from .rows import Rows, block_rows, check_names

MAX_TEXT_BYTES = 1 << 28  # of a column's cells that are in memory together


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
        self.notation = Notation(EMPTY)
        indexes = self._of_index()
        self.names = [name for name in self._file.schema_arrow.names if name not in indexes]
        check_names(path, self.names)
        nested = {field.name: field.type for field in self._file.schema_arrow if self._arrow.types.is_nested(field.type)}
        self.unreadable = {name: f"several values in a cell ({kind})" for name, kind in nested.items()}

    def _of_index(self) -> set[str]:
        """Return the columns that hold a pandas index, which has no name in the frame."""
        pandas: Any = self._file.schema_arrow.pandas_metadata or {}
        columns = pandas.get("index_columns", []) if isinstance(pandas, dict) else []
        return {name for name in columns if isinstance(name, str) and name.startswith("__index_level_")}

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
                yield Rows([self._cells(name, batch.column(name)) for name in self.names], places, read / total)

    def _cells(self, name: str, column: Any) -> Cells:
        """Return numbers, or texts, also of dates. Raises UsageError for too long ones."""
        types, counted = self._arrow.types, importlib.import_module("pyarrow.compute")
        if name in self.unreadable:
            return [""] * len(column)
        if types.is_dictionary(column.type) and types.is_string(column.type.value_type):
            lengths = counted.take(counted.binary_length(column.dictionary), column.indices)
        else:
            lengths = counted.binary_length(column) if types.is_string(column.type) or types.is_large_string(column.type) else None
        if lengths is not None and (counted.sum(lengths).as_py() or 0) > MAX_TEXT_BYTES:
            raise wrong(self.path, f"the column {name!r} has more than {MAX_TEXT_BYTES:,} bytes of text in {len(column):,} rows.")
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if types.is_boolean(column.type):
            column = column.cast("int8")
        if types.is_integer(column.type) or types.is_floating(column.type) or types.is_decimal(column.type):
            numbers = column.cast("float64", safe=False).to_numpy(zero_copy_only=False)
            return np.asarray(numbers, np.float64)
        return ["" if value is None else str(value) for value in column.to_pylist()]
