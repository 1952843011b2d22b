"""Writing of a store's array files in blocks, with checks of a source's results."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.console import spelled
from ...core.errors import TrainerError, UsageError, raised
from ...metrics.base import TOKENIZERS, TOKENIZERS_OF_PACKAGES
from ..base import Block, PreparedArrays, PreparedBlocks, PreparedColumns, Split, TableFeatures, TextFeatures
from ..columns import Column, ColumnSpec
from ..features import Features, features_problem, values_problem
from ..preprocessing import PixelCounts
from ..text import END, PADDING
from .manifest import FILES, SPLITS, FileEntry, file_sha256, offsets_file, values_file

T = TypeVar("T")


class BrokenSourceError(Exception):
    """A source violates its interface."""


class FailedSourceError(BrokenSourceError):
    """A source's own code raised an error.

    Another attempt may succeed, so finished parts are kept.
    """


def call_source(function: Callable[..., T], *arguments: object) -> T:
    """Call a source.

    Errors other than TrainerError, disk, network and memory become FailedSourceError.
    """
    try:
        return function(*arguments)
    except (TrainerError, BrokenSourceError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise FailedSourceError(raised(error)) from error


def iterate_blocks(function: Callable[[], Iterable[T]], name: str) -> Iterator[T]:
    """Yield a source's blocks; see `call_source`.

    Raises BrokenSourceError, with `name`, if it is no iterable.
    """
    blocks = call_source(function)
    if not isinstance(blocks, Iterable):
        raise BrokenSourceError(f"{name} returned {type(blocks).__name__}, not blocks one after another")
    iterator = call_source(iter, blocks)
    end = object()
    while (block := call_source(next, iterator, end)) is not end:
        yield block


def call_named_source(name: str, function: Callable[..., T], *arguments: object) -> T:
    """Call a function of the source `name` as `call_source` does. Raises UsageError."""
    try:
        return call_source(function, *arguments)
    except FailedSourceError as error:
        raise UsageError(f"data: the source of {name!r} is broken: {error}.") from error


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SIDES = ("source", "target")  # columns of a translation


def check_prepared(loaded: object, function: str) -> None:
    """Raise BrokenSourceError if a source's `function` may not return this."""
    if not isinstance(loaded, PreparedArrays | PreparedBlocks | PreparedColumns):
        raise BrokenSourceError(
            f"its {function} returned {_describe_type(loaded)}, not one of PreparedArrays, PreparedBlocks and PreparedColumns"
        )
    if isinstance(loaded, PreparedArrays):
        for name, arrays in (("images", loaded.images), ("labels", loaded.labels)):
            _check_splits(name, arrays, "an array", lambda array: isinstance(array, np.ndarray))
        return
    _check_splits("blocks", loaded.blocks, "a function", callable)
    for name in ("left_out", "notes", *(["attachments"] if isinstance(loaded, PreparedColumns) else [])):
        if not callable(function_value := getattr(loaded, name)):
            raise BrokenSourceError(f"its {name} is {_describe_type(function_value)}, not a function")
    if isinstance(loaded, PreparedColumns):
        _check_columns(loaded)
    elif not (isinstance(loaded.input_shape, tuple) and len(loaded.input_shape) == 3 and all(map(_is_count, loaded.input_shape))):
        raise BrokenSourceError(f"its input_shape is {loaded.input_shape!r}, not (channels, height, width)")
    elif not _is_count(loaded.classes):
        raise BrokenSourceError(f"its classes are {loaded.classes!r}, not a whole number from 1 up")


def _check_splits(name: str, values: object, kind: str, right: Callable[[object], bool]) -> None:
    if not isinstance(values, Mapping):
        raise BrokenSourceError(f"its {name} are {_describe_type(values)}, not a mapping with {kind} for each of {' and '.join(SPLITS)}")
    if set(values) != set(SPLITS):
        raise BrokenSourceError(f"its {name} have the splits {sorted(map(str, values))}, not {' and '.join(SPLITS)}")
    for split in SPLITS:
        if not right(values[split]):
            raise BrokenSourceError(f"its {name} have {_describe_type(values[split])} for {split}, not {kind}")


