"""Custom datasets of columns: tables with a target of each kind, and texts with classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from crosstrain.data.base import PreparedColumns, TableFeatures, TextFeatures
from crosstrain.data.columns import Column, ColumnSpec
from crosstrain.data.features import column_statistics

SIZES = {"train": 400, "test": 100}
VOCABULARY, KEY = 30, 4  # the tokens from KEY on show a phrase's class
NUMBER, LABEL = "float32", "int64"


def uniform(draw, *shape):
    """Multiples of 2⁻¹² in −1…1, exact in float32."""
    return (draw.integers(-4096, 4097, shape) / 4096).astype(np.float32)


def rings(draw, size):
    x, y = uniform(draw, size), uniform(draw, size)
    squares = x * x + y * y
    return {"x": 5 + 3 * x, "y": 100 * y, "ring": ((squares > 0.25).astype(np.int64) + (squares > 0.75))}


def houses(draw, size):
    area, place = 100 + 50 * uniform(draw, size), uniform(draw, size, 3)
    return {"area": area, "place": place, "price": area / 64 + place[:, 0] * place[:, 1]}


def topics(draw, size):
    signs = uniform(draw, size, 6)
    return {"signs": signs, "topics": (signs[:, :4] + signs[:, 2:] > 0.25).astype(np.uint8)}


def phrases(draw, size):
    lengths = draw.integers(1, 13, size)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mood = draw.integers(0, 3, size)
    tokens = draw.integers(KEY + 3, VOCABULARY, offsets[-1])
    tokens[offsets[:-1] + draw.integers(0, lengths)] = KEY + mood
    return {"tokens": Column(tokens.astype(np.uint16), offsets), "mood": mood}


@dataclass(frozen=True)
class Made:
    name: str
    description: str
    columns: tuple[ColumnSpec, ...]
    make: Any
    target: dict[str, Any]
    version: int = 1

    def load(self, data_dir):
        splits = {split: self.examples(number, size) for number, (split, size) in enumerate(SIZES.items())}
        vocabularies = {spec.name: VOCABULARY for spec in self.columns if spec.varies}
        if vocabularies:
            features = TextFeatures(vocabularies, **self.target)
        else:
            inputs = [spec.name for spec in self.columns if spec.name != self.target["target"]]
            statistics = {name: column_statistics(splits["train"][name].values) for name in inputs}
            mean, std = ({name: values[part] for name, values in statistics.items()} for part in (0, 1))
            features = TableFeatures(mean=mean, std=std, **self.target)
        return PreparedColumns(self.columns, features, {split: lambda split=split: iter([splits[split]]) for split in splits})

    def examples(self, number, size):
        made = self.make(np.random.Generator(np.random.Philox(number)), size)
        return {name: values if isinstance(values, Column) else Column(values) for name, values in made.items()}


def specs(**columns):
    return tuple(ColumnSpec(name, dtype, tuple(shape)) for name, (dtype, *shape) in columns.items())


LETTERS = ("a", "b", "c")
RINGS_COLUMNS = specs(x=(NUMBER,), y=(NUMBER,), ring=(LABEL,))
RINGS = Made("rings", "points in rings", RINGS_COLUMNS, rings, {"target": "ring", "classes": 3, "class_names": LETTERS})
HOUSES = Made("houses", "prices of houses", specs(area=(NUMBER,), place=(NUMBER, 3), price=(NUMBER,)), houses, {"target": "price"})
TOPICS = Made("topics", "four topics", specs(signs=(NUMBER, 6), topics=("uint8", 4)), topics, {"target": "topics"})
PHRASES = Made("phrases", "tokens of a mood", specs(tokens=("uint16", None), mood=(LABEL,)), phrases, {"target": "mood", "classes": 3})
