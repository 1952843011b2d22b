"""Patterns of parameters' names in settings: ``PATTERN[,PATTERN]``, as in `fnmatchcase`."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from .errors import UsageError
from .suggestions import nearest

MAX_NAMED = 3  # of names in a message


def read_patterns(text: str) -> tuple[str, ...]:
    """Return the patterns of a setting. Raises ValueError for an empty one."""
    patterns = tuple(part.strip() for part in text.split(","))
    if not all(patterns):
        raise ValueError("names or patterns with commas between, such as '*.bias,*norm*'")
    return patterns


def matching(text: str | None, names: Collection[str]) -> frozenset[str]:
    """Return the names that a setting's patterns match; none for None."""
    patterns = () if text is None else read_patterns(text)
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def refuse_unmatched(field: str, text: str | None, names: Collection[str]) -> None:
    """Raise UsageError for a pattern that matches none of the names."""
    for pattern in () if text is None else read_patterns(text):
        if not matching(pattern, names):
            close = nearest(pattern.replace("*", ""), names)
            shown = [close] if close else list(names)[:MAX_NAMED]
            more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
            raise UsageError(f"{field}: {pattern!r} matches none of the names, such as {', '.join(shown)}{more}.")
