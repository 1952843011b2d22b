"""Text for the translation rows, made up here: pairs whose lengths are spread like those of a real corpus, the same on every machine.

A language is made of words of one to four syllables, and word k of one language is word k of the other. Words follow Zipf's law. How many
words a sentence has is log-normal, as in real corpora, nearly; its translation has about as many, give or take a tenth.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["TEXT", "make_text", "pairs"]

VERSION = 1
PAIRS = 16_000
SEED = 7
WORDS = 12_000
MEAN_WORDS, SPREAD, MOST_WORDS = 17.0, 0.6, 70
"""With BPE of 8,000 pieces this gives about 25 pieces a sentence, and a hundred in the longest."""

CONSONANTS = {
    "en": ("t", "n", "s", "r", "h", "l", "d", "c", "m", "f", "p", "g"),
    "de": ("n", "s", "r", "t", "d", "h", "l", "g", "m", "b", "w", "z"),
}
VOWELS = {"en": ("e", "a", "o", "i", "u", "ea"), "de": ("e", "i", "a", "u", "ei", "o")}


def _prefix() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "crosstrain-benchmarks" / f"sentences-{VERSION}"


def _data() -> str:
    return f"parallel-text:{_prefix()}:en-de?vocabulary=8000,held-out=16"


TEXT = _data()
"""The dataset's name; its files are made by `make_text`. Few sentences are held out: each of them is translated after every run."""


def make_text() -> None:
    """Write the files where they are missing; a run that is interrupted leaves none."""
    prefix = _prefix()
    files = {language: prefix.with_name(f"{prefix.name}.{language}") for language in ("en", "de")}
    if all(path.exists() for path in files.values()):
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    found = list(pairs(PAIRS))
    for position, path in enumerate(files.values()):
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text("".join(f"{pair[position]}\n" for pair in found), encoding="utf-8")
        partial.replace(path)


def pairs(count: int) -> Iterator[tuple[str, str]]:
    """Yield sentences and their translations."""
    random = np.random.Generator(np.random.Philox(SEED))
    english, german = (_words(random, language) for language in ("en", "de"))
    shares = 1.0 / np.arange(3, WORDS + 3)
    shares /= shares.sum()
    lengths = np.clip(random.lognormal(np.log(MEAN_WORDS) - SPREAD**2 / 2, SPREAD, count).round(), 1, MOST_WORDS).astype(int)
    for length in lengths:
        words = random.choice(WORDS, length, p=shares)
        change = round(random.normal(0.0, length / 10))
        translated = words[: max(1, length + change)] if change < 0 else np.concatenate([words, random.choice(WORDS, change, p=shares)])
        yield _sentence(english, words), _sentence(german, translated)


def _sentence(language: list[str], words: NDArray[np.int64]) -> str:
    return " ".join(language[word] for word in words).capitalize() + "."


def _words(random: np.random.Generator, language: str) -> list[str]:
    """Return as many different words as there are, the frequent ones short."""
    found: dict[str, None] = {}
    while len(found) < WORDS:
        syllables = 1 + min(3, int(random.geometric(1.0 / (1.0 + len(found) / 3000)) - 1))
        parts = [
            random.choice(CONSONANTS[language]) + random.choice(VOWELS[language]) + random.choice(("", "n", "r", "st"))
            for _ in range(syllables)
        ]
        found["".join(parts)] = None
    return list(found)
