"""Standard output and standard error that say it in one place when they cannot be written, such as on a full device. Imports little."""

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

__all__ = ["echo_wrapped", "guard_streams", "output_is_a_copy", "wrapped"]

_COPY = "crosstrain.output_is_a_copy"
"""Under this key of click's context a command keeps that its work stands in files."""


class _Output(io.FileIO):
    """The descriptor under standard output. The first write that the system refuses is raised; what follows has nowhere to go.

    It is only said, and not raised, where the command has its work in files (`output_is_a_copy`).
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.refused: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        """Write some of `data` and return how many bytes. Raises OutputError, or BrokenPipeError where the reader went away."""
        if self.refused is not None:  # so that the interpreter's last flush does not complain again
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
    """The descriptor under standard error: that nobody can be told how a run stands does not end the run; its exit code tells it.

    Nor does it where the reader went away: Ctrl-C ends the ``tee`` behind ``2>&1 |`` too, and the run has a checkpoint to save.
    """

    def _raise(self, error: OSError) -> None:
        pass


def guard_streams() -> Callable[[int], int]:
    """Guard this process's own standard output and error; return what makes an exit code of 0 a 1 where messages were lost.

    A closed standard output refuses what is written, as a full device does; a closed standard error is taken as the wish for no messages.
    Streams that somebody has put in the place of the process's own are left alone.
    """
    if sys.stdout is None:
        _occupy(1, os.O_RDONLY)
        sys.stdout = _over(_Output(1))
    elif sys.stdout is sys.__stdout__:
        sys.stdout = _over(_Output(1), sys.stdout)
    if sys.stderr is None:
        _occupy(2, os.O_WRONLY)
        sys.stderr = _over(_Messages(2))
    elif sys.stderr is sys.__stderr__:
        sys.stderr = _over(_Messages(2), sys.stderr)

    def exit_code(code: int) -> int:
        raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
        return 1 if code == 0 and isinstance(raw, _Messages) and raw.refused is not None else code

    return exit_code


def output_is_a_copy() -> None:
    """Have the exit code of the command that runs tell of its work alone: what it prints stands in files, or is done, all the same."""
    from click import get_current_context

    get_current_context().meta[_COPY] = True


def _occupy(descriptor: int, flags: int) -> None:
    """Put the null device at a closed descriptor, so that no file that is opened later receives what is printed."""
    null = os.open(os.devnull, flags)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _over(raw: _Output, like: TextIO | None = None) -> io.TextIOWrapper:
    """Return a text stream over a descriptor that behaves as the one in whose place it comes."""
    buffer = io.BufferedWriter(raw)
    if not isinstance(like, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, "utf-8", "backslashreplace")
    like.flush()
    return io.TextIOWrapper(
        buffer, like.encoding, like.errors, newline="\n", line_buffering=like.line_buffering, write_through=like.write_through
    )


_BEFORE_VALUE = re.compile(r".*\S {2,}(?=\S)")
"""What stands before the last column of a line: nothing in prose, a key before its value."""

_MOST = 0.6
"""A last column that begins further to the right, as a part of the width, has no room to be wrapped in."""

_SENTENCE = 3
"""Where it has so many words, all of its line is wrapped; of fewer it is a cell of a table."""


def echo_wrapped(text: str) -> None:
    """Write a text, on a terminal in lines of its width; elsewhere a line is one line, as other programs read it."""
    import click

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
    if len(body) <= width or (start > _MOST * width and len(body[start:].split()) < _SENTENCE):
        return line
    start = 0 if start > _MOST * width else start
    indent = " " * (start or len(body) - len(body.lstrip()) + 2)
    lines = textwrap.wrap(body, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + line[len(body) :]
