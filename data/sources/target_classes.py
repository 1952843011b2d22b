"""Classes of a target's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...core.console import one_line
from ...core.errors import UsageError
from ..base import Split

Task = Literal["auto", "classes", "regression"]
MAX_CLASSES = 100_000
MAX_CLASSES_OF_NUMBERS = 100  # more whole numbers than these are predicted as numbers, unless a task says otherwise


def wrong(path: Path, text: str, place: str = "") -> UsageError:
    """Return the error of a file, at a place such as ``line 3``."""
    return UsageError(f"data: {one_line(str(path))!r}{', ' + place if place else ''}: {text}")


def joined(names: Sequence[str], most: int = 10) -> str:
    """Return names for a sentence."""
    shown = ", ".join(repr(one_line(name)) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def predicts_numbers(task: Task, values: int, *, whole: bool) -> bool:
    """Return whether a target of so many values, of numbers, is for regression."""
    return task == "regression" or (task == "auto" and not (whole and values <= MAX_CLASSES_OF_NUMBERS))


def classes_of(
    path: Path, target: str, seen: Mapping[Split, set[Any]], text_of: Callable[[Any], str], *, sorted_by_text: bool
) -> tuple[NDArray[Any], list[str]]:
    """Return a target's values in the order of the classes, and the classes' names.

    `seen`: the values of each split. Raises UsageError for classes that training never sees, for too many, and for a single one.
    """
    values = sorted(seen["train"] | seen["test"])
    if len(values) > MAX_CLASSES:
        raise wrong(path, f"the target {target!r} has more than {MAX_CLASSES:,} classes.")
    label = {value: text_of(value) for value in values}
    if unseen := sorted(label[value] for value in seen["test"] - seen["train"]):
        raise wrong(path, f"the test split has classes that training never sees: {joined(unseen)}.")
    if len(values) < 2:
        raise wrong(path, f"the target {target!r} has one class only{f', {label[values[0]]!r}' if values else ''}.")
    ordered = sorted(values, key=label.__getitem__) if sorted_by_text else values
    return np.array(ordered), [label[value] for value in ordered]


def labels_of(values: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of each value's class."""
    order = np.argsort(classes, kind="stable")
    return order[np.searchsorted(classes[order], values)].astype(np.int64)


def task_note(target: str, classes: int) -> str:
    """Return how a target of numbers was understood."""
    task = f"{classes:,} classes; task=regression predicts numbers" if classes else "a number; task=classes predicts classes"
    return f"the target {one_line(target)} is taken for {task}"
