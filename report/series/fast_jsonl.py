"""Reads JSON lines by the hundred thousand: pieces of many lines are decoded at once, and only the fields that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ...core.untrusted.bounded_json import MOST_LINE_BYTES, UnreadableError, open_regular
from ...records.store.jsonl import DamagedRunError

__all__ = ["read_pieces"]

_PIECE_BYTES = 4 << 20

L = TypeVar("L", bound=msgspec.Struct)


def read_pieces(path: Path, kind: type[L], name: str, check: Callable[[L], None] = lambda _: None) -> Iterator[list[L]]:
    """Yield the lines of a file as `kind`, a piece of the file at a time; nothing where there is no such file.

    A torn last line is skipped. Raises DamagedRunError, naming the file and the line, where anything else is not a `name` (a record's
    type); `check` raises ValueError for a line whose fields contradict one another.
    """
    decoder = msgspec.json.Decoder(kind)
    number, torn = 1, None
    for piece in _pieces(path):
        if torn is not None:
            raise _damage(path, torn)
        count = piece.count(b"\n") + (not piece.endswith(b"\n"))
        try:
            lines = decoder.decode_lines(piece)
            for line in lines:
                check(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            lines = []
        if len(lines) != count:
            lines, torn = _one_by_one(path, piece, number, name, decoder, check)
        yield lines
        number += count


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the file in pieces of whole lines; the last one may lack its end."""
    rest = b""
    try:
        with open_regular(path) as file:
            while read := file.read(_PIECE_BYTES):
                whole, newline, tail = read.rpartition(b"\n")
                if newline:
                    yield rest + whole + newline
                    rest = tail
                else:
                    rest += tail
                if len(rest) > MOST_LINE_BYTES:
                    raise UnreadableError(f"a line is longer than {MOST_LINE_BYTES >> 20} MiB, the most that is read of one")
    except FileNotFoundError:
        return
    except UnreadableError as error:
        raise DamagedRunError(f"{path}: {error}.") from error
    if rest:
        yield rest


def _one_by_one(
    path: Path, piece: bytes, number: int, name: str, decoder: msgspec.json.Decoder[L], check: Callable[[L], None]
) -> tuple[list[L], int | None]:
    """Return the lines of a piece, the first with this number, and the number of its last one where that is torn."""
    lines: list[L] = []
    torn: int | None = None
    for current, text in enumerate(piece.removesuffix(b"\n").split(b"\n"), number):
        if torn is not None:
            raise _damage(path, torn)
        try:
            line = decoder.decode(text)
            check(line)
        except msgspec.ValidationError as error:
            raise _unknown(path, current, name, error) from error
        except msgspec.DecodeError:
            torn = current
        except RecursionError:
            raise _unknown(path, current, name, UnreadableError("it is nested too deep")) from None
        except ValueError as error:
            raise _unknown(path, current, name, error) from error
        else:
            lines.append(line)
    return lines, torn


def _damage(path: Path, number: int) -> DamagedRunError:
    return DamagedRunError(
        f"{path}, line {number}: not a whole JSON record, and more lines follow it. The file was damaged after it was written."
    )


def _unknown(path: Path, number: int, name: str, error: Exception) -> DamagedRunError:
    return DamagedRunError(f"{path}, line {number}: not a {name} that this release reads ({error}).")
