"""Replacing a file in one move: a reader sees the earlier one or the new one, never half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["replacing"]

_KEPT_CHARACTERS = 32
"""Of the file's name, in the draft's: with four bytes each it still is far below the 255 bytes of a name."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new name beside `path`; the file that the block writes there takes its place at the end. What fails leaves nothing.

    An OSError is that of the block or of the move: on a read-only file system removing the draft fails too.
    """
    draft = path.with_name(f".{path.name[:_KEPT_CHARACTERS]}.{os.urandom(8).hex()}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()
