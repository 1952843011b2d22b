"""Sentence pairs: a target is its reversed source with each piece replaced by the next."""

import numpy as np

from crosstrain.data.base import PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.text import END

VOCABULARY = 24
FIRST = 4


class Pairs:
    version = 1

    def __init__(self, name, description, lengths):
        """Take for each split a function from a generator to the sources' lengths without end."""
        self.name, self.description, self._lengths = name, description, lengths

    def load(self, data_dir):
        columns = ColumnSpec("source", "uint16", (None,)), ColumnSpec("target", "uint16", (None,))
        features = TextFeatures({"source": VOCABULARY, "target": VOCABULARY})
        return PreparedColumns(columns, features, {split: lambda split=split: self.blocks(split) for split in self._lengths})

    def blocks(self, split):
        draw = np.random.Generator(np.random.Philox(list(self._lengths).index(split)))
        lengths = np.asarray(self._lengths[split](draw))
        sources = [draw.integers(FIRST, VOCABULARY, length) for length in lengths]
        targets = [FIRST + (source[::-1] - FIRST + 1) % (VOCABULARY - FIRST) for source in sources]
        yield {"source": column(sources), "target": column(targets)}


def column(examples):
    """Examples with their end behind them."""
    offsets = np.concatenate([[0], np.cumsum([len(example) + 1 for example in examples])]).astype(np.int64)
    return Column(np.concatenate([[*example, END] for example in examples]).astype(np.uint16), offsets)


REVERSED = Pairs(
    "reversed",
    "random sequences of one to ten pieces, and what they are backwards",
    {"train": lambda draw: draw.integers(1, 11, 1200), "test": lambda draw: draw.integers(1, 11, 120)},
)
UNEVEN = Pairs(
    "uneven",
    "three sequences, of which one is far longer than the others",
    {"train": lambda draw: [40, 1, 2], "test": lambda draw: [5, 30]},
)
