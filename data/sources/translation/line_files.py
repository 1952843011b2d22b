"""Reading lines of text files, gzip too, in bounded memory: a line ends at a line feed and nowhere else.

`str.splitlines` would also split at U+2028, U+0085 and form feeds, which occur within sentences.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from ....core.errors import UsageError
from ....core.untrusted.bounded_json import UnreadableError, open_regular

__all__ = ["LONGEST_LINE_BYTES", "count_lines", "read_lines"]

LONGEST_LINE_BYTES = 1 << 15
"""A longer line is no sentence; it is read past, and never held as a whole."""

_BLOCK_BYTES = 1 << 20
_MOST_EXPANSION = 200
"""How many times as large as its file unpacked text may be: what shrinks that much is no text, which shrinks to a third."""

_LEAST_BYTES = 1 << 14
"""That a file counts as: a short text of one sentence, again and again, may shrink more."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file without their ends (LF or CR LF), None for one that is longer than `LONGEST_LINE_BYTES`.

    What follows the last line feed is a line, unless it is empty. Raises UsageError for a file that cannot be read.
    """
    rest: bytes = b""
    passing = False  # within a line that is too long
    for block in _blocks(path):
        *whole, tail = block.split(b"\n")
        for part in whole:
            line = rest + part
            yield None if passing or len(line) > LONGEST_LINE_BYTES else line.removesuffix(b"\r")
            rest, passing = b"", False
        if passing or len(rest) + len(tail) > LONGEST_LINE_BYTES:
            rest, passing = b"", True
        else:
            rest += tail
    if rest or passing:
        yield None if passing else rest.removesuffix(b"\r")


def count_lines(path: Path) -> int:
    """Return how many lines `read_lines` yields."""
    count, last = 0, b"\n"
    for block in _blocks(path):
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield what is in a file behind its byte order mark, if it has one; no block is empty."""
    try:
        with ExitStack() as files:
            raw = files.enter_context(open_regular(path))
            packed = raw.peek(2)[:2] == b"\x1f\x8b"  # what begins like this is no UTF-8; names are wrong where a download unpacks
            file = files.enter_context(cast("BinaryIO", gzip.GzipFile(fileobj=raw))) if packed else cast("BinaryIO", raw)
            limit = _MOST_EXPANSION * max(path.stat().st_size, _LEAST_BYTES)
            read = 0
            while block := file.read(_BLOCK_BYTES):
                read += len(block)
                if packed and read > limit:
                    raise UsageError(f"data: {str(path)!r} unpacks to more than {_MOST_EXPANSION} times its size; that is no text.")
                if read == len(block):
                    if block[:2] in (b"\xff\xfe", b"\xfe\xff"):
                        raise UsageError(f"data: {str(path)!r} is UTF-16, not UTF-8; convert it (iconv -f UTF-16 -t UTF-8).")
                    block = block.removeprefix(_BYTE_ORDER_MARK)
                if block:
                    yield block
    except (OSError, EOFError, zlib.error, UnreadableError) as error:
        raise UsageError(f"data: {str(path)!r} cannot be read: {error}") from error
