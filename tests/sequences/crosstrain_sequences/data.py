"""Sequences of one to thirty tokens; a tag depends on its token and the one before it.

Tokens begin after the reserved ones.
"""

import numpy as np

from crosstrain.data.base import PreparedColumns, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.text import UNKNOWN

VOCABULARY, TAGS = 20, 4
FIRST = UNKNOWN + 1
SIZES = {"train": 300, "test": 100}


class Tagged:
    name = "tagged"
    description = "random tokens, each with a tag"
    version = 2

    def load(self, data_dir):
        columns = ColumnSpec("tokens", "uint16", (None,)), ColumnSpec("tags", "uint8", (None,))
        features = TextFeatures({"tokens": VOCABULARY, "tags": TAGS})
        return PreparedColumns(columns, features, {split: lambda split=split: self.blocks(split) for split in SIZES})

    def blocks(self, split):
        draw = np.random.Generator(np.random.Philox(list(SIZES).index(split)))
        table = np.random.Generator(np.random.Philox(9)).integers(0, 1000, (2, VOCABULARY, TAGS))
        for start in range(0, SIZES[split], 64):
            lengths = draw.integers(1, 31, min(64, SIZES[split] - start))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            tokens = draw.integers(FIRST, VOCABULARY, offsets[-1]).astype(np.uint16)
            before = np.concatenate([[0], tokens[:-1]])
            before[offsets[:-1]] = 0
            tags = (table[0, tokens] + table[1, before]).argmax(1).astype(np.uint8)
            yield {"tokens": Column(tokens, offsets), "tags": Column(tags, offsets)}


DATASET = Tagged()
