"""``vocabulary.model`` of a run on text: the pieces that its model was trained on. An export takes them from here, without the data."""

from __future__ import annotations

import os
from pathlib import Path

from ...core.errors import writing
from ...core.untrusted.bounded_json import UnreadableError, open_regular

__all__ = ["VOCABULARY", "has_vocabulary", "read_vocabulary", "write_vocabulary"]

VOCABULARY = "vocabulary.model"
MOST_BYTES = 64 << 20


def write_vocabulary(run: Path, model: bytes) -> None:
    """Keep the vocabulary in a run's directory; it is there whole or not at all. Raises DiskError."""
    draft = run / f".{VOCABULARY}.draft"
    with writing(run):
        draft.write_bytes(model)
        os.replace(draft, run / VOCABULARY)


def has_vocabulary(run: Path) -> bool:
    """Whether there is something of its name in a run's directory."""
    return os.path.lexists(run / VOCABULARY)


def read_vocabulary(run: Path) -> bytes | None:
    """Return the vocabulary of a run, None where it has none. Raises UnreadableError for what is no such file, or too large for one.

    So is a link: a run may come from anybody, and what is read here is copied into exports.
    """
    if (run / VOCABULARY).is_symlink():
        raise UnreadableError(f"{VOCABULARY} is a link, not a file")
    try:
        with open_regular(run / VOCABULARY) as file:
            content = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(content) > MOST_BYTES:
        raise UnreadableError(f"{VOCABULARY} has more than {MOST_BYTES:,} bytes")
    return content
