"""Rows of a table, block by block."""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from ....core.console import one_line
from ..target_classes import wrong
from .cells import Cells, Notation

MAX_LINE_BYTES = 1 << 24
PIECE_BYTES = 1 << 23  # of plain lines that are divided together
MAX_BLOCK_CELLS, MAX_BLOCK_ROWS = 1 << 21, 1 << 16
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows.

    `columns`: cells by column. `places`: of each row in the file. `share`: how much of the file is read.
    """

    columns: Sequence[Cells]
    places: Sequence[int]
    share: float


class Table(Protocol):
    """A file of rows."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def names(self) -> Sequence[str]:
        """The columns."""

    @property
    def unit(self) -> str:
        """What places count: lines or rows."""

    @property
    def notation(self) -> Notation:
        """How its cells are written."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """What columns hold that cannot be read."""

    def blocks(self) -> Iterator[Rows]:
        """Yield all rows. Raises UsageError for a damaged file."""


def block_rows(columns: int) -> int:
    """Return how many rows of so many columns are in memory together."""
    return min(MAX_BLOCK_ROWS, max(1, MAX_BLOCK_CELLS // columns))


class CsvTable:
    """A file of delimited text with a header, as RFC 4180 describes it."""

    unit = "line"
    unreadable: Mapping[str, str] = {}

    def __init__(self, path: Path, delimiter: str = "", notation: Notation | None = None) -> None:
        """Read the header; without a `delimiter` the one that divides it into most parts counts."""
        self.path, self.notation = path, notation or Notation()
        with self._opened() as file:
            header = next(_lines(path, file), "")
        if not header.strip():
            raise wrong(path, "there is no header; the first line has the names of the columns.")
        self._delimiter = delimiter or max(DELIMITERS.values(), key=header.count)
        if header.startswith("PAR1"):
            raise wrong(path, f"this is a Parquet file; write parquet:{path}.")
        try:
            self.names = [name.strip() for name in next(csv.reader([header], delimiter=self._delimiter))]
        except csv.Error as error:
            raise wrong(path, f"its header is no CSV ({error}).") from error
        check_names(path, self.names)

    def _opened(self) -> IO[str]:
        return self.path.open(encoding="utf-8-sig", newline="")

    def blocks(self) -> Iterator[Rows]:
        """Yield all rows but empty lines; lines of one form without quotes are divided together."""
        size, first = max(self.path.stat().st_size, 1), 1
        with self.path.open("rb") as file:
            start = len(header) if _is_plain(header := file.readline(MAX_LINE_BYTES)) else 0
            file.seek(start)
            while start and (data := file.read(PIECE_BYTES)):
                columns = _divided(data[: data.rfind(b"\n") + 1], self._delimiter, len(self.names))
                if columns is None:
                    break
                start += data.rfind(b"\n") + 1
                file.seek(start)
                yield Rows(columns, range(first + 1, first + 1 + len(columns[0])), start / size)
                first += len(columns[0])
        if start < size:
            yield from self._parsed(start, first if start else 0, size)

    def _parsed(self, start: int, lines_before: int, size: int) -> Iterator[Rows]:
        """Yield the rows from a byte on, by the standard library's parser."""
        width, most = len(self.names), block_rows(len(self.names))
        with self.path.open("rb") as binary:
            binary.seek(start)
            file = io.TextIOWrapper(binary, "utf-8" if start else "utf-8-sig", newline="")
            reader = csv.reader(_lines(self.path, file, lines_before), delimiter=self._delimiter, strict=True)
            rows: list[list[str]] = []
            places: list[int] = []
            try:
                for row in itertools.islice(reader, 0 if start else 1, None):
                    place = lines_before + reader.line_num
                    if len(row) != width:
                        if not row:
                            continue
                        raise wrong(self.path, f"there are {len(row)} columns instead of {width}.", f"line {place:,}")
                    rows.append(row)
                    places.append(place)
                    if len(rows) == most:
                        yield Rows(list(zip(*rows, strict=True)), places, binary.tell() / size)
                        rows, places = [], []
            except csv.Error as error:
                raise wrong(self.path, f"this is no CSV ({error}).", f"line {lines_before + reader.line_num:,}") from error
            if rows:
                yield Rows(list(zip(*rows, strict=True)), places, 1.0)


def _is_plain(line: bytes) -> bool:
    """Return whether a line is a row by itself, whatever follows."""
    return line.endswith(b"\n") and b'"' not in line and b"\r" not in line[:-2]


def _divided(lines: bytes, delimiter: str, width: int) -> Sequence[list[str]] | None:
    """Return the columns of plain lines; None where they have to be parsed, or are wrong."""
    if width == 1 or not lines or any(byte in lines for byte in (b'"', b"\0")):
        return None
    lines = lines.replace(b"\r\n", b"\n")
    characters = np.frombuffer(lines, np.uint8)
    ends, marks = np.flatnonzero(characters == ord("\n")), np.flatnonzero(characters == ord(delimiter))
    if b"\r" in lines or len(marks) != len(ends) * (width - 1) or np.diff(ends, prepend=-1).max() > csv.field_size_limit():
        return None
    first, last = marks[:: width - 1], marks[width - 2 :: width - 1]
    if (last > ends).any() or (first[1:] < ends[:-1]).any():
        return None
    try:
        cells = lines[:-1].decode().replace("\n", delimiter).split(delimiter)
    except UnicodeDecodeError:
        return None
    return [cells[number::width] for number in range(width)]


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raise UsageError unless all columns have names that differ."""
    if "" in names:
        raise wrong(path, f"column {names.index('') + 1} of the header has no name.")
    if len(set(names)) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise wrong(path, f"two columns are called {one_line(repeated)!r}. Rename one of them.")


def _lines(path: Path, file: Any, number: int = 0) -> Iterator[str]:
    """Yield lines of text, the first one after line `number`.

    Raises UsageError for one that is too long, or no UTF-8.
    """
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE_BYTES)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise wrong(path, f"this is no text in UTF-8 (byte {byte:#04x}). Save it in UTF-8.", f"about line {number:,}") from error
        if not line:
            return
        if "\0" in line:
            raise wrong(path, "this is no text: it has a byte 0.", f"line {number:,}")
        if len(line) == MAX_LINE_BYTES and not line.endswith("\n"):
            raise wrong(path, f"the line has more than {MAX_LINE_BYTES:,} characters.", f"line {number:,}")
        yield line
