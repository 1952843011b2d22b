"""The conclusion on a terminal, and as lines of a document."""

from __future__ import annotations

import textwrap

from ..tables.alignment import text_width
from .sentences import Told

__all__ = ["QUESTION", "as_lines", "as_text", "closing_text"]

QUESTION = "Comparison"

_GAP = "  "

_NAME = 16
"""Columns for the name of a part."""

_PROSE = 120
"""Lines are as long as this where the terminal is not narrower."""


def as_text(told: Told, width: int | None) -> str:
    """Return the conclusion for a terminal of so many characters, if it is one; ends with an empty line."""
    width = min(width or _PROSE, _PROSE)
    parts = [_wrapped(f"{QUESTION} of {told.head}", width, "")]
    parts += ["\n".join(_wrapped(sentence, width, _GAP) for sentence in told.best)] if told.best else []
    if told.axes:
        parts.append("\n".join(_axes(told, width)))
    if told.named:
        parts.append("\n".join(_named(name, sentence, width) for part, found in told.named for name, sentence in _once(part, found)))
    return "\n\n".join(parts) + "\n\n"


def closing_text(told: Told, width: int | None) -> str:
    """Return the answer once more for the last lines of a terminal, where tables have pushed it off the screen; empty where it is none."""
    if width is None or not told.best:
        return ""
    return "\n" + "\n".join(_wrapped(sentence, min(width, _PROSE), "") for sentence in told.best) + "\n"


def _once(name: str, sentences: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name if index == 0 else "", sentence) for index, sentence in enumerate(sentences)]


def _axes(told: Told, width: int) -> list[str]:
    """Return a line for each axis in columns; if that is too wide, its significance on a line below, or all of it wrapped."""
    rows = [(line.axis, line.held, line.ratio) for line in told.axes]
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)]
    found = []
    for line, row in zip(told.axes, rows, strict=True):
        if not line.held:
            found.append(_wrapped(f"{line.axis}: {line.sure}", width, _GAP))
            continue
        head = _GAP.join(["", *(text + " " * (wide - text_width(text)) for text, wide in zip(row, widths, strict=True))])
        if text_width(head) + len(_GAP) + text_width(line.sure) <= width:
            found.append(f"{head}{_GAP}{line.sure}")
        elif text_width(head.rstrip()) <= width:
            found += [head.rstrip(), _wrapped(line.sure, width, 3 * _GAP)]
        else:
            found.append(_wrapped(line.sentence.removesuffix("."), width, _GAP))
    return found


def _named(name: str, sentence: str, width: int) -> str:
    lines = textwrap.wrap(sentence, width - _NAME - 2, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"{_GAP}{name if index == 0 else '':<{_NAME}}{line}" for index, line in enumerate(lines))


def _wrapped(text: str, width: int, indent: str) -> str:
    return "\n".join(
        textwrap.wrap(
            text, width, initial_indent=indent, subsequent_indent=f"{indent}{_GAP}", break_long_words=False, break_on_hyphens=False
        )
    )


def as_lines(told: Told) -> list[str]:
    """Return every sentence as a line, the question before the first."""
    head, *others = told.sentences
    return [f"{QUESTION} of {head}.", *others]
