"""Writes tables as CSV or Parquet files. A file gets its name when it is complete, and is not overwritten unless that is asked for."""

from __future__ import annotations

import csv
import importlib
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TextIO, cast

from ...core.drafts import replacing
from ...core.errors import MissingPackageError, TrainerError, UsageError
from ...core.untrusted.console import ShownStream
from ...core.untrusted.spreadsheet_cells import cell_text
from .records_table import Cells, Table

__all__ = ["FORMATS", "check_format", "check_new", "write_csv", "write_file"]

FORMATS = ("csv", "parquet")

_BATCH_ROWS = 50_000  # some 20 MB of rows


def check_format(name: str) -> None:
    """Raise MissingPackageError where a format needs a package that is not here."""
    if name == "parquet":
        try:
            importlib.import_module("pyarrow")
        except ModuleNotFoundError as error:
            raise MissingPackageError("format parquet needs the package pyarrow. Install it: pip install 'crosstrain[parquet]'") from error


def check_new(path: Path, *, overwrite: bool) -> None:
    """Raise UsageError where `path` cannot become a new file: it exists and is not to be overwritten, or no file can be made there."""
    if path.is_dir():
        raise UsageError(f"--output: {str(path)!r} is a folder, and a file is to be written. Give another name.")
    if path.exists() and not path.is_file():  # it would be replaced by a file
        raise UsageError(f"--output: {str(path)!r} is a device or a pipe, and a file is to be written. Give another name.")
    if path.exists() and not overwrite:
        raise UsageError(f"--output: {str(path)!r} exists. Give another name, or --overwrite.")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(f"--output: {str(path.absolute().parent)!r} is no folder that can be written. Give another.")


def write_file(table: Table, path: Path, file_format: str, *, overwrite: bool) -> int:
    """Write a table into the file `path` and return how many rows it has. Raises UsageError as `check_new`, before anything is read."""
    check_new(path, overwrite=overwrite)
    with _whole(path) as partial:
        if file_format == "parquet":
            return _write_parquet(table, partial)
        with partial.open("w", encoding="utf-8", newline="") as file:
            return write_csv(table, file)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield the name of a file beside `path` that takes its place at the end; what fails leaves nothing.

    Raises TrainerError where the file cannot be written, such as on a full disk.
    """
    try:
        with replacing(path) as draft:
            yield draft
    except OSError as error:
        raise TrainerError(f"{path}: cannot be written ({error.strerror}).") from error


def _batches(table: Table) -> Iterator[list[Cells]]:
    while batch := list(itertools.islice(table.rows, _BATCH_ROWS)):
        yield batch


# CSV ------------------------------------------------------------------------------------------------------------------


def write_csv(table: Table, file: IO[str] | None = None) -> int:
    """Write a table with a line of names to `file` (default: standard output) and return how many rows it has.

    An empty cell stands for what was not observed; NaN and Infinity are spelled so, as in the records. No text is a formula (`cell_text`).
    """
    writer = csv.writer(ShownStream(cast(TextIO, file or sys.stdout)), lineterminator="\n")
    writer.writerow([cell_text(column.name) for column in table.columns])
    numbers = [index for index, column in enumerate(table.columns) if column.kind == "number"]
    texts = [index for index, column in enumerate(table.columns) if column.kind == "text"]
    rows = 0
    for batch in _batches(table):
        writer.writerows(_spelled(_without_formulas(cells, texts), numbers) for cells in batch)
        rows += len(batch)
    return rows


def _without_formulas(cells: Cells, texts: Sequence[int]) -> Cells:
    found = [*cells]
    for index in texts:
        if found[index] is not None:
            found[index] = cell_text(found[index])
    return found


def _spelled(cells: Cells, numbers: Sequence[int]) -> Cells:
    if all(cells[index] is None or math.isfinite(cells[index]) for index in numbers):
        return cells
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return [names.get(str(cell), cell) if index in numbers else cell for index, cell in enumerate(cells)]


# Parquet --------------------------------------------------------------------------------------------------------------


def _moment(text: str | None) -> datetime | None:
    """Return an ISO time; None also for one within hours of the year 1 or 10000, which has no place in UTC."""
    try:
        return None if text is None else datetime.fromisoformat(text).astimezone(UTC)
    except OverflowError:
        return None


def _write_parquet(table: Table, path: Path) -> int:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    types: Mapping[str, Any] = {"text": arrow.string(), "integer": arrow.int64(), "number": arrow.float64(), "truth": arrow.bool_()}
    types = {**types, "moment": arrow.timestamp("us", tz="UTC")}
    schema = arrow.schema([(column.name, types[column.kind]) for column in table.columns])
    rows = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in _batches(table):
            columns = zip(table.columns, zip(*batch, strict=True), strict=True)
            cells = [(column.kind, [*map(_moment, values)] if column.kind == "moment" else values) for column, values in columns]
            arrays = [arrow.array(values, type=types[kind]) for kind, values in cells]
            writer.write_batch(arrow.record_batch(arrays, schema=schema))
            rows += len(batch)
    return rows
