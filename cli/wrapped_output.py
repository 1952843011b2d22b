"""Writes texts of a command to standard output, wrapped at the width of a terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

import click

__all__ = ["echo_wrapped", "wrapped"]

_BEFORE_VALUE = re.compile(r".*\S {2,}(?=\S)")
"""What stands before the last column of a line: nothing in prose, a key before its value."""

_MOST = 0.6
"""A last column that begins further to the right, as a part of the width, is no value with room to wrap: the line is a row of a table."""


def echo_wrapped(text: str) -> None:
    """Write a text, on a terminal in lines of its width; elsewhere a line is one line, as other programs read it."""
    click.echo(wrapped(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text, nl=False)


def wrapped(text: str, width: int) -> str:
    """Return a text whose lines of prose, and of a key and its value, are at most `width` characters long where words allow it.

    What continues is indented, below the value where there is a key. Rows of tables stay as they are.
    """
    return "".join(_wrapped(line, width) for line in text.splitlines(keepends=True))


def _wrapped(line: str, width: int) -> str:
    body = line.rstrip("\n")
    before = _BEFORE_VALUE.match(body)
    start = before.end() if before is not None else 0
    if len(body) <= width or start > _MOST * width:
        return line
    indent = " " * (start or len(body) - len(body.lstrip()) + 2)
    lines = textwrap.wrap(body, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + line[len(body) :]
