"""What a dataset is: a source that prepares it once, and an opened store that every backend reads the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from .columns import Column, ColumnSpec

__all__ = [
    "IMAGE",
    "LABEL",
    "MOST_ATTACHMENT_BYTES",
    "MOST_CLASSES",
    "Block",
    "DataInfo",
    "Dataset",
    "DatasetSource",
    "HasFolder",
    "HasVocabulary",
    "ImageFeatures",
    "LoadsInParts",
    "PreparedArrays",
    "PreparedBlocks",
    "PreparedColumns",
    "Split",
    "TakesArguments",
    "TextFeatures",
]

IMAGE, LABEL = "image", "label"
"""The columns of a dataset of images with a class each."""

Split = Literal["train", "test"]

Block = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Some examples: images [k, c, h, w] and labels [k]."""


MOST_ATTACHMENT_BYTES = 64 << 20
"""Of a file that lies beside a dataset's arrays: they are read as a whole."""


MOST_CLASSES = 1 << 24
"""Of a dataset: each is a row of a model's last array."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What a dataset of images with a class each is like. `shape` is (channels, height, width).

    `mean` and `std` (a number a channel, of pixels scaled to 0…1) define the normalisation (pixel / 255 − mean) / std for every backend.
    `flippable`: a mirrored image still belongs to its class (not so with digits and letters). `class_names` are in the order of the
    labels, empty where classes are numbers.
    """

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flippable: bool = True
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """What a dataset of token sequences is like. `vocabulary_sizes` has a number for each column of tokens: they lie in 0 … number − 1.

    `languages` are those of a translation, source and target, and `bleu_tokenizer` is how sacrebleu cuts the target language into words.
    """

    vocabulary_sizes: Mapping[str, int]
    languages: tuple[str, ...] = ()
    bleu_tokenizer: str = "13a"


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The shape of a dataset: what a model has to know before it sees an example.

    `columns` are what an example consists of, `features` what its kind of data has beside that. `synthetic`: the examples are random,
    there is nothing to learn, and reports say so. What follows `synthetic` are shorthands for a dataset of images; for another one
    they raise UsageError, as does `text` for one that is not text.
    """

    name: str
    sizes: Mapping[Split, int]
    columns: tuple[ColumnSpec, ...]
    features: ImageFeatures | TextFeatures
    synthetic: bool = False

    @classmethod
    def of_images(
        cls,
        name: str,
        input_shape: tuple[int, int, int],
        classes: int,
        sizes: Mapping[Split, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        synthetic: bool = False,
        flippable: bool = True,
        class_names: tuple[str, ...] = (),
    ) -> DataInfo:
        """Return the shape of a dataset of images with a class each: the columns ``image`` and ``label``."""
        columns = ColumnSpec(IMAGE, "uint8", input_shape), ColumnSpec(LABEL, "int64")
        return cls(name, sizes, columns, ImageFeatures(input_shape, classes, mean, std, flippable, class_names), synthetic)

    def column(self, name: str) -> ColumnSpec:
        """Return a column's shape. Raises UsageError where there is none of that name."""
        for column in self.columns:
            if column.name == name:
                return column
        there = ", ".join(column.name for column in self.columns)
        raise UsageError(f"data: {self.name!r} has no column {name!r}; it has {there}.")

    @property
    def images(self) -> ImageFeatures:
        """What is particular to images."""
        if not isinstance(self.features, ImageFeatures):
            raise UsageError(f"data: {self.name!r} has no images. Choose a dataset of images: trainer data list")
        return self.features

    @property
    def text(self) -> TextFeatures:
        """What is particular to text."""
        if not isinstance(self.features, TextFeatures):
            raise UsageError(f"data: {self.name!r} is no text. Choose a dataset of text: trainer data list")
        return self.features

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) of images; None for other data, which is not normalised."""
        return (self.features.mean, self.features.std) if isinstance(self.features, ImageFeatures) else None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the images."""
        return self.images.shape

    @property
    def classes(self) -> int:
        """Number of the images' classes."""
        return self.images.classes

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel; see `ImageFeatures`."""
        return self.images.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel; see `ImageFeatures`."""
        return self.images.std

    @property
    def flippable(self) -> bool:
        """Whether a mirrored image still belongs to its class."""
        return self.images.flippable

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names; see `ImageFeatures`."""
        return self.images.class_names


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
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedBlocks:
    """What a source hands to the store that does not hold its examples in memory all at once.

    `blocks` has a function a split, each called once, train first; its blocks are written as they come. Mean and standard deviation
    are those of the train images. `left_out`, called at the end, names the original files that were left out, each with the reason, or
    raises UsageError where that is not allowed. `notes`, called after it, says what was done to the data that a user may not expect; it is
    printed and in the store's manifest. `class_names` are in the order of the labels, empty where classes are numbers.
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
    """What a source of anything but images with a class hands to the store.

    `blocks` has a function a split, each called once, train first; it yields some examples at a time, a `Column` for each of `columns`
    by name, and they are written as they come. `attachments`, called after the last block, returns small files that belong to the data,
    such as a vocabulary, by name. The rest is as in `DataInfo` and `PreparedBlocks`.
    """

    columns: tuple[ColumnSpec, ...]
    features: TextFeatures
    blocks: Mapping[Split, Callable[[], Iterator[Mapping[str, Column]]]]
    synthetic: bool = False
    left_out: Callable[[], Sequence[str]] = tuple
    attachments: Callable[[], Mapping[str, bytes]] = dict
    notes: Callable[[], Sequence[str]] = tuple


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

    def load(self, data_dir: Path | None) -> PreparedArrays | PreparedBlocks | PreparedColumns:
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
class HasVocabulary(Protocol):
    """A source of text whose vocabulary can be of another size."""

    def with_vocabulary(self, size: int) -> DatasetSource:
        """Return the same with a vocabulary of so many pieces. Raises UsageError for a size that is not possible.

        Its name says the size, unless that is the default one, in a form that `TakesArguments.with_arguments` takes: a run knows its data
        by name alone.
        """
        ...


@runtime_checkable
class LoadsInParts(Protocol):
    """A source that takes long, and keeps what it has done: what is interrupted goes on where it was."""

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedArrays | PreparedBlocks | PreparedColumns:
        """Do what `load` does, with a folder for what has been done so far.

        `work` is the same folder, with what was left in it, when the same store of the same originals is made again; of originals that the
        source fetches itself, others may be there by then. It is removed when the store is complete, and where UsageError refuses what a
        first try has begun; any other error, such as TrainerError for a network that fails, leaves it to the next try.
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

    def column(self, split: Split, name: str) -> Column:
        """Return a column as it is stored: of ``image`` uint8 [n, c, h, w], of ``label`` int64 [n]. UsageError where there is none."""
        ...

    def weights(self, split: Split, name: str) -> NDArray[np.int64]:
        """Return what each example counts in a sum called `name`, int64 [n].

        ``examples``: each counts 1. ``COLUMN_tokens``: as many as it has elements in a column whose length varies. Raises UsageError for
        any other name.
        """
        ...

    @property
    def attachments(self) -> tuple[str, ...]:
        """The names of the files that lie beside the arrays."""
        ...

    def attachment(self, name: str) -> bytes:
        """Return a file that lies beside the arrays, such as ``vocabulary.model``. Raises UsageError where there is none."""
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
