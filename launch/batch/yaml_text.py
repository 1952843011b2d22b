"""YAML as Kubernetes reads it, of what a manifest consists of: objects and lists of texts, numbers and truth values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import UsageError

__all__ = ["yaml_document"]

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""What YAML 1.1 does not take for a text."""

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}


def yaml_document(value: Mapping[str, Any]) -> str:
    """Return an object as a YAML document, a line end at its end. Raises UsageError for text that is no Unicode."""
    return "\n".join(_lines(value) if value else ["{}"]) + "\n"


def _lines(value: Any) -> list[str]:
    """Return the lines of an object or a list that is not empty, not indented."""
    if isinstance(value, Mapping):
        return [line for key, part in value.items() for line in _entry(f"{_text(key)}:", part)]
    return [line for part in value for line in _item(part)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, str) and _is_block(value):
        return [f"{key} |", *_indented(value[:-1].split("\n"))]
    short = _short(value)
    if short is not None:
        return [f"{key} {short}"]
    return [key, *_indented(_lines(value))]


def _item(value: Any) -> list[str]:
    short = _short(value)
    if short is not None:
        return [f"- {short}"]
    first, *rest = _lines(value)
    return [f"- {first}", *_indented(rest)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]


def _short(value: Any) -> str | None:
    """Return what stands on one line: a text, a number, a truth value, and what has no parts, or numbers only."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool | int):
        return str(value).lower()
    if not value:
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, Sequence) and all(isinstance(part, int) for part in value):
        return f"[{', '.join(str(part).lower() for part in value)}]"
    return None


def _text(text: str) -> str:
    """Return a text as it stands on one line, in quotes where it could be taken for something else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if "\ud800" <= character <= "\udfff":
        raise UsageError(f"a manifest is text, and cannot hold {character!r}, which is no character")
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _is_block(text: str) -> bool:
    """Whether a text of several lines can stand as it is, indented."""
    lines = text.split("\n")
    return len(lines) > 2 and not lines[-1] and bool(lines[-2].strip()) and not text[0].isspace() and all(map(_stands_in_block, lines))


def _stands_in_block(line: str) -> bool:
    return line.isprintable() and line == line.rstrip()
