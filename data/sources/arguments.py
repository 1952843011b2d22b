"""Arguments after a dataset's name, such as ``size=64,classes=10``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ...core.errors import UsageError


def read_arguments(name: str, text: str, defaults: Mapping[str, str], first: str | None = None) -> dict[str, str]:
    """Return all `defaults`, replaced by ``key=value,key=value`` (or ``&``).

    The first may omit the key `first`. Raises UsageError.
    """
    values: dict[str, str] = {}
    for position, part in enumerate(re.split("[&,]", text) if text else []):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and position == 0 and first:
            key, value = first, key
        if key not in defaults:
            listed, names = ", ".join(f"{known}=…" for known in defaults), [f"{known}{equals}{value}" for known in defaults]
            raise UsageError.of(f"data: argument of {name!r}", part.strip(), listed, names)
        if key in values:
            raise UsageError(f"data: got {key!r} twice in {name + ':' + text!r}; give it once.")
        if not value:
            raise UsageError(f"data: {key!r} has no value in {name + ':' + text!r}; write {key}={defaults[key]}.")
        values[key] = value
    return {**defaults, **values}


def write_arguments(values: Mapping[str, str], defaults: Mapping[str, str]) -> str:
    """Return the arguments that differ from their defaults, in the order of `defaults`."""
    return ",".join(f"{key}={values[key]}" for key, default in defaults.items() if values[key] != default)


MAX_NUMBER = 20  # digits; Python rejects thousands of them


def whole_number(name: str, key: str, text: str, low: int, high: int) -> int:
    """Parse a number. Raises UsageError unless it is in low … high."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER else low - 1
    if not low <= number <= high:
        raise UsageError.of(f"data: {key} of {name!r}", text, f"a whole number from {low} to {high}")
    return number


def absolute_path(text: str) -> Path:
    """Return a path of an argument, which may begin with ``~``."""
    return Path(os.path.abspath(os.path.expanduser(text)))


def existing_file(path: Path | None, name: str, form: str) -> Path:
    """Return the file of a dataset that is written as `form`. Raises UsageError without one."""
    if path is None:
        raise UsageError(f"data: {name!r} needs a file; write {form}.")
    if not path.is_file():
        raise UsageError(f"data: there is no file {str(path)!r}.")
    return path


def read_share(name: str, text: str) -> float:
    """Parse the part of examples that is for the test.

    Raises UsageError unless it is within 0 and 1.
    """
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise UsageError.of(f"data: share of {name!r}", text, "a number between 0 and 1")
    return share
