"""What a dataset is: a source that prepares it once, and an opened store that every backend reads the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "DataInfo", "Dataset", "DatasetSource", "HasFolder", "PreparedArrays", "PreparedBlocks", "Split", "TakesArguments"]

Split = Literal["train", "test"]

Block = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Some examples: images [k, c, h, w] and labels [k]."""


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The shape of a dataset: what a model has to know before it sees an example.

    `input_shape` is (channels, height, width). `mean` and `std` (a number a channel, of pixels scaled to 0…1) define the
    normalisation (pixel / 255 − mean) / std for every backend. `synthetic`: images and labels are random, there is nothing to learn,
    and reports say so. `flippable`: a mirrored image still belongs to its class (not so with digits and letters). `class_names` are in the
    order of the labels, empty where classes are numbers.
    """

    name: str
    input_shape: tuple[int, int, int]
    classes: int
    sizes: Mapping[Split, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool = False
    flippable: bool = True
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedArrays:
    """What a source hands to the store: per split uint8 images [n, c, h, w] and int64 labels [n]; the rest as in `DataInfo`."""

    images: Mapping[Split, NDArray[np.uint8]]
    labels: Mapping[Split, NDArray[np.int64]]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool = False
    flippable: bool = True


@dataclass(frozen=True, slots=True)
class PreparedBlocks:
    """What a source hands to the store that does not hold its examples in memory all at once.

    `blocks` has a function a split, each called once, train first; its blocks are written as they come. Mean and standard deviation
    are those of the train images. `left_out`, called at the end, names the original files that were left out, each with the reason, or
    raises UsageError where that is not allowed. `class_names` are in the order of the labels, empty where classes are numbers.
    """

    input_shape: tuple[int, int, int]
    classes: int
    blocks: Mapping[Split, Callable[[], Iterator[Block]]]
    synthetic: bool = False
    flippable: bool = True
    class_names: tuple[str, ...] = ()
    left_out: Callable[[], Sequence[str]] = tuple


class DatasetSource(Protocol):
    """Where a dataset comes from; the plugin object of the group ``crosstrain.datasets``."""

    @property
    def name(self) -> str:
        """The dataset's name."""
        ...

    @property
    def description(self) -> str:
        """What it is, in a line."""
        ...

    @property
    def version(self) -> int:
        """Raised when the prepared arrays would change; a store of another version is made again."""
        ...

    def load(self, data_dir: Path | None) -> PreparedArrays | PreparedBlocks:
        """Make or read the arrays. `data_dir` holds original files where the user has them.

        Raises UsageError where the originals are needed and missing (and says how to get them).
        """
        ...


@runtime_checkable
class TakesArguments(Protocol):
    """A source whose name may be followed by a colon and arguments, such as ``synthetic-images:size=64``."""

    def with_arguments(self, text: str) -> DatasetSource:
        """Return the source that NAME:`text` stands for; it reads no file yet.

        Its `name` is the same however the same arguments are written: NAME alone where all have their default values. Raises UsageError
        for arguments that are not allowed.
        """
        ...


@runtime_checkable
class HasFolder(Protocol):
    """A source whose arguments may name the folder of its original files, which then stands for ``data_dir``."""

    @property
    def folder(self) -> Path | None:
        """The folder, None where the arguments name none."""
        ...


class Dataset(Protocol):
    """An opened, verified store. Arrays are read-only memory maps, shared between the tasks of a node by the page cache."""

    @property
    def info(self) -> DataInfo:
        """The dataset's shape."""
        ...

    def images(self, split: Split) -> NDArray[np.uint8]:
        """Return the images as stored, uint8 [n, c, h, w]. Large ones are read fastest where they lie in memory channels last."""
        ...

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the labels, int64 [n], each in range(classes)."""
        ...

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return the normalised images, float32 [n, c, h, w]; the same bits for every backend."""
        ...
