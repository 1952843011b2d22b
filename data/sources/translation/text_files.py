"""Reads lines of text files, also gzip, in bounded memory.

Only a line feed ends a line: `str.splitlines` splits sentences too.
"""

from __future__ import annotations

import gzip
import importlib
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, TypeVar, cast

from ....core.bounded_json import UnreadableError, open_regular
from ....core.errors import MissingPackageError, UsageError
from ...base import Split

MAX_LINE_BYTES = 1 << 15  # a longer line is no sentence; it is skipped without being held in memory
_BLOCK_BYTES = 1 << 20
_MAX_EXPANSION = 200  # ratio of unpacked size to file size; text shrinks to a third
_MIN_BYTES = 1 << 14  # size of smaller files for that ratio: a short repetitive text may shrink more
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[bytes | None]:
    """Yield lines without LF or CR LF, None for one longer than `MAX_LINE_BYTES`.

    Raises UsageError.
    """
    rest: bytes = b""
    passing = False  # within a line that is too long
    for block in _blocks(path):
        *whole, tail = block.split(b"\n")
        for part in whole:
            line = rest + part
            yield None if passing or len(line) > MAX_LINE_BYTES else line.removesuffix(b"\r")
            rest, passing = b"", False
        if passing or len(rest) + len(tail) > MAX_LINE_BYTES:
            rest, passing = b"", True
        else:
            rest += tail
    if rest or passing:
        yield None if passing else rest.removesuffix(b"\r")


def count_lines(path: Path) -> int:
    """Return the number of lines that `read_lines` yields."""
    count, last = 0, b"\n"
    for block in _blocks(path):
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the non-empty blocks of a file after its byte order mark, if any."""
    try:
        with ExitStack() as files:
            raw = files.enter_context(open_regular(path))
            packed = raw.peek(2)[:2] == b"\x1f\x8b"  # never UTF-8; a download may unpack a file and keep its name
            file = files.enter_context(cast("BinaryIO", gzip.GzipFile(fileobj=raw))) if packed else cast("BinaryIO", raw)
            limit = _MAX_EXPANSION * max(path.stat().st_size, _MIN_BYTES)
            read = 0
            while block := file.read(_BLOCK_BYTES):
                read += len(block)
                if packed and read > limit:
                    raise UsageError(f"data: {str(path)!r} unpacks to more than {_MAX_EXPANSION} times its size; that is no text.")
                if read == len(block):
                    if block[:2] in (b"\xff\xfe", b"\xfe\xff"):
                        raise UsageError(f"data: {str(path)!r} is UTF-16, not UTF-8; convert it (iconv -f UTF-16 -t UTF-8).")
                    block = block.removeprefix(_BYTE_ORDER_MARK)
                if block:
                    yield block
    except (OSError, EOFError, zlib.error, UnreadableError) as error:
        raise UsageError(f"data: {str(path)!r} cannot be read: {error}") from error


T = TypeVar("T")


def text_bytes(text: str) -> int:
    """Return the size of a text in UTF-8; in Python it may be four times that."""
    return len(text) if text.isascii() else len(text.encode())


def entry_bytes(entry: tuple[str, str] | str) -> int:
    """Return the size of a pair's text in UTF-8; 0 for a skipped one."""
    return 0 if isinstance(entry, str) else sum(map(text_bytes, entry))


def parts(entries: Iterable[T], most: int, most_bytes: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the entries in lists of at most `most` entries and `most_bytes`, or of a larger one."""
    part: list[T] = []
    held = 0
    for entry in entries:
        more = size(entry)
        if part and (len(part) == most or held + more > most_bytes):
            yield part
            part, held = [], 0
        part.append(entry)
        held += more
    if part:
        yield part


def text_package(name: str) -> ModuleType:
    """Import ``sentencepiece``, ``sacrebleu`` or ``num2words``. Raises MissingPackageError."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackageError(
            f"data: text needs the package {name!r}, which is not installed. Install it with: pip install 'crosstrain[text]'"
        ) from error


class SkippedPairs:
    """Counts skipped pairs by split and reason; lines are numbered from 1."""

    def __init__(self) -> None:
        self._found: dict[tuple[Split, str], tuple[int, int]] = {}

    def add(self, split: Split, reason: str, line: int, count: int = 1) -> None:
        """Count some pairs, the first of which is in this line."""
        before, first = self._found.get((split, reason), (0, line))
        self._found[split, reason] = before + count, first

    def lines(self) -> tuple[str, ...]:
        """Return a line per split and reason."""
        return tuple(
            f"{split}: {count:,} {'pair' if count == 1 else 'pairs'} {reason} ({'in' if count == 1 else 'the first in'} line {first:,})"
            for (split, reason), (count, first) in self._found.items()
        )


_SECONDS_BETWEEN = 5.0


class ReadingProgress:
    """Prints how many of `total` units are done; `what` is the activity, such as ``encoding``."""

    def __init__(self, what: str, total: int, unit: str = "pairs") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._began = self._told = time.monotonic()

    def update(self, done: int) -> None:
        """Print the progress, at most every few seconds."""
        now = time.monotonic()
        if now - self._told < _SECONDS_BETWEEN:
            return
        self._told = now
        share = done / self._total if self._total else 1.0
        left = f", about {(now - self._began) * (1 - share) / share:.0f} s left" if share > 0.02 else ""
        sys.stderr.write(f"data: {self._what}: {done:,} of {self._total:,} {self._unit} ({100 * share:.0f} %{left})\n")
        sys.stderr.flush()
