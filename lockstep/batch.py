"""The columns of a batch in numpy, as forward functions read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.base import IMAGE
from ..data.columns import LENGTHS
from ..data.features import read_column
from ..data.preprocessing import apply_changes, normal_table
from ..data.sampler import Batches
from ..data.store.stored_dataset import StoredDataset

Arrays = dict[str, NDArray[Any]]


def batch_columns(data: StoredDataset, names: Sequence[str], batches: Batches) -> Arrays:
    """Return columns of a batch as forward functions read them, images normalised."""
    columns: Arrays = {}
    for name in names:
        examples = read_column(data, "train", name).take(batches.indices)
        if examples.offsets is not None:
            columns |= {name: examples.padded(), f"{name}{LENGTHS}": examples.lengths}
        elif name == IMAGE:
            images = examples.values if batches.changes is None else apply_changes(examples.values.astype(np.uint8), batches.changes)
            table = normal_table(data.info.mean, data.info.std)
            columns[name] = np.stack([row[images[:, channel]] for channel, row in enumerate(table)], axis=1)
        else:
            columns[name] = examples.values.astype(np.float32) if examples.values.dtype.kind == "f" else examples.values
    return columns
