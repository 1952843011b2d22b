"""TOML files with settings of a job: the user's own by path, and those that are shipped by name."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..errors import UsageError

__all__ = ["SWEEP", "hand_written", "parse_toml", "read_config", "shipped"]

MOST_CONFIG_BYTES = 1 << 20

MOST_DOTS = 10_000
"""On a line: the time that a dotted key takes grows with the square of its parts, and no key of ours has one."""

MOST_BITS = 64
"""Of a whole number; hexadecimal ones can have a million, and cannot even be shown."""

SWEEP = "sweep"
"""The table of a file that says which points `trainer sweep` goes through; no setting of a job."""


def shipped() -> dict[str, Traversable]:
    """Return the shipped configurations by name."""
    found = {Path(entry.name).stem: entry for entry in files("crosstrain.configs").iterdir() if entry.name.endswith(".toml")}
    return dict(sorted(found.items()))


def read_config(config: Path | str) -> tuple[str, dict[str, Any]]:
    """Read a file by path, or a shipped one by name; a bare name without ``.toml`` is first looked up among the shipped ones.

    Returns how to name it in messages (``file PATH``) and its keys. Raises UsageError where it does not exist or is no TOML.
    """
    place, source = _locate(config)
    try:
        with source.open("rb") as file:  # a pipe is as good as a file here
            data = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--config: {place} cannot be read: {error.strerror}.") from None
    if len(data) > MOST_CONFIG_BYTES:
        raise UsageError(f"--config: {place} is larger than {MOST_CONFIG_BYTES >> 20} MiB, the most that is read of one.")
    return place, parse_toml(data, "--config", place)


def hand_written(data: bytes) -> str:
    """Return the text of a file that a person has written, in which an editor may have put a byte-order mark first.

    Raises UnicodeDecodeError where it is not UTF-8.
    """
    return data.decode("utf-8-sig")


def parse_toml(data: bytes, key: str, place: str) -> dict[str, Any]:
    """Return the keys of a TOML file's content. Raises UsageError, which begins with `key` and names the `place`, where it is none."""
    wrong = place if key == place else f"{key}: {place}"
    if any(line.count(b".") > MOST_DOTS for line in data.splitlines()):
        raise UsageError(f"{wrong} has a line with more than {MOST_DOTS:,} dots, the most that is read of one.")
    try:
        found = tomllib.loads(hand_written(data))
        _refuse_long_numbers(found)
    except RecursionError:
        raise UsageError(f"{wrong} is not valid TOML: it is nested too deep.") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of more digits than Python reads
        raise UsageError(f"{wrong} is not valid TOML: {error}.") from None
    return found


def _refuse_long_numbers(found: Any) -> None:
    """Raise ValueError for a whole number that is longer than any setting."""
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise ValueError(f"a whole number has more than {MOST_BITS} bits")


def _locate(config: Path | str) -> tuple[str, Traversable]:
    known = shipped()
    if str(config) in known:
        return f"file {config}.toml (shipped)", known[str(config)]
    path = Path(config)
    if str(config) and path.exists():
        return f"file {path}", path
    raise UsageError.of("--config", config, f"the path of a TOML file, or a shipped one: {', '.join(known)}", known)
