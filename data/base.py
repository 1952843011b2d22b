"""What a dataset is: a source that prepares it once, and an opened store that every backend reads the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataInfo", "Dataset", "DatasetSource", "PreparedArrays", "Split"]

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The shape of a dataset: what a model has to know before it sees an example.

    `input_shape` is (channels, height, width). `mean` and `std` (a number a channel, of pixels scaled to 0…1) define the
    normalisation (pixel / 255 − mean) / std for every backend.
    """

    name: str
    input_shape: tuple[int, int, int]
    classes: int
    sizes: Mapping[Split, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool = False


@dataclass(frozen=True, slots=True)
class PreparedArrays:
    """What a source hands to the store: per split uint8 images [n, c, h, w] and int64 labels [n]."""

    images: Mapping[Split, NDArray[np.uint8]]
    labels: Mapping[Split, NDArray[np.int64]]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool = False


class DatasetSource(Protocol):
    """Where a dataset comes from; the plugin object of the group ``crosstrain.datasets``."""

    name: str
    description: str
    version: int
    """Raised when the prepared arrays would change; a store of another version is made again."""

    def load(self, data_dir: Path | None) -> PreparedArrays:
        """Make or read the arrays. `data_dir` holds original files where the user has them.

        Raises UsageError where the originals are needed and missing (and says how to get them).
        """
        ...


class Dataset(Protocol):
    """An opened, verified store. Arrays are read-only memory maps, shared between the tasks of a node by the page cache."""

    @property
    def info(self) -> DataInfo:
        """The dataset's shape."""
        ...

    def images(self, split: Split) -> NDArray[np.uint8]:
        """Return the images as stored, uint8 [n, c, h, w]."""
        ...

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the labels, int64 [n], each in range(classes)."""
        ...

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return the normalised images, float32 [n, c, h, w]; the same bits for every backend."""
        ...