def _check_columns(loaded: PreparedColumns) -> None:
    columns = loaded.columns
    if not isinstance(columns, tuple) or not columns or not all(isinstance(column, ColumnSpec) for column in columns):
        raise BrokenSourceError("its columns are not a tuple of ColumnSpec")
    features = loaded.features
    if not isinstance(features, TextFeatures | TableFeatures):
        raise BrokenSourceError(f"its features are {_describe_type(features)}, not TextFeatures or TableFeatures")
    if features.classes != 0 and not _is_count(features.classes):
        raise BrokenSourceError(f"its classes are {features.classes!r}, not a whole number")
    if isinstance(features, TextFeatures):
        sizes = features.vocabulary_sizes
        if not isinstance(sizes, Mapping) or not all(_is_count(size) for size in sizes.values()):
            raise BrokenSourceError(f"its vocabulary_sizes are {sizes!r}, not a whole number from 1 up for each column of tokens")
    elif not all(isinstance(statistics, Mapping) for statistics in (features.mean, features.std)):
        raise BrokenSourceError("its mean and std are not numbers by name of a column")
    if problem := features_problem(columns, features):
        raise BrokenSourceError(problem)


def check_attachments(attachments: object) -> Mapping[str, bytes]:
    """Return attachments. Raises BrokenSourceError unless they are bytes by name."""
    if not isinstance(attachments, Mapping):
        raise BrokenSourceError(f"its attachments returned {_describe_type(attachments)}, not a mapping from names to bytes")
    for name, content in attachments.items():
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise BrokenSourceError(f"its attachment {name!r} is {_describe_type(content)}, not bytes under a name")
    return attachments


def check_class_names(names: Sequence[object]) -> tuple[str, ...]:
    """Return a note about similar names. Raises BrokenSourceError for repeated ones."""
    exact = Counter(map(str, names))
    forms = Counter(unicodedata.normalize("NFC", name) for name in exact)
    if repeated := [spelled(name) for name, count in exact.items() if count > 1]:
        raise BrokenSourceError(f"class_names: {repeated[0]!r} is the name of several classes")
    similar = (name for name, count in forms.items() if count > 1)
    return tuple(f"two classes are called {spelled(name)!r}, in different Unicode forms (NFC and NFD)" for name in similar)


def checked_texts(function: Callable[[], Iterable[str]], name: str) -> tuple[str, ...]:
    """Return the texts of a source's `name`. Raises BrokenSourceError for anything else."""
    texts = call_source(lambda: text if isinstance(text := function(), str) else tuple(text))
    if isinstance(texts, str) or not all(isinstance(line, str) for line in texts):
        raise BrokenSourceError(f"its {name} returned something else than texts")
    return tuple(map(spelled, texts))


def translation_problem(prepared: PreparedColumns, features: TextFeatures) -> str | None:
    """Return why data with languages is no translation, or None."""
    columns = {column.name: column for column in prepared.columns}
    if not isinstance(features.languages, tuple) or len(features.languages) != 2:
        return f"its languages are {features.languages!r}; a translation has two, (source, target)"
    for side in SIDES:
        if (
            side not in columns
            or columns[side].shape != (None,)
            or columns[side].dtype == "float32"
            or side not in features.vocabulary_sizes
        ):
            return (
                f"it says its languages {', '.join(features.languages)}, and has no column {side!r} of pieces, whole numbers of any length"
            )
    if features.bleu_tokenizer not in (known := (*TOKENIZERS, *TOKENIZERS_OF_PACKAGES)):
        return f"its bleu_tokenizer is {features.bleu_tokenizer!r}; one of {', '.join(known)} is needed"
    return None


