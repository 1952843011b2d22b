"""Notes to the person at the terminal, on standard error; standard output is for data."""

from __future__ import annotations

import sys

__all__ = ["note"]


def note(text: str) -> None:
    """Write one line to standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
