"""What people see: notes on standard error (standard output is for data), and text of others shown, not obeyed.

A run from elsewhere can have any character in its strings and file names. Terminals obey some of them: they move the cursor, rename the
window, or answer as if somebody typed. So each command writes through `ShownStream`, whatever the text is and wherever it comes from.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

__all__ = ["ShownStream", "json_text", "note", "one_line", "raw_stream", "shown", "shown_streams"]

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters save line end and tab, what else ends a line or turns the direction of writing, and the halves of characters."""

_BREAKS = re.compile("[\t\n]")


def shown(text: str) -> str:
    r"""Return a text in which what a terminal would obey is spelled out, such as ``\x1b``."""
    return _OBEYED.sub(lambda found: _spelled(ord(found[0])), text)


def one_line(text: str) -> str:
    r"""Return a text of others that stays on its line, with line ends and tabs spelled out too: a name with ``\\n`` forges no line."""
    return _BREAKS.sub(lambda found: _spelled(ord(found[0])), shown(text))


def json_text(value: Any, *, indent: int | None = None, letters: bool = False) -> str:
    r"""Return a value as JSON that a `ShownStream` leaves as it is: what that would spell is escaped in JSON's own way, as ``\u0085``.

    Everything that is printed as JSON is made here. With `letters` those beyond ASCII stand for themselves. Raises TypeError for what is no
    JSON.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=not letters)
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _spelled(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class ShownStream:
    """A text stream to which only the `shown` form of a text goes; in all else it is the stream that it stands before."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text as it is shown, and return how many characters were given."""
        self.stream.write(shown(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each text."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream behind a `ShownStream`.

    For who draws on a terminal and sees to the text of others itself (`terminal_pictures`), or writes data where no terminal is.
    """
    return stream.stream if isinstance(stream, ShownStream) else stream


@contextmanager
def shown_streams() -> Iterator[None]:
    """Have standard output and error show all text within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_shown_stream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _shown_stream(stream: TextIO) -> TextIO:
    if stream is None or isinstance(stream, ShownStream):
        return stream
    if codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name == "ascii" and hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8")  # click would write UTF-8 to what lies beneath, past this stream
    return cast(TextIO, ShownStream(stream))


def note(text: str) -> None:
    """Write one line to standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
