"""Safe output of text with control sequences for terminals, and safe file names."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")  # controls, bidi, surrogates
_BREAKS = re.compile("[\t\n]")


def shown(text: str) -> str:
    r"""Return a text with escapes such as ``\x1b`` for what a terminal would obey."""
    return _OBEYED.sub(lambda match: _escape(ord(match[0])), text)


def one_line(text: str) -> str:
    r"""Return a text with escapes also for line ends and tabs, so that no name forges a line."""
    return _BREAKS.sub(lambda match: _escape(ord(match[0])), shown(text))


def json_text(value: Any, *, indent: int | None = None, letters: bool = False) -> str:
    r"""Return a value as JSON with escapes that a `ShownStream` keeps; `letters` are unescaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=not letters)
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class ShownStream:
    """A text stream that writes texts as `shown`, and otherwise is the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the `shown` text, and return the number of given characters."""
        self.stream.write(shown(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each text."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream behind a `ShownStream`, for drawing, or for data without a terminal."""
    return stream.stream if isinstance(stream, ShownStream) else stream


@contextmanager
def shown_streams() -> Iterator[None]:
    """Make standard output and error a `ShownStream` within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_show_stream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _show_stream(stream: TextIO) -> TextIO:
    if stream is None or isinstance(stream, ShownStream):
        return stream
    if codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name == "ascii" and hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8")  # click would bypass this stream and write UTF-8
    return cast(TextIO, ShownStream(stream))


def note(text: str) -> None:
    """Write one line to standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def note_in_handler(text: str) -> None:
    """Write one line to standard error from a signal handler.

    The signal may have interrupted a write to the stream, whose buffer cannot be entered twice.
    """
    os.write(2, f"{one_line(text)}\n".encode(errors="backslashreplace"))


_STARTS = ("=", "+", "-", "@", "\t", "\r")  # spreadsheets take these for a formula (OWASP, CSV injection)


def cell_text(text: str) -> str:
    """Return a text, with an apostrophe if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(_STARTS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# Names that are not UTF-8 reach Python as surrogates, which JSON readers reject, so they are escaped.
MAX_NAME_BYTES = 255  # the limit of Linux file systems
MAX_PATH_CHARACTERS = 1024  # of a path within a run; systems allow some thousand bytes for a whole path
_HALF = re.compile("[\ud800-\udfff]")


def is_text(name: str) -> bool:
    """Return whether a name can be written as UTF-8."""
    return name.isascii() or _HALF.search(name) is None


def spelled(name: str) -> str:
    r"""Return a name with escapes such as ``caf\xe9`` for bytes that are not UTF-8."""
    return name if is_text(name) else _HALF.sub(lambda half: _byte(ord(half[0])), name)


def _byte(code: int) -> str:
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"  # Python has byte 0xe9 as \udce9


def spelled_value(value: Any) -> Any:
    """Return a JSON value with all texts `spelled`, also names of fields."""
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, Mapping):
        return {spelled_value(key): spelled_value(item) for key, item in value.items()}
    return [spelled_value(item) for item in value] if isinstance(value, list | tuple) else value


class UnsafeNameError(ValueError):
    """A name that leads out of its folder; the message shows it, cut and escaped."""

    def __init__(self, name: object) -> None:
        shown = repr(name)
        super().__init__(shown if len(shown) <= 100 else f"{shown[:100]}…")


def is_plain_name(name: object) -> bool:
    """Return whether this is text that names one file of its folder, and is printable."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        return False
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half of a character
        return False


def inside(folder: Path, path: object) -> Path:
    """Return the path of plain names below `folder`; creates nothing. Raises UnsafeNameError."""
    if not isinstance(path, str) or len(path) > MAX_PATH_CHARACTERS or not all(map(is_plain_name, path.split("/"))):
        raise UnsafeNameError(path)
    return folder / path
