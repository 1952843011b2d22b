"""The target of arrays: classes, numbers, or marks of several classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...base import Split
from ...columns import ColumnSpec
from ..target_classes import Task, classes_of, labels_of, predicts_numbers, task_note, wrong

Array = NDArray[Any]
MAX_OUTPUTS = 1 << 16


class Target:
    """A target of arrays [n] or [n, k] by split.

    Raises UsageError for values that cannot be one.
    """

    def __init__(self, path: Path, name: str, task: str, values: Mapping[Split, Array]) -> None:
        self._path, self._name, self._task, self._notes = path, name, cast(Task, task), list[str]()
        self.names: list[str] = []
        train = values["train"]
        if train.ndim > 2 or (train.ndim == 2 and not 0 < train.shape[1] <= MAX_OUTPUTS):
            raise wrong(path, f"the target {name!r} has the shape {list(train.shape)}; it has to be [n] or [n, k].")
        for array in values.values():
            self._check_finite(array)
        if train.ndim == 2:
            self._stored = self._of_columns(values)
        else:
            self._stored = self._of_numbers(values)
        first = self._stored["train"]
        self.spec = ColumnSpec(name, first.dtype.name, first.shape[1:])

    def notes(self) -> list[str]:
        """Return what was decided on, in words."""
        return self._notes

    @property
    def classes(self) -> int:
        """The number of classes; 0 for other targets."""
        return len(self.names)

    def stored(self, split: Split, first: int, count: int) -> Array:
        """Return consecutive values as they are stored."""
        return self._stored[split][first : first + count]

    def _check_finite(self, values: Array) -> None:
        if values.dtype.kind == "f" and not (finite := np.isfinite(values).reshape(len(values), -1).all(1)).all():
            raise wrong(self._path, f"the target {self._name!r} has no finite number in example {int(finite.argmin()):,}, counted from 0.")

    def _of_columns(self, values: Mapping[Split, Array]) -> dict[Split, Array]:
        arrays = list(values.values())
        if arrays[0].dtype.kind in "US":
            raise wrong(self._path, f"the target {self._name!r} has texts in {arrays[0].shape[1]} columns; give one column.")
        marks = all(((array == 0) | (array == 1)).all() for array in arrays)
        one_hot = marks and arrays[0].shape[1] > 1 and all((array.sum(1) == 1).all() for array in arrays)
        if self._task == "classes" and not one_hot:
            raise wrong(self._path, f"the target {self._name!r} has several columns that are not one-hot; classes are numbers or text.")
        if one_hot and self._task != "regression":
            self._notes.append(f"the target {self._name} is one-hot and taken for {arrays[0].shape[1]:,} classes")
            return self._of_numbers({split: array.argmax(1) for split, array in values.items()})
        if marks and self._task == "auto":
            self._notes.append(f"the target {self._name} is taken for marks of {arrays[0].shape[1]:,} classes that may apply together")
            return {split: array.astype(np.uint8) for split, array in values.items()}
        return {split: array.astype(np.float32) for split, array in values.items()}

    def _of_numbers(self, values: Mapping[Split, Array]) -> dict[Split, Array]:
        texts = values["train"].dtype.kind in "US"
        seen: dict[Split, set[Any]] = {split: set(np.unique(array).tolist()) for split, array in values.items()}
        whole = not texts and all((array == np.round(array)).all() for array in values.values() if array.dtype.kind == "f")
        if texts and self._task == "regression":
            raise wrong(self._path, f"the target {self._name!r} holds texts, not numbers.")
        if not texts and predicts_numbers(self._task, len(seen["train"] | seen["test"]), whole=whole):
            self._notes += [task_note(self._name, 0)] if self._task == "auto" else []
            return {split: array.astype(np.float32) for split, array in values.items()}
        if not texts and not whole:
            raise wrong(self._path, f"the target {self._name!r} has fractions; classes are whole numbers or text.")
        ordered, self.names = classes_of(self._path, self._name, seen, _text, sorted_by_text=False)
        if not texts and self._task == "auto" and values["train"].dtype.kind == "f":
            self._notes.append(task_note(self._name, len(self.names)))
        return {split: labels_of(array, ordered) for split, array in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value if isinstance(value, str) else str(int(value))
