"""How much a dataset holds, for what a run says of its training set."""

from __future__ import annotations

from typing import Any

from .base import Dataset, Split

__all__ = ["split_amounts"]


def split_amounts(data: Dataset, split: Split) -> dict[str, Any]:
    """Return the `bytes` of a split's arrays, and how many `elements` each column of varying length has in all (tokens, of text).

    Nothing of the arrays is read: their shapes tell.
    """
    columns = {spec.name: data.column(split, spec.name) for spec in data.info.columns}
    size = sum(column.values.nbytes + (0 if column.offsets is None else column.offsets.nbytes) for column in columns.values())
    varying = {name: len(column.values) for name, column in columns.items() if column.offsets is not None}
    return {"bytes": int(size), "elements": varying}
