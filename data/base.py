"""Interfaces of datasets: sources that prepare them, and opened stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from .columns import Column, ColumnSpec

IMAGE, LABEL = "image", "label"  # columns of labelled images
Split = Literal["train", "test"]
Block = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images [k, c, h, w] and labels [k]
MAX_ATTACHMENT_BYTES = 64 << 20  # attachments are read as a whole
MAX_CLASSES = 1 << 24  # each class is a row of a model's last array


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Features of labelled images; `shape` is (channels, height, width).

    `mean` and `std` (per channel, of pixels scaled to 0…1) define the normalisation (pixel / 255 − mean) / std. `flippable`: a mirrored
    image keeps its class, unlike a digit or letter. `class_names` are in label order, empty if classes are numbers.
    """

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flippable: bool = True
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """Features of token sequences.

    `vocabulary_sizes`: tokens of a column are below it. `languages`: source and target. `target`: an int64 column of numbers below
    `classes`, if the texts have classes, with `class_names` in their order.
    """

    vocabulary_sizes: Mapping[str, int]
    languages: tuple[str, ...] = ()
    bleu_tokenizer: str = "13a"
    target: str = ""
    classes: int = 0
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableFeatures:
    """Features of rows of numbers, of which the column `target` is to be predicted.

    It is int64 below `classes`; or without classes float32, or uint8 with a 1 for each class that applies. `mean` and `std` have, by
    name of a float32 input column, a number for each element: models read (x − mean) / std. Other columns are read as stored.
    """

    target: str
    classes: int = 0
    class_names: tuple[str, ...] = ()
    mean: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    std: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The shape of a dataset.

    `images`, `text` and their properties raise UsageError for data of another kind.
    """

    name: str
    sizes: Mapping[Split, int]
    columns: tuple[ColumnSpec, ...]
    features: ImageFeatures | TextFeatures | TableFeatures
    synthetic: bool = False

    @classmethod
    def of_images(cls, name: str, sizes: Mapping[Split, int], features: ImageFeatures, synthetic: bool = False) -> DataInfo:
        """Return the shape of a dataset with the columns ``image`` and ``label``."""
        columns = ColumnSpec(IMAGE, "uint8", features.shape), ColumnSpec(LABEL, "int64")
        return cls(name, sizes, columns, features, synthetic)

    def column(self, name: str) -> ColumnSpec:
        """Return a column's spec. Raises UsageError for an unknown name."""
        for column in self.columns:
            if column.name == name:
                return column
        names = ", ".join(column.name for column in self.columns)
        raise UsageError(f"data: {self.name!r} has no column {name!r}; it has {names}.")

    @property
    def images(self) -> ImageFeatures:
        """Features of images."""
        if not isinstance(self.features, ImageFeatures):
            raise UsageError(f"data: {self.name!r} has no images. Choose a dataset of images: trainer data list")
        return self.features

    @property
    def text(self) -> TextFeatures:
        """Features of text."""
        if not isinstance(self.features, TextFeatures):
            raise UsageError(f"data: {self.name!r} is no text. Choose a dataset of text: trainer data list")
        return self.features

    @property
    def normalisation(self) -> tuple[Any, Any] | None:
        """(mean, std) of images by channel, or of a table by column; None for text."""
        return None if isinstance(self.features, TextFeatures) else (self.features.mean, self.features.std)

    @property
    def target(self) -> str:
        """The column that is to be predicted; "" for text without classes."""
        return LABEL if isinstance(self.features, ImageFeatures) else self.features.target

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the images."""
        return self.images.shape

    @property
    def classes(self) -> int:
        """Number of classes. Raises UsageError for data without."""
        if not self.features.classes:
            raise UsageError(f"data: {self.name!r} has no classes. Choose a dataset with classes: trainer data list")
        return self.features.classes

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel."""
        return self.images.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel."""
        return self.images.std


@dataclass(frozen=True, slots=True)
class PreparedArrays:
    """Images in memory, by split: uint8 [n, c, h, w] and int64 labels [n].

    The rest as in `DataInfo`.
    """

    images: Mapping[Split, NDArray[np.uint8]]
    labels: Mapping[Split, NDArray[np.int64]]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool = False
    flippable: bool = True
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedBlocks:
    """Images in blocks that need not fit into memory together.

    `blocks` has a function per split, each called once, train first. `left_out`, called at the end, returns the skipped original files with
    reasons, or raises UsageError if none may be skipped. `notes`, called after it, returns unexpected changes of the data, which are
    printed and stored in the manifest.
    """

    input_shape: tuple[int, int, int]
    classes: int
    blocks: Mapping[Split, Callable[[], Iterator[Block]]]
    synthetic: bool = False
    flippable: bool = True
    class_names: tuple[str, ...] = ()
    left_out: Callable[[], Sequence[str]] = tuple
    notes: Callable[[], Sequence[str]] = tuple


@dataclass(frozen=True, slots=True)
class PreparedColumns:
    """Any data but labelled images, in blocks with a `Column` for each of `columns` by name.

    `blocks` has a function per split, each called once, train first. `attachments`, called after the last block, returns small files by
    name, such as a vocabulary. The rest is as in `DataInfo` and `PreparedBlocks`.
    """

    columns: tuple[ColumnSpec, ...]
    features: TextFeatures | TableFeatures
    blocks: Mapping[Split, Callable[[], Iterator[Mapping[str, Column]]]]
    synthetic: bool = False
    left_out: Callable[[], Sequence[str]] = tuple
    attachments: Callable[[], Mapping[str, bytes]] = dict
    notes: Callable[[], Sequence[str]] = tuple


class DatasetSource(Protocol):
    """A source of a dataset; the plugin object of the group ``crosstrain.datasets``."""

    @property
    def name(self) -> str:
        """The dataset's name."""

    @property
    def description(self) -> str:
        """A description in one line."""

    @property
    def version(self) -> int:
        """Increased when the prepared arrays would change.

        Stores of other versions are prepared again.
        """

    def load(self, data_dir: Path | None) -> PreparedArrays | PreparedBlocks | PreparedColumns:
        """Return the arrays of the originals in `data_dir`, if any.

        Raises UsageError, with advice, if some are missing.
        """


