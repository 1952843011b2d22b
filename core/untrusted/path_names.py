"""Names that come from elsewhere, in messages of other nodes and in files of other people: which may become one in a folder of ours.

Everything that makes a path of such a name asks here.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["LONGEST_NAME_BYTES", "UnsafeNameError", "inside", "is_plain_name"]

LONGEST_NAME_BYTES = 255
"""What the file systems of Linux allow."""

LONGEST_PATH_CHARACTERS = 1024
"""Of a path within a run; systems allow some thousand bytes for the whole of it."""


class UnsafeNameError(ValueError):
    """A name that leads elsewhere than to a file of the folder that it is meant for; the message shows it, cut and escaped."""

    def __init__(self, name: object) -> None:
        shown = repr(name)
        super().__init__(shown if len(shown) <= 100 else f"{shown[:100]}…")


def is_plain_name(name: object) -> bool:
    """Return whether this is text that names one file of its folder and nothing else, and can be shown as it is."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        return False
    try:
        return len(name.encode()) <= LONGEST_NAME_BYTES
    except UnicodeEncodeError:  # half of a character
        return False


def inside(folder: Path, path: object) -> Path:
    """Return the file of `folder` that a relative path of plain names means; nothing is made. Raises UnsafeNameError for any other."""
    if not isinstance(path, str) or len(path) > LONGEST_PATH_CHARACTERS or not all(map(is_plain_name, path.split("/"))):
        raise UnsafeNameError(path)
    return folder / path
