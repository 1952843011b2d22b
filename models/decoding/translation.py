"""Translates sentences of a dataset and compares them with what it has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...data.base import Dataset, Split
from ...data.sources.translation.tokenizer import Vocabulary
from ...metrics.language import sentence_sums
from .batches import decode
from .quality import TranslationQuality
from .search import Stepper
from .settings import Decoding

__all__ = ["VOCABULARY", "Scored", "TranslationScorer"]

VOCABULARY = "vocabulary.model"
"""The attachment of a dataset of text that has its pieces."""

TEST_REFERENCES = "test.target.txt"
"""The attachment that has the test split's references as they were written; those of another split are made of its pieces."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What translations add to each of the quality's sums, and of how many sentences the model's output was not finite."""

    sums: Mapping[str, float]
    without_numbers: int


class TranslationScorer:
    """Scores translations of one dataset. Vocabulary and references are read when they are first needed."""

    def __init__(self, data: Dataset, quality: TranslationQuality) -> None:
        self._data, self._quality = data, quality
        self._vocabulary: Vocabulary | None = None
        self._test_references: list[str] | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The pieces. Raises UsageError where the dataset has none, or sentencepiece is not installed."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._data.attachment(VOCABULARY))
        return self._vocabulary

    def references(self, split: Split, start: int, stop: int) -> list[str]:
        """Return what the sentences start … stop − 1 should be translated into. Raises RuntimeError where there are not as many lines."""
        if split != "test":
            column = self._data.column(split, self._quality.target)
            return [self.vocabulary.decode(column.example(number).tolist()) for number in range(start, stop)]
        if self._test_references is None:
            self._test_references = self._data.attachment(TEST_REFERENCES).decode().removesuffix("\n").split("\n")
            if len(self._test_references) != self._data.info.sizes["test"]:
                raise RuntimeError(
                    f"{TEST_REFERENCES} of {self._data.info.name!r} has {len(self._test_references)} lines, and the test split"
                    f" {self._data.info.sizes['test']} examples"
                )
        return self._test_references[start:stop]

    def sources(self, split: Split, start: int, stop: int) -> list[NDArray[np.int64]]:
        """Return the pieces of the sentences start … stop − 1, each ending with END."""
        column = self._data.column(split, self._quality.source)
        return [column.example(number).astype(np.int64) for number in range(start, stop)]

    def scored(self, stepper: Stepper, split: Split, start: int, stop: int, decoding: Decoding) -> Scored:
        """Translate the sentences start … stop − 1. One without a hypothesis counts as an empty translation."""
        found = decode(stepper, self.sources(split, start, stop), decoding)
        texts = [self.vocabulary.decode(best[0].pieces) if best else "" for best in found]
        sums = sentence_sums(texts, self.references(split, start, stop), self._quality.tokenizer)
        return Scored(dict(zip(self._quality.sums, sums.tolist(), strict=True)), sum(not best for best in found))
