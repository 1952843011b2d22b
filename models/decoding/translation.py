"""Translates sentences of a dataset and compares them with what it has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...data.base import Dataset, Split
from ...data.sources.translation.scoring_files import SCORING_FILES, TEST_REFERENCES, reference_lines, wrong_scoring_files
from ...data.sources.translation.tokenizer import VOCABULARY, Vocabulary
from .batches import decode
from .quality import TranslationQuality, checked_sums
from .search import Stepper
from .settings import Decoding

__all__ = ["VOCABULARY", "Scored", "TranslationScorer", "refuse_unscorable"]


def refuse_unscorable(data: Dataset, quality: TranslationQuality) -> None:
    """Raise UsageError for a dataset whose translations cannot be scored: its attachments are missing, or fit not its columns."""
    sizes = data.info.text.vocabulary_sizes
    columns = {name: sizes[name] for name in (quality.source, quality.target) if name in sizes}
    files = {name: data.attachment(name) for name in SCORING_FILES if name in data.attachments}
    if (wrong := wrong_scoring_files(files, columns, data.info.sizes["test"])) is not None:
        raise UsageError(
            f"data: translations of {data.info.name!r} cannot be scored: {wrong}. Its source has to be mended, and made again."
        )


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
            self._test_references = reference_lines(self._data.attachment(TEST_REFERENCES))
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
        sums = checked_sums(self._quality, texts, self.references(split, start, stop))
        return Scored(sums, sum(not best for best in found))