def sentences_problem(column: Column, first: int) -> str | None:
    """Return why sentences are invalid, or None: each has one END, last, and no padding.

    `first`: number of earlier sentences.
    """
    values, offsets, number = column.values, column.offsets, first + 1
    if offsets is None:
        return None
    if (empty_n := offsets[1:] == offsets[:-1]).any():
        return f"sentence {number + int(empty_n.argmax())} has no pieces, not even END ({END})"
    if (endless_n := values[offsets[1:] - 1] != END).any():
        return f"sentence {number + int(endless_n.argmax())} does not end with END ({END})"
    for piece, name in ((PADDING, "padding"), (END, "END")):
        found_m = np.flatnonzero(values == piece)
        if len(found_m) > (0 if piece == PADDING else len(offsets) - 1):
            sentence_m = np.searchsorted(offsets, found_m, side="right") - 1
            inside_m = found_m != offsets[sentence_m + 1] - 1 if piece == END else np.ones(len(found_m), np.bool_)
            return f"sentence {number + int(sentence_m[inside_m][0])} has {name} ({piece}) among its pieces"
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1


def _describe_type(value: object) -> str:
    return "None" if value is None else f"of the type {type(value).__name__}"


HEADER_BYTES = 128  # room for any shape; numpy's format requires a multiple of 64
_MAGIC = b"\x93NUMPY\x01\x00"


class _ArrayFiles:
    """The array files of one split, in a ``with`` block; `count` is the number of examples."""

    def __init__(self, folder: Path, split: Split) -> None:
        self._folder, self._split = folder, split
        self._open_files = ExitStack()
        self._handles: dict[str, BinaryIO] = {}
        self.count = 0

    def _open(self, name: str) -> BinaryIO:
        self._handles[name] = handle = self._open_files.enter_context((self._folder / name).open("wb"))
        handle.write(bytes(HEADER_BYTES))
        return handle

    def __exit__(self, *exception: object) -> None:
        self._open_files.close()

    def _refuse_empty(self) -> None:
        if not self.count:
            raise BrokenSourceError(f"there is no {self._split} example")

    def _complete(self, name: str, dtype: str, shape: tuple[int, ...]) -> FileEntry:
        """Write the header of numpy's format 1.0, now that the shape is known, and sync the file."""
        path, handle = self._folder / name, self._handles[name]
        handle.seek(0)
        handle.write(_header(np.dtype(dtype).newbyteorder("<").str, shape))
        handle.flush()
        os.fsync(handle.fileno())
        path.chmod(0o444)
        return FileEntry(sha256=file_sha256(path), bytes=path.stat().st_size, dtype=dtype, shape=shape)


def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode("latin1")
    room = HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"


