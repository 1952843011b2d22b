"""Examples as numpy arrays, gathered, changed and normalised: what a backend computes on that takes arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...data.augment import Changes, apply_changes
from ...data.base import IMAGE, LABEL, Dataset, Split
from ...data.columns import LENGTHS, Column
from ...data.normalisation import normal_table

__all__ = ["ColumnArrays", "GatheredSplit"]

FLOAT_LIMIT_BYTES = 2**30
"""Images are kept normalised, as float32, up to this size; beyond it they stay as stored, and are normalised batch by batch."""

ColumnArrays: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]
"""What a forward function is given of its columns (models/base.py): one array of a fixed shape, or arrays by name."""

Indices: TypeAlias = NDArray[np.int32] | NDArray[np.int64]


class GatheredSplit:
    """One split: the columns that a model reads. Whole numbers are given as int64, others as float32."""

    def __init__(
        self, data: Dataset, split: Split, *, inputs: Sequence[str] = (IMAGE,), target: str = LABEL, changing: bool = False
    ) -> None:
        """Load the split. `changing`: images are taken with changes of their stored pixels. Raises UsageError for a missing column."""
        self._size = data.info.sizes[split]
        self._columns = {name: data.column(split, name) for name in (*inputs, target)}
        self._inputs, self._target = tuple(inputs), target
        self._images: NDArray[np.float32] | None = None
        if IMAGE in inputs:
            self._table = normal_table(data.info.mean, data.info.std)
            if not changing and 4 * self._size * math.prod(data.info.input_shape) <= FLOAT_LIMIT_BYTES:
                self._images = data.inputs(split)

    def __len__(self) -> int:
        return self._size

    def longest(self, start: int, stop: int) -> int:
        """Return how long the longest of the examples start … stop − 1 is, in any column whose length varies; 0 where none does."""
        bounds = [column.offsets[start : stop + 1] for column in self._columns.values() if column.offsets is not None]
        return max((int(np.diff(offsets).max(initial=0)) for offsets in bounds), default=0)

    def take(self, indices: Indices, changes: Changes | None = None) -> tuple[ColumnArrays, ColumnArrays]:
        """Return inputs and target of the examples at `indices`, copied. `changes` [n, 3], where there are any, are made on the images."""
        inputs: dict[str, NDArray[Any]] = {}
        for name in self._inputs:
            inputs |= {name: self._take_images(indices, changes)} if name == IMAGE else _given(name, self._columns[name], indices)
        return _alone(self._inputs, inputs), _alone((self._target,), _given(self._target, self._columns[self._target], indices))

    def _take_images(self, indices: Indices, changes: Changes | None) -> NDArray[np.float32]:
        if self._images is not None and changes is None:
            return self._images[indices]
        stored: NDArray[Any] = self._columns[IMAGE].values[indices]
        images = stored if changes is None else apply_changes(stored, changes)
        found = np.empty(images.shape, np.float32)
        for channel, table in enumerate(self._table):
            np.take(table, images[:, channel], out=found[:, channel], mode="clip")
        return found


def _given(name: str, column: Column, indices: Indices) -> dict[str, NDArray[Any]]:
    """Return the examples of a column by name, with their lengths where these vary."""
    examples = column.take(indices)
    if column.offsets is None:
        return {name: _numbers(examples.values)}
    return {name: _numbers(examples.padded()), f"{name}{LENGTHS}": examples.lengths}


def _numbers(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64, copy=False)


def _alone(names: Sequence[str], arrays: dict[str, NDArray[Any]]) -> ColumnArrays:
    """Return one column of a fixed shape as the array itself, all else by name."""
    return arrays[names[0]] if len(arrays) == 1 else arrays
