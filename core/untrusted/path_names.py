"""Names that come from elsewhere, in messages of other nodes and in files of other people: which may become one in a folder of ours.

Everything that makes a path of such a name asks here. So does everything that writes down a name of the file system or the command line:
there names are bytes, and those that are not UTF-8 reach Python as halves of characters, which no JSON reader takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["LONGEST_NAME_BYTES", "UnsafeNameError", "inside", "is_plain_name", "is_text", "spelled", "spelled_value"]

LONGEST_NAME_BYTES = 255
"""What the file systems of Linux allow."""

LONGEST_PATH_CHARACTERS = 1024
"""Of a path within a run; systems allow some thousand bytes for the whole of it."""

_HALF = re.compile("[\ud800-\udfff]")


def is_text(name: str) -> bool:
    """Return whether a name can be written as UTF-8."""
    return name.isascii() or _HALF.search(name) is None


def spelled(name: str) -> str:
    r"""Return a name in which each byte that is not UTF-8 is spelled out, as in ``caf\xe9``; any other name as it is."""
    return name if is_text(name) else _HALF.sub(lambda half: _byte(ord(half[0])), name)


def _byte(code: int) -> str:
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"  # Python has byte 0xe9 as \udce9


def spelled_value(value: Any) -> Any:
    """Return a JSON value with every text in it `spelled`, names of fields too."""
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, Mapping):
        return {spelled_value(key): spelled_value(item) for key, item in value.items()}
    return [spelled_value(item) for item in value] if isinstance(value, list | tuple) else value


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