class SplitWriter(_ArrayFiles):
    """Writes images, channels last as CPU kernels read them, and labels of one split.

    `pixels` counts their pixels.
    """

    def __init__(self, folder: Path, split: Split, input_shape: tuple[int, int, int], classes: int, pixels: PixelCounts | None) -> None:
        super().__init__(folder, split)
        self._input_shape, self._classes, self._pixels = input_shape, classes, pixels
        self._images, self._labels = FILES[split, "images"], FILES[split, "labels"]
        self.labels: set[int] = set()

    def __enter__(self) -> SplitWriter:
        self._open(self._images)
        self._open(self._labels)
        return self

    def add(self, block: Block) -> None:
        """Write some examples. Raises BrokenSourceError if they violate the source's interface."""
        if not isinstance(block, tuple) or len(block) != 2 or not all(isinstance(array, np.ndarray) for array in block):
            raise BrokenSourceError(f"a {self._split} block is of the type {type(block).__name__}, not two arrays, (images, labels)")
        images, labels = block
        self._check(images, labels)
        self._handles[self._images].write(np.ascontiguousarray(images.transpose(0, 2, 3, 1)).data)
        self._handles[self._labels].write(np.ascontiguousarray(labels, dtype="<i8").data)
        if self._pixels is not None:
            self._pixels.add(images)
        self.labels.update(np.unique(labels).tolist())
        self.count += len(images)

    def finish(self) -> dict[str, FileEntry]:
        """Complete both files and return their manifest entries.

        Raises BrokenSourceError for an empty split.
        """
        self._refuse_empty()
        channels, height, width = self._input_shape
        return {
            self._images: self._complete(self._images, "uint8", (self.count, height, width, channels)),
            self._labels: self._complete(self._labels, "int64", (self.count,)),
        }

    def _check(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        split = self._split
        if images.dtype != np.uint8 or images.ndim != 4:
            raise BrokenSourceError(f"{split} images are {images.dtype} {list(images.shape)}, not uint8 [n, channels, height, width]")
        if images.shape[1:] != self._input_shape:
            raise BrokenSourceError(f"{split} images have the shape {list(images.shape[1:])}, not {list(self._input_shape)}")
        if labels.dtype != np.int64 or labels.shape != (len(images),):
            raise BrokenSourceError(f"{split} labels are {labels.dtype} {list(labels.shape)}, not int64 [{len(images)}]")
        if len(labels) and (labels.min() < 0 or labels.max() >= self._classes):
            raise BrokenSourceError(f"{split} labels lie in {labels.min()}…{labels.max()}, not in 0…{self._classes - 1}")


class ColumnWriter(_ArrayFiles):
    """Writes columns of one split, in a ``with`` block.

    `sentences`: translated columns.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        columns: tuple[ColumnSpec, ...],
        features: Features,
        sentences: Sequence[str] = (),
    ) -> None:
        super().__init__(folder, split)
        self._columns, self._features, self._sentences = columns, features, sentences
        self._elements = {column.name: 0 for column in columns}

    def __enter__(self) -> ColumnWriter:
        for column in self._columns:
            self._open(values_file(self._split, column.name))
            if column.varies:
                self._open(offsets_file(self._split, column.name)).write(bytes(8))  # the first example begins at 0
        return self

    def add(self, block: Mapping[str, Column]) -> None:
        """Write some examples. Raises BrokenSourceError if they violate the source's interface."""
        examples = self._check_size(block)
        for spec in self._columns:
            column = block[spec.name]
            self._check_values(spec, column)
            values = np.ascontiguousarray(column.values, np.dtype(spec.dtype).newbyteorder("<"))
            self._handles[values_file(self._split, spec.name)].write(values.data)
            if column.offsets is not None:
                ends = np.ascontiguousarray(column.offsets[1:] + self._elements[spec.name], "<i8")
                self._handles[offsets_file(self._split, spec.name)].write(ends.data)
            self._elements[spec.name] += len(values)
        self.count += examples

    def _check_size(self, block: Mapping[str, Column]) -> int:
        if not isinstance(block, Mapping):
            raise BrokenSourceError(f"a {self._split} block is of the type {type(block).__name__}, not a mapping from names to columns")
        if set(block) != {column.name for column in self._columns}:
            raise BrokenSourceError(f"a {self._split} block has the columns {', '.join(sorted(map(str, block)))}")
        for name, column in block.items():
            if not isinstance(column, Column) or not isinstance(column.values, np.ndarray):
                raise BrokenSourceError(f"{self._split} {name} of a block is not a Column of an array")
            if not column.values.ndim or not (column.offsets is None or isinstance(column.offsets, np.ndarray)):
                raise BrokenSourceError(f"{self._split} {name} of a block has values without a dimension, or offsets that are no array")
        sizes = {name: len(column) for name, column in block.items()}
        if len(set(sizes.values())) != 1:
            raise BrokenSourceError(f"the columns of a {self._split} block have different numbers of examples: {sizes}")
        return next(iter(sizes.values()))

    def _check_values(self, spec: ColumnSpec, column: Column) -> None:
        if problem := column.wrong_with(spec):
            raise BrokenSourceError(f"{self._split} {problem}")
        extremes = (column.values.min().item(), column.values.max().item()) if column.values.size else (0, 0)
        if problem := values_problem(self._features, spec.name, *extremes):
            raise BrokenSourceError(f"{self._split} {problem}")
        if spec.name in self._sentences and (problem := sentences_problem(column, self.count)):
            raise BrokenSourceError(f"{self._split} {spec.name}: {problem}")

    def finish(self) -> dict[str, FileEntry]:
        """Complete the files and return their manifest entries.

        Raises BrokenSourceError for an empty split.
        """
        self._refuse_empty()
        entries: dict[str, FileEntry] = {}
        for spec in self._columns:
            shape = (self._elements[spec.name], *spec.fixed_shape)
            name = values_file(self._split, spec.name)
            entries[name] = self._complete(name, spec.dtype, shape)
            if spec.varies:
                name = offsets_file(self._split, spec.name)
                entries[name] = self._complete(name, "int64", (self.count + 1,))
        return entries
