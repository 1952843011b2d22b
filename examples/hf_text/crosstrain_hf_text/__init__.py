"""Texts with classes: ``train.tsv`` and ``test.tsv``, with a class, a tab and a text a line."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from crosstrain.core.errors import UsageError
from crosstrain.data.base import PreparedColumns, Split, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.text import UNKNOWN

VOCABULARY, LONGEST = 8_000, 256  # words; words of a text
SPLITS: tuple[Split, ...] = ("train", "test")


class LabelledText:
    """Numbers the words of the training texts, the most frequent first."""

    name = "labelled-text"
    description = "texts with classes: train.tsv and test.tsv in --data-dir"
    version = 1

    def originals(self, data_dir: Path) -> list[Path]:
        """Return the files that are read."""
        return [data_dir / f"{split}.tsv" for split in SPLITS]

    def load(self, data_dir: Path | None) -> PreparedColumns:
        """Return words as tokens, and classes in alphabetical order. Raises UsageError."""
        if data_dir is None:
            raise UsageError("data_dir: 'labelled-text' needs a folder with train.tsv and test.tsv.")
        texts = {split: read_lines(data_dir / f"{split}.tsv") for split in SPLITS}
        classes = sorted({label for label, _ in texts["train"]})
        counts = Counter(word for _, words in texts["train"] for word in words)
        common = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - UNKNOWN - 1]
        numbers = {word: number for number, word in enumerate(common, UNKNOWN + 1)}
        if strange := {label for label, _ in texts["test"]} - set(classes):
            raise UsageError(f"data_dir: test.tsv has the class {min(strange)!r}, and train.tsv has not.")

        def block(split: Split) -> Iterator[Mapping[str, Column]]:
            tokens = [[numbers.get(word, UNKNOWN) for word in words] for _, words in texts[split]]
            offsets = np.cumsum([0, *map(len, tokens)]).astype(np.int64)
            labels = np.array([classes.index(label) for label, _ in texts[split]])
            yield {"tokens": Column(np.concatenate(tokens).astype(np.uint16), offsets), "label": Column(labels)}

        columns = ColumnSpec("tokens", "uint16", (None,)), ColumnSpec("label", "int64")
        features = TextFeatures({"tokens": VOCABULARY}, target="label", classes=len(classes), class_names=tuple(classes))
        return PreparedColumns(columns, features, {split: partial(block, split) for split in SPLITS})


def read_lines(path: Path) -> list[tuple[str, list[str]]]:
    """Return the class and the words of each line."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        label, tab, text = line.partition("\t")
        words = text.lower().split()[:LONGEST]
        if not (label and tab and words):
            raise UsageError(f"data_dir: line {number} of {str(path)!r} is no class, tab and text.")
        pairs.append((label, words))
    return pairs


DATASET = LabelledText()
