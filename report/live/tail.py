"""Reads the records of a run while they are written: each line exactly once, and nothing twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic

from ...core.untrusted.bounded_json import MOST_LINE_BYTES, UnreadableError, open_regular, parse_json
from ...records.store.jsonl import DamagedRunError, R, decode, no_record

__all__ = ["Tail"]

_CHUNK_BYTES = 1 << 20


class Tail(Generic[R]):
    """Follows one of a run's files of JSON lines, which need not be there yet.

    Of what is there at first only the last `most_bytes` are read; without, all of it. A line counts once its newline is there. `anew`
    says whether the last `read` began from the start because another file lies there: the records of a run that is resumed are cut.
    """

    def __init__(self, path: Path, kind: type[R], most_bytes: int | None = None) -> None:
        self.anew = False
        self._path = path
        self._kind: type[R] = kind
        self._most_bytes = most_bytes
        self._descriptor: int | None = None
        self._offset = 0
        self._inside_line = False
        self._line: int | None = None

    def read(self) -> list[R]:
        """Return the records that have been added. Raises DamagedRunError for a whole line that is no record."""
        self.anew = self._descriptor is not None and self._replaced(self._descriptor)
        if self.anew:
            self.close()
        if self._descriptor is None:
            self._descriptor = self._open()
        records: list[R] = []
        while self._descriptor is not None and (lines := self._lines(self._descriptor)) is not None:
            records += [self._record(line) for line in lines]
        return records

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _replaced(self, descriptor: int) -> bool:
        """Whether the path leads to another file now, or to less; the file that is held open keeps its number from being used again."""
        held = os.fstat(descriptor)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (held.st_ino, held.st_dev) != (there.st_ino, there.st_dev) or there.st_size < self._offset

    def _open(self) -> int | None:
        try:
            with open_regular(self._path) as file:
                descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            return None
        except UnreadableError as error:
            raise DamagedRunError(f"{self._path}: {error}.") from error
        size = os.fstat(descriptor).st_size
        skipped = 0 if self._most_bytes is None else max(0, size - self._most_bytes)
        self._inside_line = skipped > 0
        self._line = None if skipped else 0
        self._offset = max(0, skipped - 1)  # the byte before tells whether a line begins here
        return descriptor

    def _lines(self, descriptor: int) -> list[bytes] | None:
        """Return the whole lines of the next piece; None where no newline is there yet."""
        length = _CHUNK_BYTES
        while True:
            data = os.pread(descriptor, length, self._offset)
            end = data.rfind(b"\n") + 1
            if end:
                break
            if len(data) < length:
                return None
            if length > MOST_LINE_BYTES:
                raise DamagedRunError(
                    f"{self._path}: a line from byte {self._offset} on is longer than {MOST_LINE_BYTES >> 20} MiB, the most that is read."
                )
            length *= 2  # a line longer than that
        self._offset += end
        lines = data[: end - 1].split(b"\n")
        if self._inside_line:
            self._inside_line = False
            lines = lines[1:]
        return lines

    def _record(self, line: bytes) -> R:
        self._line = None if self._line is None else self._line + 1
        try:
            record: R = decode(self._kind, parse_json(line))
        except ValueError as error:
            where = "a line near its end" if self._line is None else f"line {self._line}"
            raise DamagedRunError(f"{self._path}, {where}: {no_record(self._kind, error)}.") from error
        return record
