"""Generated parallel text for the translation rows, equal on every machine.

Nothing is downloaded, and only word frequencies can be learnt: throughput is measured. Text is realistic in what affects that: lengths are
log-normal, source and target differ in length, and few words are frequent and most are rare (Zipf's law).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosstrain.data.store.location import cache_root

PAIRS = {"": 20_000, ".test": 8}
"""Behind the files' prefix, and how many. The test split is short: every run ends with its translation, which the clock does not see."""

WORDS = 12_000
"""Words of each language. The frequent ones become one piece of the vocabulary, the others two or three."""

MEDIAN_WORDS, SPREAD, MAX_WORDS = 17.0, 0.6, 70
"""Words of a source sentence; SPREAD is the standard deviation of the logarithms. In pieces: mean about 25, maximum about 100."""

TARGET_SPREAD = 0.15
"""Standard deviation of how many times as long as its source a target is, around 1."""

SEED = 20_171

CONSONANTS, VOWELS = tuple("bdfghklmnprstvwz"), tuple("aeiou")

PREFIX = cache_root().parent / "benchmarks" / "generated-text"

DATA = f"parallel-text:{PREFIX}:en-de?vocabulary=8000"


def write_text() -> None:
    """Write the files that are not there yet, each of them whole or not at all."""
    PREFIX.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = {language: _words(number) for number, language in enumerate(("en", "de"))}
    for number, (split, count) in enumerate(PAIRS.items()):
        paths = {language: Path(f"{PREFIX}{split}.{language}") for language in vocabulary}
        if all(path.exists() for path in paths.values()):
            continue
        for (language, path), ranks in zip(paths.items(), _sentences(count, number), strict=True):
            text = "".join(" ".join(vocabulary[language][rank] for rank in sentence) + "\n" for sentence in ranks)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)


def _words(language: int) -> list[str]:
    """Return different words of two to four syllables, the most frequent first."""
    random = np.random.Generator(np.random.Philox([SEED, 1, language]))
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < WORDS:
        drawn = random.integers(len(CONSONANTS) * len(VOWELS), size=random.integers(2, 5)).tolist()
        syllables = [CONSONANTS[number // len(VOWELS)] + VOWELS[number % len(VOWELS)] for number in drawn]
        vocabulary["".join(syllables) + ("" if language else "n")] = None
    return list(vocabulary)


def _sentences(count: int, split: int) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return the words of sources and targets, by rank.

    A target has its source's words, a few omitted or repeated.
    """
    random = np.random.Generator(np.random.Philox([SEED, 2, split]))
    shares = 1.0 / np.arange(1, WORDS + 1)
    lengths = np.clip(np.round(MEDIAN_WORDS * np.exp(SPREAD * random.standard_normal(count))), 1, MAX_WORDS).astype(int)
    sources = [random.choice(WORDS, length, p=shares / shares.sum()) for length in lengths]
    ratios = np.exp(TARGET_SPREAD * random.standard_normal(count))
    sizes = np.clip(np.round(lengths * ratios), 1, MAX_WORDS).astype(int)
    return sources, [source[np.arange(size) * length // size] for source, size, length in zip(sources, sizes, lengths, strict=True)]
