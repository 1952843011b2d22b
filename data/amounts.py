"""How much a dataset holds, and how its classes are spread, for what a run says of its data."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import LABEL, Dataset, Split

__all__ = ["commonest_class_fraction", "split_amounts"]


def split_amounts(data: Dataset, split: Split) -> dict[str, Any]:
    """Return the `bytes` of a split's arrays, and how many `elements` each column of varying length has in all (tokens, of text).

    Nothing of the arrays is read: their shapes tell.
    """
    columns = {spec.name: data.column(split, spec.name) for spec in data.info.columns}
    size = sum(column.values.nbytes + (0 if column.offsets is None else column.offsets.nbytes) for column in columns.values())
    varying = {name: len(column.values) for name, column in columns.items() if column.offsets is not None}
    return {"bytes": int(size), "elements": varying}


def commonest_class_fraction(data: Dataset, split: Split) -> float | None:
    """Return the fraction of a split's examples that are of its commonest class: the accuracy of always guessing that one.

    None for data without classes, or without examples in the split.
    """
    if not any(spec.name == LABEL for spec in data.info.columns) or not data.info.sizes[split]:
        return None
    labels = data.column(split, LABEL).values
    return float(np.unique(labels, return_counts=True)[1].max() / len(labels))
