"""Do two files have a line for each other's lines? Where they do not, where does it look as if they went apart?"""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path

from ....core.errors import UsageError
from .line_files import count_lines, read_lines

__all__ = ["aligned_count", "first_suspicious_line"]

_WINDOW, _MANY = 20, 6
"""Lines looked at together, and how many of them have to be odd: one true translation in thirty is, and every other random pair."""

_ODD_RATIO = 1.8


def aligned_count(source: Path, target: Path) -> int:
    """Return how many lines both files have. Raises UsageError, with both counts and the first suspicious line, where they differ.

    Raises it for files without a line, too.
    """
    counts = count_lines(source), count_lines(target)
    if counts[0] != counts[1]:
        line, why = first_suspicious_line(source, target)
        raise UsageError(
            f"data: {str(source)!r} has {counts[0]:,} lines and {str(target)!r} has {counts[1]:,}, so that they are no translations of "
            f"each other, line by line. The first suspicious line is {line:,}: {why}."
        )
    if not counts[0]:
        raise UsageError(f"data: {str(source)!r} and {str(target)!r} are empty.")
    return counts[0]


def first_suspicious_line(source: Path, target: Path) -> tuple[int, str]:
    """Return the number of the first line, from 1, from which on pairs look unlike translations, and why."""
    odd: deque[tuple[int, str]] = deque()
    number = 0
    for number, (one, other) in enumerate(itertools.zip_longest(read_lines(source), read_lines(target), fillvalue=b""), 1):
        why = _oddity(one or b"", other or b"")
        if why is not None:
            odd.append((number, why))
        while odd and odd[0][0] <= number - _WINDOW:
            odd.popleft()
        if len(odd) >= _MANY:
            return odd[0]
    return odd[0] if odd else (number, "it has no other line beside it in one of the files")


def _oddity(one: bytes, other: bytes) -> str | None:
    lengths = len(one.strip()), len(other.strip())
    if min(lengths) == 0:
        return None if max(lengths) == 0 else f"it is empty in one file and has {max(lengths)} bytes in the other"
    odd = max(lengths) > 20 and max(lengths) > _ODD_RATIO * min(lengths)
    return f"it has {lengths[0]} bytes in one file and {lengths[1]} in the other" if odd else None
