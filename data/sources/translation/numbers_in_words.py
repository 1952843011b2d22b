"""numbers: English and German words for numbers, ordinals, years and dates.

A translation that can be learnt in minutes. The words come from num2words; dates are put together here, since it has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....core.errors import UsageError
from ...base import PreparedColumns
from ..arguments import read_arguments, whole_number, write_arguments
from .pairs import PairSplits, prepared_pairs
from .text_files import text_package
from .tokenizer import MAX_VOCABULARY, MIN_VOCABULARY

_NAME = "numbers"
_DEFAULTS = {"vocabulary": "500"}
_TRAIN, _TEST = 40_000, 2_000
_CARDINALS, _ORDINALS, _DATES = 25_000, 8_000, 10_000
_MAX_SIZE = 1_000_000
_YEARS = range(1100, 2100)
_MAX_LENGTH = 100
_MONTHS = (
    ("January", "Januar", 31), ("February", "Februar", 28), ("March", "März", 31), ("April", "April", 30), ("May", "Mai", 31),
    ("June", "Juni", 30), ("July", "Juli", 31), ("August", "August", 31), ("September", "September", 30), ("October", "Oktober", 31),
    ("November", "November", 30), ("December", "Dezember", 31),
)  # fmt: skip
"""In English and German, with the number of days in every year."""


@dataclass(frozen=True)
class _Numbers:
    """_Numbers in words, with a vocabulary of this size."""

    vocabulary: int = 500

    description = "numbers, ordinals, years and dates in words, English to German: numbers or numbers:vocabulary=500"
    version = 1

    @property
    def name(self) -> str:
        arguments = write_arguments({"vocabulary": str(self.vocabulary)}, _DEFAULTS)
        return f"{_NAME}:{arguments}" if arguments else _NAME

    def with_arguments(self, text: str) -> _Numbers:
        values = read_arguments(_NAME, text, _DEFAULTS)
        return _Numbers(whole_number(_NAME, "vocabulary", values["vocabulary"], MIN_VOCABULARY, MAX_VOCABULARY))

    def with_vocabulary(self, size: int) -> _Numbers:
        return self.with_arguments(f"vocabulary={size}")

    def originals(self, data_dir: Path) -> Sequence[Path]:
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but {_NAME!r} are made up and read no files. Leave --data-dir out.")

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedColumns:
        """Generate all pairs, and split them into train and test, which share no text."""
        train, test = split_apart(number_pairs())
        return prepared_pairs(
            PairSplits.from_lists(train, test),
            vocabulary_size=self.vocabulary,
            bytes_too=False,
            longest=_MAX_LENGTH,
            languages=("en", "de"),
            work=work,
            packages=("num2words",),
            bleu_tokenizer="char",  # most are one word, and 13a needs four
        )


def number_pairs() -> list[tuple[str, str]]:
    """Return pairs of English and German text, each English text once, in a fixed random order."""
    words = text_package("num2words").num2words
    german_by_english: dict[str, str] = {}
    for kind, numbers in (("cardinal", _draw_numbers(_CARDINALS, 1)), ("ordinal", _draw_numbers(_ORDINALS, 2)), ("year", list(_YEARS))):
        for number in numbers:
            english, german = (words(number, lang=language, to=kind) for language in ("en", "de"))
            german_by_english.setdefault(english, german)
    for english, german in _dates(words):
        german_by_english.setdefault(english, german)
    pairs = list(german_by_english.items())
    return [pairs[place] for place in np.argsort(_draw_bits(len(pairs), 3), kind="stable").tolist()]


def split_apart(pairs: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (train, test): test has the first pairs, and train those without a text of it."""
    test = list(pairs[:_TEST])
    sources, targets = ({pair[side] for pair in test} for side in (0, 1))
    train = [pair for pair in pairs[_TEST:] if pair[0] not in sources and pair[1] not in targets]
    return train[:_TRAIN], test


def _draw_bits(count: int, stream: int) -> Any:
    return np.random.Philox(np.random.SeedSequence([20, stream])).random_raw(count)


def _draw_numbers(count: int, stream: int) -> list[int]:
    """Return all numbers below 1000, then different ones up to the largest.

    Most of these have few digits.
    """
    numbers = dict.fromkeys(range(1000))
    exponents, places = _draw_bits(8 * count, stream), iter(_draw_bits(8 * count, stream + 10).tolist())
    for exponent in (exponents % np.uint64(4)).tolist():
        if len(numbers) >= count:
            break
        top = min(_MAX_SIZE, 10 ** (3 + exponent))
        numbers.setdefault(next(places) % (top + 1))
    return list(numbers)


def _dates(words: Any) -> Iterator[tuple[str, str]]:
    days = [(words(day, lang="en", to="ordinal"), words(day, lang="de", to="ordinal")) for day in range(32)]
    years = [(words(year, lang="en", to="year"), words(year, lang="de", to="year")) for year in _YEARS]
    for number in _draw_bits(_DATES, 4).tolist():
        year, rest = years[number % len(years)], number // len(years)
        english, german, length = _MONTHS[rest % 12]
        day = days[1 + rest // 12 % length]
        yield f"the {day[0]} of {english}, {year[0]}", f"der {day[1]} {german} {year[1]}"


DATASET = _Numbers()
