"""The vocabulary of a run that trains on text. Apart from the schemas, as tasks load it too."""

from __future__ import annotations

import os
from pathlib import Path

from ...core.bounded_json import UnreadableError, open_regular
from ...core.errors import writing

VOCABULARY = "vocabulary.model"
MAX_BYTES = 64 << 20


def write_vocabulary(run: Path, model: bytes) -> None:
    """Write a run's vocabulary atomically. Raises DiskError."""
    draft = run / f".{VOCABULARY}.draft"
    with writing(run):
        draft.write_bytes(model)
        os.replace(draft, run / VOCABULARY)


def has_vocabulary(run: Path) -> bool:
    """Return whether a run has an entry of this name."""
    return os.path.lexists(run / VOCABULARY)


def read_vocabulary(run: Path) -> bytes | None:
    """Return a run's vocabulary, or None.

    Raises UnreadableError if too large or a link, as runs are untrusted.
    """
    if (run / VOCABULARY).is_symlink():
        raise UnreadableError(f"{VOCABULARY} is a link, not a file")
    try:
        with open_regular(run / VOCABULARY) as file:
            content = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(content) > MAX_BYTES:
        raise UnreadableError(f"{VOCABULARY} has more than {MAX_BYTES:,} bytes")
    return content
