"""Arrays of a file as examples: their splits, inputs and target."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ....core.console import one_line
from ....core.errors import UsageError
from ...base import Block, PreparedBlocks, PreparedColumns, Split, TableFeatures
from ...columns import Column, ColumnSpec
from ...features import MAX_ELEMENTS
from ..target_classes import joined, wrong
from .npz import BLOCK_BYTES, Header
from .targets import Target

Array = NDArray[Any]
SPLITS: tuple[Split, ...] = ("train", "test")
CHANNELS, ALPHA = (1, 3), 4  # of an image; bytes may have an alpha channel
MAX_LOST = 1e-3  # of a standard deviation, by rounding to float32
_INTEGERS = {"bool": "uint8", "uint8": "uint8", "int8": "int32", "int16": "int32", "uint16": "int32", "int32": "int32"}


class ArrayFile(Protocol):
    """Arrays [n, …] by name, read block by block; see `NpzFile`."""

    @property
    def path(self) -> Path:
        """The file, for messages."""

    @property
    def arrays(self) -> Mapping[str, Header]:
        """The headers."""

    def blocks(self, name: str, most_rows: int = 1 << 16) -> Iterator[Array]:
        """Yield an array in parts of at most so many rows."""

    def whole(self, name: str) -> Array:
        """Return an array."""


class Examples:
    """The examples of a file. Raises UsageError for arrays that do not belong together."""

    def __init__(self, file: ArrayFile, values: Mapping[str, str]) -> None:
        self._file, self._values = file, values
        self._groups = _groups(file)
        if values["target"] not in self._groups:
            raise UsageError.of(f"data: target in {file.path.name!r}", values["target"], ", ".join(self._groups), self._groups)
        self._inputs = [name for name in self._groups if name != values["target"]]
        if not self._inputs:
            raise self._wrong("there is no array to predict the target from.")
        self._splits: tuple[Split, ...] = SPLITS if "test" in self._groups[self._inputs[0]] else ("train",)
        self._check_shapes()
        self._header = {name: self._header_of(name, "train") for name in self._groups}
        self._most = min(max(1, BLOCK_BYTES // max(1, math.prod(header.shape[1:]) * 8)) for header in self._header.values())
        self._is_test = self._test_rows()
        self._target = Target(file.path, values["target"], values["task"], self._target_values())

    def _wrong(self, text: str) -> UsageError:
        return wrong(self._file.path, text)

    def _header_of(self, name: str, split: Split) -> Header:
        return self._file.arrays[self._groups[name][split]]

    def _check_shapes(self) -> None:
        for name, arrays in self._groups.items():
            if set(arrays) != set(self._splits):
                raise self._wrong(f"{name!r} has arrays for {' and '.join(sorted(arrays))}, and another one for {joined(self._splits)}.")
            if not name.isidentifier():
                raise self._wrong(f"an array is called {one_line(name)!r}; names have letters, digits and underscores.")
            if 0 in self._header_of(name, "train").shape[1:]:
                raise self._wrong(
                    f"the examples of the array {name!r} hold nothing; its shape is {list(self._header_of(name, 'train').shape)}."
                )
            if name in self._inputs and self._header_of(name, "train").dtype.kind in "US":
                raise self._wrong(f"the array {name!r} holds texts, which are no inputs.")
        for split in self._splits:
            self._check_lengths(split)

    def _check_lengths(self, split: Split) -> None:
        lengths = {}
        for name in self._groups:
            shape = self._header_of(name, split).shape
            if not shape:
                raise self._wrong(f"the array {name!r} is a single number, not one for each example.")
            if shape[1:] != self._header_of(name, "train").shape[1:]:
                raise self._wrong(f"{name!r} has examples of other shapes for the test: {list(shape[1:])}.")
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
            raise self._wrong(f"arrays differ in their number of examples: {counts}.")
        if not min(lengths.values()):
            raise self._wrong(f"there are no examples for the {split} split.")

    def _rows(self, split: Split, names: list[str]) -> Iterator[tuple[int, list[Array]]]:
        """Yield the first row's number and the rows of arrays, block by block."""
        blocks = [self._file.blocks(self._groups[name][split], self._most) for name in names]
        first = 0
        for arrays in zip(*blocks, strict=True):
            yield first, list(arrays)
            first += len(arrays[0])

    def _test_rows(self) -> Array | None:
        """Return which rows are for the test, by a hash of each; None with arrays of their own."""
        if len(self._splits) > 1:
            return None
        share = float(self._values["share"])
        parts = []
        for _, arrays in self._rows("train", list(self._groups)):
            digests = [0] * len(arrays[0])
            for array in arrays:
                flat = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
                digests = [xxhash.xxh64_intdigest(row.data, seed=digest) for row, digest in zip(flat, digests, strict=True)]
            parts.append((np.array(digests, np.uint64) >> np.uint64(11)).astype(np.float64) / 2.0**53 < share)
        mask = np.concatenate(parts)
        if mask.all() or not mask.any():
            raise self._wrong(f"no example is for the {'train' if mask.all() else 'test'} split; give it arrays of its own, as x_test.")
        return mask

    def _chosen(self, split: Split, first: int, array: Array) -> Array:
        """Return those rows of a block that are of a split."""
        if self._is_test is None:
            return array
        mask = self._is_test[first : first + len(array)]
        return array[mask if split == "test" else ~mask]

    def _source_of(self, split: Split) -> Split:
        return split if self._is_test is None else "train"

    def _target_values(self) -> dict[Split, Array]:
        name = self._values["target"]
        wholes = {split: self._file.whole(self._groups[name][split]) for split in self._splits}
        if self._is_test is None:
            return wholes
        return {"train": wholes["train"][~self._is_test], "test": wholes["train"][self._is_test]}

    def prepared(self) -> PreparedBlocks | PreparedColumns:
        """Return images with labels, or columns with their statistics."""
        name = self._inputs[0]
        header = self._header[name]
        layout = self._values["layout"]
        if len(self._inputs) == 1 and header.dtype == np.uint8 and len(header.shape) in (3, 4) and self._target.classes:
            order = self._image_order(header)
            if order is not None:
                shape = (1, *header.shape[1:]) if len(header.shape) == 3 else tuple(header.shape[1:][axis] for axis in order)
                blocks = {split: partial(self._images, split, order) for split in SPLITS}
                classes = tuple(self._target.names)
                return PreparedBlocks(shape, len(classes), blocks, class_names=classes, notes=self._target.notes)  # type: ignore[arg-type]
        if layout != "auto" and not any(len(self._header[name].shape) == 4 for name in self._inputs):
            raise self._wrong("layout is for arrays of images [n, height, width, channels], and there is none.")
        return self._columns()

    def _image_order(self, header: Header) -> tuple[int, ...] | None:
        """Return the axes of channels, height and width; None if it is not known."""
        if len(header.shape) == 3:
            return (0, 1)
        if self._values["layout"] != "auto":
            return (2, 0, 1) if self._values["layout"] == "channels-last" else (0, 1, 2)
        channels = (*CHANNELS, ALPHA) if header.dtype == np.uint8 else CHANNELS
        first, last = header.shape[1] in channels, header.shape[3] in channels
        if first and last and header.shape[1::2] != (1, 1):
            raise self._wrong(f"which axis of {list(header.shape)} has the channels? Give layout=channels-first or channels-last.")
        return (0, 1, 2) if first else (2, 0, 1) if last else None

    def _images(self, split: Split, order: tuple[int, ...]) -> Iterator[Block]:
        done = 0
        for first, (block,) in self._rows(self._source_of(split), self._inputs):
            images = self._chosen(split, first, block)
            images = images[:, None] if images.ndim == 3 else images.transpose(0, *(axis + 1 for axis in order))
            if len(images):
                yield np.ascontiguousarray(images), self._target.stored(split, done, len(images))
            done += len(images)

    def _columns(self) -> PreparedColumns:
        columns, mean, std = [], {}, {}
        notes = list(self._target.notes())
        for name in self._inputs:
            header = self._header[name]
            if header.dtype == np.uint8 and len(header.shape) == 4 and self._image_order(header) is None:
                notes.append(
                    f"{name} is taken for numbers, as no axis has 1, 3 or 4 channels; layout=channels-last or channels-first makes images"
                )
            spec = ColumnSpec(name, _stored(header), header.shape[1:])
            columns.append(spec)
            if spec.dtype != "float32" or self._values["standardise"] == "no":
                continue
            if (elements := math.prod(header.shape[1:])) > MAX_ELEMENTS:
                notes.append(f"{name} is not standardised: an example has {elements:,} numbers, and at most {MAX_ELEMENTS:,} are possible")
                continue
            mean[name], std[name] = self._statistics(name, header)
        columns.append(self._target.spec)
        features = TableFeatures(self._values["target"], len(self._target.names), tuple(self._target.names), mean, std)
        described = {"arrays": self._groups, "task": self._values["task"], "standardised": sorted(mean), "share": self._values["share"]}
        return PreparedColumns(
            tuple(columns),
            features,
            {split: partial(self._blocks, split) for split in SPLITS},
            attachments=lambda: {"arrays.json": json.dumps(described, indent=1).encode()},
            notes=lambda: notes,
        )

    def _statistics(self, name: str, header: Header) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and std of each element; those of images and series are by channel.

        Blocks are merged by the formulas of Chan, Golub and LeVeque (1979).
        """
        shape = header.shape[1:]
        axis = 0 if len(shape) == 3 and self._image_order(header) == (0, 1, 2) else len(shape) - 1
        is_grey = header.dtype == np.uint16 and len(shape) == 2  # an image's only channel
        kept = shape if len(shape) < 2 else (1,) if is_grey else (shape[axis],)
        count, mean, squares, lost = 0, np.zeros(kept), np.zeros(kept), np.zeros(kept)
        for first, (block,) in self._rows(self._source_of("train"), [name]):
            exact, rows = (
                part if len(shape) < 2 else np.moveaxis(part, axis + 1, -1).reshape(-1, *kept)
                for part in (self._chosen("train", first, values) for values in (block, self._numbers(name, first, block)))
            )
            flat = rows.astype(np.float64)
            if not len(flat):
                continue
            lost += ((exact - flat) ** 2).sum(0)
            center = flat.mean(0)
            squares += ((flat - center) ** 2).sum(0) + (center - mean) ** 2 * (count * len(flat) / (count + len(flat)))
            mean += (center - mean) * (len(flat) / (count + len(flat)))
            count += len(flat)
        if (lost > MAX_LOST**2 * (squares + lost)).any():
            raise self._wrong(f"numbers of {name!r} differ by less than float32 can hold, which has 7 digits. Subtract their mean before.")
        deviation = np.where(squares > 0, np.sqrt(squares / count), 1.0)
        if is_grey:
            mean, deviation = np.broadcast_to(mean, shape), np.broadcast_to(deviation, shape)
        elif len(shape) >= 2:
            spread = [size if place == axis else 1 for place, size in enumerate(shape)]
            mean, deviation = (np.broadcast_to(values.reshape(spread), shape) for values in (mean, deviation))
        return tuple(mean.ravel().tolist()), tuple(deviation.ravel().tolist())

    def _numbers(self, name: str, first: int, block: Array) -> Array:
        """Return a block as it is stored. Raises UsageError for numbers that are not finite."""
        stored = _stored(self._header[name])
        with np.errstate(over="ignore"):
            numbers = block.astype(stored)
        flat = numbers.reshape(len(numbers), -1)
        bad = ~np.isfinite(flat) if stored == "float32" else flat != block.reshape(len(block), -1)
        if bad.any():
            place = int(bad.any(1).argmax())
            value = block.reshape(len(block), -1)[place][int(bad[place].argmax())]
            raise self._wrong(f"the array {name!r} has {value} in example {first + place:,}, counted from 0, which {stored} cannot hold.")
        return numbers

    def _blocks(self, split: Split) -> Iterator[Mapping[str, Column]]:
        done = 0
        for first, arrays in self._rows(self._source_of(split), self._inputs):
            chosen = {
                name: self._chosen(split, first, self._numbers(name, first, array))
                for name, array in zip(self._inputs, arrays, strict=True)
            }
            count = len(chosen[self._inputs[0]])
            if count:
                target = {self._values["target"]: self._target.stored(split, done, count)}
                yield {name: Column(values) for name, values in (chosen | target).items()}
            done += count


def _groups(file: ArrayFile) -> dict[str, dict[Split, str]]:
    """Return the arrays of each name, by split. Raises UsageError for two of the same split."""
    groups: dict[str, dict[Split, str]] = {}
    for name in file.arrays:
        split: Split = "test" if name.endswith("_test") else "train"
        base = name.removesuffix(f"_{split}")
        if split in groups.setdefault(base, {}):
            raise wrong(file.path, f"{name!r} and {groups[base][split]!r} are the same array of the {split} split.")
        groups[base][split] = name
    return groups


def _stored(header: Header) -> str:
    """Return the type that a column is stored in; images of 16 bits are numbers as others are."""
    if header.dtype.kind == "f" or (header.dtype == np.uint16 and len(header.shape) >= 3):
        return "float32"
    return _INTEGERS.get(header.dtype.name, "int64")
