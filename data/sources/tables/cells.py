"""What the cells of a column are: numbers or categories."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

Cells = Sequence[str] | NDArray[np.float64]  # texts, "" where there is none; or numbers, NaN where there is none
Kind = Literal["numbers", "categories"]
Unread = Literal["dates", "numbers with commas"]
EMPTY = frozenset({""})
MISSING = frozenset({"", "NA", "N/A", "na", "n/a", "NaN", "nan", "NAN", "null", "NULL", "None", "?"})
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d*)?([eE][+-]?\d+)?", re.ASCII)
MAX_TEXT = 200  # characters of a category
_COMMAS = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?|[+-]?\d{1,3}(,\d{3})+(\.\d*)?", re.ASCII)
_DAY = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})"
_DATE = re.compile(rf"({_DAY})([T ].*)?|\d{{1,2}}:\d{{2}}(:\d{{2}})?.*", re.ASCII)


@dataclass(frozen=True)
class Notation:
    """How cells are written: which texts are empty cells, and whether decimals follow a comma."""

    missing: frozenset[str] = MISSING
    comma: bool = False

    def number_of(self, text: str) -> float | None:
        """Return the number that a text without blanks is, if it is one."""
        if self.comma and _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(".", "").replace(",", ".")
        return float(text) if _NUMBER.fullmatch(text) else None


class CellError(Exception):
    """A cell, by its number in a block, that is not what its column is."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number = number


def kind_of(cells: Cells, notation: Notation) -> Kind | Unread:
    """Return what most of a column's cells are."""
    if isinstance(cells, np.ndarray):
        return "numbers"
    with suppress(CellError):
        numbers_of(cells, notation)  # no date is a number
        return "numbers"
    texts = [text for cell in cells if (text := cell.strip()) not in notation.missing]
    if 2 * sum(_DATE.fullmatch(text) is not None for text in texts) > len(texts):
        return "dates"
    if 2 * sum(notation.number_of(text) is not None for text in texts) >= len(texts):
        return "numbers"
    return "numbers with commas" if 2 * sum(_COMMAS.fullmatch(text) is not None for text in texts) > len(texts) else "categories"


def numbers_of(cells: Cells, notation: Notation) -> NDArray[np.float64]:
    """Return numbers, NaN for missing ones. Raises CellError."""
    numbers = cells if isinstance(cells, np.ndarray) else _numbers_of_texts(cells, notation)
    if (beyond := np.abs(numbers) > np.finfo(np.float32).max).any():
        number = int(beyond.argmax())
        raise CellError(number, f"{str(cells[number])!r} is beyond the numbers of float32")
    return numbers


def _numbers_of_texts(cells: Sequence[str], notation: Notation) -> NDArray[np.float64]:
    text = "" if notation.comma else "".join(cells)
    if text and "_" not in text and text.isascii():  # float() accepts both among digits
        with suppress(ValueError):
            return np.fromiter(map(float, cells), np.float64, len(cells))
    return np.array([_number_of(number, cell, notation) for number, cell in enumerate(cells)])


def _number_of(number: int, cell: str, notation: Notation) -> float:
    text = cell.strip()
    if text in notation.missing:
        return math.nan
    if (value := notation.number_of(text)) is None:
        raise CellError(number, f"{text[:40]!r} is no number")
    return value


class Categories:
    """The categories of a column, with a code for each in order of appearance."""

    def __init__(self, missing: frozenset[str] = MISSING) -> None:
        self._missing = missing
        self.codes: dict[str, int] = {}
        self._hashes: list[int] = []

    def take(self, cells: Sequence[str], most: int) -> NDArray[np.int32]:
        """Return codes, −1 for missing cells.

        Raises CellError for more than `most` categories, or one that is too long.
        """
        codes, result = self.codes, np.empty(len(cells), np.int32)
        for number, cell in enumerate(cells):
            code = codes.get(cell)
            result[number] = self._new(number, cell, most) if code is None else code
        return result

    def _new(self, number: int, cell: str, most: int) -> int:
        text = cell.strip()
        if text in self._missing:
            code = -1
        elif text in self.codes:
            code = self.codes[text]
        elif len(text) > MAX_TEXT:
            raise CellError(number, f"a text of {len(text):,} characters is no category")
        elif len(self._hashes) == most:
            raise CellError(number, f"{text[:40]!r} is category {most + 1:,}")
        else:
            code = len(self._hashes)
            self._hashes.append(xxhash.xxh64_intdigest(text.encode()))
            self.codes[text] = code
        if (cell != text or code < 0) and len(self.codes) < 4 * most:
            self.codes[cell] = code
        return code

    @property
    def names(self) -> list[str]:
        """The categories by code."""
        names = [""] * len(self._hashes)
        for text, code in self.codes.items():
            if code >= 0 and text == text.strip():
                names[code] = text
        return names

    def hashes(self, codes: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return a number for each code, which depends on the category's text alone."""
        return np.array([0, *self._hashes], np.uint64)[codes + 1]


def mixed(parts: Sequence[NDArray[np.uint64]]) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each row, by a hash of its parts.

    The hash is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    state = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        state = (state ^ part) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53
