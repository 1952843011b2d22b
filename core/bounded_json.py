"""Bounded reading of untrusted files, which may be pipes, endless devices or huge JSON."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import UsageError

MAX_BYTES = 16 << 20  # of a document; a sweep of thousands of points has some megabytes
MAX_VALUES = 500_000  # of a document, by commas and brackets: an empty list of two bytes takes 64 in memory
MAX_LINE_BYTES = 4 << 20  # of a line; a group of a hundred thousand updates has a third of it
MAX_LEVELS = 32  # of nesting; our documents have seven, Python's recursion limit is a thousand
_TOO_DEEP = f"is nested more than {MAX_LEVELS} levels deep"
_PATH_CHARACTERS = 80
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class JsonObject(BaseModel):
    """An object of a document, with strict types; unknown fields are allowed."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class UnreadableError(ValueError):
    """An unusable file; the message continues its name ("steps: is NaN")."""


class NotJsonError(UnreadableError):
    """A text that is no complete JSON value."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, also through links, without waiting.

    Raises FileNotFoundError, NotADirectoryError, or UnreadableError for anything else.
    """
    try:
        _expect_regular(os.stat(path))  # opening a device may have effects
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


def read_json(path: Path, most_bytes: int = MAX_BYTES) -> Any:
    """Return the JSON value of a file. Raises what `open_regular` and `parse_json` raise."""
    with open_regular(path) as file:
        size = min(
            os.fstat(file.fileno()).st_size, most_bytes
        )  # a buffer of `most_bytes` would take longer to allocate than a usual file to read
        data = _read(file.read, size + 1)
        data += _read(file.read, most_bytes - size) if len(data) > size else b""
    if len(data) > most_bytes:
        raise UnreadableError(f"is larger than {most_bytes >> 20} MiB, the most that is read of such a file")
    return parse_json(data)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. Raises as `open_regular`, and UnreadableError for a long line."""
    with open_regular(path) as file:
        lines = iter(lambda: _read(file.readline, MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise UnreadableError(f"line {number}: is longer than {MAX_LINE_BYTES >> 20} MiB, the most that is read of a line")
            yield line


def _read(read: Any, size: int) -> bytes:
    try:
        data: bytes | None = read(size)
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror})") from error
    if data is None:  # a system file without data yet
        raise UnreadableError("cannot be read (it has no end)")
    return data


def is_readable_line(line: bytes) -> bool:
    """Return whether a line of JSON is within this module's bounds; fast for usual lengths."""
    return len(line) <= MAX_LINE_BYTES and (len(line) <= MAX_VALUES or _count_values(line) <= MAX_VALUES)


def _count_values(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def parse_json(data: bytes, *, unique_keys: bool = False) -> Any:
    """Return the JSON value of a text, with finite numbers and integers of at most 64 bits.

    Raises NotJsonError, or UnreadableError beyond the bounds and, with `unique_keys`, for a repeated key.
    """
    if _count_values(data) > MAX_VALUES:
        raise UnreadableError(f"holds more than {MAX_VALUES:,} values, the most that is read of such a file")
    try:
        decoder = _strict_decoder if unique_keys else _checking_decoder if _LONG_INTEGER.search(data) else _decoder
        value = decoder.decode(data.decode())
    except RecursionError:
        raise UnreadableError(_TOO_DEEP) from None
    except UnreadableError:
        raise
    except ValueError as error:
        raise NotJsonError(f"is not a whole JSON document ({error})") from error
    if isinstance(value, dict | list):
        _check(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UnreadableError(f"is {_describe_number(value)}")
    return value


def _parse_integer(text: str) -> float:
    """Return an integer; infinity for more than 64 bits, reported where its field is known."""
    value = int(text) if len(text) <= 20 else math.inf
    return value if -(2**63) <= value < 2**64 else math.inf


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise UnreadableError(f"has the key {_path((key,))!r} twice")
        fields[key] = value
    return fields


_LONG_INTEGER = re.compile(rb"\d{19}")  # may exceed 64 bits; only then all are checked, which doubles the time
_decoder = json.JSONDecoder()
_checking_decoder = json.JSONDecoder(parse_int=_parse_integer)
_strict_decoder = json.JSONDecoder(parse_int=_parse_integer, object_pairs_hook=_refuse_repeated_keys)


def _check(root: dict[str, Any] | list[Any]) -> None:
    waiting: list[tuple[tuple[Any, ...], dict[str, Any] | list[Any]]] = [((), root)]
    while waiting:
        place, holder = waiting.pop()
        if len(place) >= MAX_LEVELS:
            raise UnreadableError(f"{_path(place)}: {_TOO_DEEP}")
        if isinstance(holder, list) and _all_sound(holder):
            continue
        for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            kind = type(item)
            if kind is dict or kind is list:
                waiting.append(((*place, key), item))
            elif kind is float and not math.isfinite(item):
                raise UnreadableError(f"{_path((*place, key))}: is {_describe_number(item)}")


def _all_sound(values: list[Any]) -> bool:
    """Return whether all numbers are finite, at the cost of a sum: lines have thousands."""
    try:
        return math.isfinite(sum(values))
    except TypeError:
        return False


def _describe_number(value: float) -> str:
    return "NaN, which is no number in JSON" if value != value else "a number too large to be read"


def _path(place: tuple[Any, ...]) -> str:
    text = ".".join(map(str, place))
    return text if len(text) <= _PATH_CHARACTERS else f"{text[:_PATH_CHARACTERS]}…"


_OF_PYDANTIC = re.compile(r"(function|constrained|is-instance|lax-or)-|\w+\[")  # names of its validators, among those of fields


def first_problem(error: ValidationError) -> str:
    """Return the field and problem of the first validation error."""
    first = error.errors(include_url=False)[0]
    place = _path(tuple(part for part in first["loc"] if not _OF_PYDANTIC.match(str(part))))
    words = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].lower()
    return f"{place}: {words}" if place else words


MAX_DOTS = 10_000  # per line: the time for a dotted key grows with the square of its parts
MAX_BITS = 64  # of a whole number; a hexadecimal one can have a million


def decode_text(data: bytes) -> str:
    """Return a hand-written text without byte-order mark. Raises UnicodeDecodeError."""
    return data.decode("utf-8-sig")


def parse_toml(data: bytes, key: str, place: str) -> dict[str, Any]:
    """Return a TOML file's content. Raises UsageError with `key` and `place`."""
    wrong = place if key == place else f"{key}: {place}"
    if any(line.count(b".") > MAX_DOTS for line in data.splitlines()):
        raise UsageError(f"{wrong} has a line with more than {MAX_DOTS:,} dots, the most that is read of one.")
    try:
        values = tomllib.loads(decode_text(data))
        _check_toml(values)
    except RecursionError:
        raise UsageError(f"{wrong} is not valid TOML: it is nested too deep.") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number with too many digits for Python
        raise UsageError(f"{wrong} is not valid TOML: {error}.") from None
    return values


def _check_toml(root: Any) -> None:
    """Raise ValueError for a number or nesting beyond what is read.

    A dotted key nests without brackets.
    """
    waiting = [(root, 0)]
    while waiting:
        value, level = waiting.pop()
        if isinstance(value, dict | list):
            if level > MAX_LEVELS:
                raise ValueError(f"it {_TOO_DEEP}")
            waiting += ((item, level + 1) for item in (value.values() if isinstance(value, dict) else value))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ValueError(f"a whole number has more than {MAX_BITS} bits")
