"""Do two files have a line for each other's lines? Where they do not, where does it look as if they went apart?"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ....core.errors import UsageError
from .line_files import LONGEST_LINE_BYTES, count_lines, read_lines

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
        found = first_suspicious_line(source, target)
        where = (
            "The lengths of their lines do not show where they diverge."
            if found is None
            else f"The first suspicious line is {found[0]:,}: {found[1]}."
        )
        raise UsageError(
            f"data: {str(source)!r} has {counts[0]:,} lines and {str(target)!r} has {counts[1]:,}, so that they are no translations of "
            f"each other, line by line. {where}"
        )
    if not counts[0]:
        raise UsageError(f"data: {str(source)!r} and {str(target)!r} are empty.")
    return counts[0]


def first_suspicious_line(source: Path, target: Path) -> tuple[int, str] | None:
    """Return the number of the first line, from 1, from which on pairs look unlike translations, and why; None where no lengths say it.

    That one file ends before the other says nothing of the place: a line that is missing anywhere has the last one stand alone.
    """
    odd: deque[tuple[int, str]] = deque()
    for number, lines in enumerate(zip(read_lines(source), read_lines(target), strict=False), 1):
        why = _oddity(*lines)
        if why is not None:
            odd.append((number, why))
        while odd and odd[0][0] <= number - _WINDOW:
            odd.popleft()
        if len(odd) >= _MANY:
            return odd[0]
    return None


def _oddity(one: bytes | None, other: bytes | None) -> str | None:
    """Return what is odd about two lines beside each other; None stands for one that is too long to be held."""
    sizes = [None if line is None else len(line.strip()) for line in (one, other)]
    told = [f"more than {LONGEST_LINE_BYTES:,} bytes" if size is None else f"{size} bytes" for size in sizes]
    least, most = sorted(LONGEST_LINE_BYTES + 1 if size is None else size for size in sizes)
    if least == 0:
        return None if most == 0 else f"it is empty in one file and has {told[sizes[0] == 0]} in the other"
    odd = most > 20 and most > _ODD_RATIO * least
    return f"it has {told[0]} in one file and {told[1]} in the other" if odd else None
