"""Files that somebody else may have written, read within bounds: of runs, sweeps, checkpoints and the data store.

A file of a run from elsewhere can be a pipe that never says a word, a device without an end, a link to either, or JSON that takes a
thousand times its size in memory. Whoever reads one by this module waits for nothing and holds little, and gets finite numbers.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = [
    "MOST_BYTES",
    "MOST_LINE_BYTES",
    "JsonObject",
    "NotJsonError",
    "UnreadableError",
    "first_problem",
    "is_readable_line",
    "open_regular",
    "parse_json",
    "read_json",
    "read_lines",
]

MOST_BYTES = 16 << 20
"""Of one document; the largest that is written, of a sweep of thousands of points, has some megabytes."""

MOST_VALUES = 500_000
"""In one document, as its commas and brackets tell: an empty list of two bytes takes 64 in memory."""

MOST_LINE_BYTES = 4 << 20
"""Of one line; that of a group of a hundred thousand updates has a third of it."""

MOST_LEVELS = 32
"""Of lists and objects within each other; what is written has seven. Python's own recursion ends at a thousand."""

_PATH_CHARACTERS = 80

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class JsonObject(BaseModel):
    """An object of a document, whose types are taken as they are. It may have fields that this release does not know."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class UnreadableError(ValueError):
    """A file cannot be used; the message goes on from its name ("is a pipe, not a file", "steps: is NaN")."""


class NotJsonError(UnreadableError):
    """The text is no whole JSON value."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, through links too, and never wait for it.

    Raises FileNotFoundError or NotADirectoryError where nothing is there, UnreadableError where it is something else or may not be read.
    """
    try:
        _expect_regular(os.stat(path))  # before it is opened, as opening a device can do something
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, UnreadableError):
        raise
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # no file can have this name
        raise UnreadableError(f"cannot be read ({error})") from error
    try:
        _expect_regular(os.fstat(descriptor))  # it may have been replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _expect_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError(f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, not a file")


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Return the JSON value that a file holds. Raises what `open_regular` and `parse_json` raise."""
    with open_regular(path) as file:
        data = _read(file.read, most_bytes + 1)
    if len(data) > most_bytes:
        raise UnreadableError(f"is larger than {most_bytes >> 20} MiB, the most that is read of such a file")
    return parse_json(data)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, each with its newline, which the last one may lack.

    Raises what `open_regular` raises, and UnreadableError for a line of more than `MOST_LINE_BYTES`.
    """
    with open_regular(path) as file:
        number = 0
        while line := _read(file.readline, MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise UnreadableError(f"line {number}: is longer than {MOST_LINE_BYTES >> 20} MiB, the most that is read of a line")
            yield line


def _read(read: Any, size: int) -> bytes:
    try:
        data: bytes | None = read(size)
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror})") from error
    if data is None:  # a file of the system that has nothing to say yet
        raise UnreadableError("cannot be read (it has no end)")
    return data


def is_readable_line(line: bytes) -> bool:
    """Return whether a line of JSON is within what `read_lines` and `parse_json` read. Costs nothing for a line of common length."""
    return len(line) <= MOST_LINE_BYTES and (len(line) <= MOST_VALUES or _values(line) <= MOST_VALUES)


def _values(data: bytes) -> int:
    """Return at least how many values a JSON text holds."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def parse_json(data: bytes, *, unique_keys: bool = False) -> Any:
    """Return the JSON value that a text stands for, whose numbers are all finite and whose integers have at most 64 bits.

    Raises NotJsonError where it is no JSON, UnreadableError, naming the field, where it holds more than this module's bounds allow, and
    with `unique_keys` where an object has a key twice. Without it the last value of a key counts.
    """
    if _values(data) > MOST_VALUES:
        raise UnreadableError(f"holds more than {MOST_VALUES:,} values, the most that is read of such a file")
    try:
        decoder = _strict_decoder if unique_keys else _checking_decoder if _LONG_INTEGER.search(data) else _decoder
        value = decoder.decode(data.decode())
    except RecursionError:
        raise UnreadableError(_too_deep()) from None
    except UnreadableError:
        raise
    except ValueError as error:
        raise NotJsonError(f"is not a whole JSON document ({error})") from error
    if isinstance(value, dict | list):
        _check(value)
    elif not _is_sound(value):
        raise UnreadableError(f"is {_named(value)}")
    return value


def _integer(text: str) -> float:
    """Return an integer, and infinity for one of more than 64 bits, so that it is found where its field is known."""
    value = int(text) if len(text) <= 20 else math.inf
    return value if -(2**63) <= value < 2**64 else math.inf


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises UnreadableError where a key stands in it twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UnreadableError(f"has the key {_path((key,))!r} twice")
        found[key] = value
    return found


_LONG_INTEGER = re.compile(rb"(?<![.\d])\d{19}")
"""Digits of an integer that 64 bits may not hold. Others need no look at each one, which takes as long as all the rest of reading."""

_decoder = json.JSONDecoder()
_checking_decoder = json.JSONDecoder(parse_int=_integer)
_strict_decoder = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_unique)


def _check(root: dict[str, Any] | list[Any]) -> None:
    """Raise UnreadableError for a number that is not finite, and for what is nested too deep."""
    waiting: list[tuple[tuple[Any, ...], dict[str, Any] | list[Any]]] = [((), root)]
    while waiting:
        place, holder = waiting.pop()
        if len(place) >= MOST_LEVELS:
            raise UnreadableError(f"{_path(place)}: {_too_deep()}")
        if isinstance(holder, list) and _all_sound(holder):
            continue
        for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(item, dict | list):
                waiting.append(((*place, key), item))
            elif not _is_sound(item):
                raise UnreadableError(f"{_path((*place, key))}: is {_named(item)}")


def _all_sound(values: list[Any]) -> bool:
    """Return whether a list is one of finite numbers, at the cost of a sum: a line of steps has thousands of losses."""
    try:
        return math.isfinite(sum(values))
    except TypeError:
        return False


def _is_sound(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _named(value: float) -> str:
    return "NaN, which is no number in JSON" if value != value else "a number too large to be read"


def _path(place: tuple[Any, ...]) -> str:
    text = ".".join(map(str, place))
    return text if len(text) <= _PATH_CHARACTERS else f"{text[:_PATH_CHARACTERS]}…"


def _too_deep() -> str:
    return f"is nested more than {MOST_LEVELS} levels deep"


def first_problem(error: ValidationError) -> str:
    """Return which field of a document is wrong, and how, by the first complaint of its schema."""
    first = error.errors(include_url=False)[0]
    place = _path(first["loc"])
    words = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].lower()
    return f"{place}: {words}" if place else words
