"""Standard output and error that report failed writes once, as on a full device."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from ..core.errors import OutputError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COPY = "crosstrain.output_is_a_copy"  # key of click's context: the results are in files


class _Output(io.FileIO):
    """Standard output: a failed write is reported once, as an exception or by the exit code."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.refused: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        if self.refused is not None:  # the interpreter's last flush must not report again
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            self._raise(error)
            return memoryview(data).nbytes

    def _raise(self, error: OSError) -> None:
        from click import get_current_context

        context = get_current_context(silent=True)
        if context is not None and context.meta.get(_COPY):
            text = f"standard output cannot be written ({error.strerror}); the exit code is that of the work, which is complete"
            print(text, file=sys.stderr, flush=True)  # noqa: T201
            return
        if error.errno == errno.EPIPE:
            raise error
        raise OutputError(error) from error


class _Messages(_Output):
    """Standard error: losses do not end a run, as Ctrl-C may also end a ``tee`` behind it."""

    def _raise(self, error: OSError) -> None:
        pass


def guard_streams() -> Callable[[int], int]:
    """Guard this process's output; return a function that makes exit code 0 a 1 after losses."""
    sys.stdout = _guard(sys.stdout, sys.__stdout__, _Output, 1, os.O_RDONLY)
    sys.stderr = _guard(sys.stderr, sys.__stderr__, _Messages, 2, os.O_WRONLY)

    def exit_code(code: int) -> int:
        raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
        return 1 if code == 0 and isinstance(raw, _Messages) and raw.refused is not None else code

    return exit_code


def _guard(stream: TextIO | None, original: TextIO | None, kind: type[_Output], descriptor: int, null_flags: int) -> TextIO:
    if stream is None:
        _occupy(descriptor, null_flags)
    elif stream is not original:
        return stream
    return _text_stream(kind(descriptor), stream)


def output_is_a_copy() -> None:
    """Make the exit code independent of output, which only repeats what is in files."""
    from click import get_current_context

    get_current_context().meta[_COPY] = True


def _occupy(descriptor: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _text_stream(raw: _Output, like: TextIO | None = None) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(raw)
    if not isinstance(like, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, "utf-8", "backslashreplace")
    like.flush()
    return io.TextIOWrapper(
        buffer, like.encoding, like.errors, newline="\n", line_buffering=like.line_buffering, write_through=like.write_through
    )


_BEFORE_VALUE = re.compile(r".*\S {2,}(?=\S)")  # text before a line's last column: none in prose, a key before its value
_MAX_NUMBER = 0.6  # share of the width from which a last column is not wrapped
_SENTENCE = 3  # words from which such a line is wrapped as a whole; shorter is a table's row


def echo_wrapped(text: str) -> None:
    """Write a text, wrapped on a terminal; elsewhere one line stays one line for programs."""
    import click

    click.echo(wrapped(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text, nl=False)


def wrapped(text: str, width: int) -> str:
    """Return a text with prose and values in lines of at most `width` characters; tables stay."""
    return "".join(_wrap(line, width) for line in text.splitlines(keepends=True))


def _wrap(line: str, width: int) -> str:
    body = line.rstrip("\n")
    before = _BEFORE_VALUE.match(body)
    start = before.end() if before is not None else 0
    if len(body) <= width or (start > _MAX_NUMBER * width and len(body[start:].split()) < _SENTENCE):
        return line
    start = 0 if start > _MAX_NUMBER * width else start
    indent = " " * (start or len(body) - len(body.lstrip()) + 2)
    lines = textwrap.wrap(body, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + line[len(body) :]
