"""Datasets of pairs (x, y), which any code may have made, as arrays in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.errors import raised
from ..disk import require_disk

COPIES = 2  # the files, and what is prepared from them
DRAWN_ONCE = "data: an example of the Dataset differs each time; every example was drawn once, and stays as it is"


def is_dataset(part: Any) -> bool:
    """Return whether an object is a map-style Dataset, and no array or list."""
    is_array = isinstance(part, np.ndarray | tuple | list | dict) or hasattr(part, "dtype")
    return not is_array and hasattr(part, "__getitem__") and hasattr(part, "__len__")


def write_pairs(name: str, dataset: Any, paths: Sequence[Path]) -> bool:
    """Write all x and y into two ``.npy`` files; return whether an example differs each time.

    Raises ValueError for what are no pairs of numbers of one shape and type, TrainerError for too little disk.
    """
    count = len(dataset)
    if not count:
        raise ValueError(f"{name} is empty")
    first = _pair(name, 0, dataset)
    require_disk(Path(name.strip("'")), paths[0].parent, COPIES * count * sum(part.nbytes for part in first))
    files = [
        np.lib.format.open_memmap(path, mode="w+", dtype=part.dtype, shape=(count, *part.shape))
        for path, part in zip(paths, first, strict=True)
    ]
    for number in range(count):
        for file, part, wanted in zip(files, _pair(name, number, dataset), first, strict=True):
            if part.shape != wanted.shape:
                raise ValueError(f"example {number:,} of {name} has the shape {list(part.shape)}, and the first one {list(wanted.shape)}")
            if not np.can_cast(part.dtype, wanted.dtype):
                raise ValueError(f"example {number:,} of {name} is of {part.dtype}, and the first one of {wanted.dtype}")
            file[number] = part
    again = _pair(name, 0, dataset)
    for file in files:
        file.flush()
    return any(not np.array_equal(part, before) for part, before in zip(again, first, strict=True))


def as_array(part: Any) -> NDArray[Any]:
    """Return an array, number or tensor as an array."""
    array: NDArray[Any] = np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)
    return array


def _pair(name: str, number: int, dataset: Any) -> list[NDArray[Any]]:
    try:
        example = dataset[number]
    except Exception as error:  # whatever a user's code raises
        raise ValueError(f"example {number:,} of {name} cannot be read: {raised(error)}") from error
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise ValueError(f"example {number:,} of {name} is no pair (x, y)")
    arrays = [as_array(part) for part in example]
    if any(array.dtype.kind not in "biuf" for array in arrays):
        raise ValueError(f"example {number:,} of {name} is of {' and '.join(str(array.dtype) for array in arrays)}, not of numbers")
    return arrays