@runtime_checkable
class TakesArguments(Protocol):
    """A source whose name may be followed by arguments: ``synthetic-images:size=64``."""

    def with_arguments(self, text: str) -> DatasetSource:
        """Return the source NAME:`text`; equal arguments must give equal names.

        Reads no file. Raises UsageError.
        """


@runtime_checkable
class HasVocabulary(Protocol):
    """A source of text with a configurable vocabulary size."""

    def with_vocabulary(self, size: int) -> DatasetSource:
        """Return the source with a vocabulary of this size.

        Raises UsageError for an impossible size. The name must include a size other than the default, as `TakesArguments.with_arguments`
        reads it, because a run knows its data only by name.
        """


@runtime_checkable
class LoadsInParts(Protocol):
    """A source that takes long and resumes after an interruption."""

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedArrays | PreparedBlocks | PreparedColumns:
        """Like `load`, with a folder for finished parts.

        `work` is the same folder for later attempts at the same store of the same originals; originals that the source fetches may have
        changed. It is removed when the store is complete, and when the first attempt ends with UsageError; other errors, such as
        TrainerError for a network failure, keep it. With an attribute ``resumes = False`` it holds temporary files alone.
        """


@runtime_checkable
class HasFolder(Protocol):
    """A source whose arguments may name the folder of its originals, instead of ``data_dir``."""

    @property
    def folder(self) -> Path | None:
        """The folder, if the arguments name one."""


class Dataset(Protocol):
    """An opened, verified store; arrays are read-only memory maps that a node's tasks share."""

    @property
    def info(self) -> DataInfo:
        """The dataset's shape."""

    def column(self, split: Split, name: str) -> Column:
        """Return a column as stored, ``image`` as uint8 [n, c, h, w].

        Raises UsageError if there is none.
        """

    def weights(self, split: Split, name: str) -> NDArray[np.int64]:
        """Return each example's weight in the sum `name`, int64 [n].

        ``examples``: 1 each. ``COLUMN_tokens``: its number of elements in a column of varying length. Raises UsageError for any other name.
        """

    @property
    def attachments(self) -> tuple[str, ...]:
        """Names of the attached files."""

    def attachment(self, name: str) -> bytes:
        """Return an attached file, such as ``vocabulary.model``. Raises UsageError if there is none."""

    def images(self, split: Split) -> NDArray[np.uint8]:
        """Return the images as stored, uint8 [n, c, h, w], in memory channels last."""

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Return the labels, int64 [n], each in range(classes)."""

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Return the normalised images, float32 [n, c, h, w]; the same bits for every backend."""


def split_amounts(data: Dataset, split: Split) -> dict[str, Any]:
    """Return the `bytes` of a split and the `elements` of each varying column, from shapes."""
    columns = {spec.name: data.column(split, spec.name) for spec in data.info.columns}
    size = sum(column.values.nbytes + (0 if column.offsets is None else column.offsets.nbytes) for column in columns.values())
    varying = {name: len(column.values) for name, column in columns.items() if column.offsets is not None}
    return {"bytes": int(size), "elements": varying}


def commonest_class_fraction(data: Dataset, split: Split) -> float | None:
    """Return the fraction of the commonest class in a split; None without classes or examples."""
    if not data.info.features.classes or not data.info.sizes[split]:
        return None
    labels = data.column(split, data.info.target).values
    return float(np.unique(labels, return_counts=True)[1].max() / len(labels))
