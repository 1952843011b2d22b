"""The dataset where the ops are: resident tensors, so that a batch is a gather by index and no input pipeline is waited for.

What a model is given of its columns is described in models/base.py; of images with a class it is x_bchw [batch, channels, height,
width] float32 and y_b [batch] int32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.job import Job
from ...data.base import IMAGE, DataInfo, Dataset, Split
from ...data.columns import LENGTHS, ColumnSpec
from ...models.base import ModelSpec
from .preprocessing import changed, compiled_normalised, normalised, normalised_in_blocks

__all__ = [
    "RESIDENT_FLOAT_BYTES",
    "SMALL_ELEMENTS",
    "SPLITS",
    "Batch",
    "ColumnTensors",
    "Layout",
    "MappedFile",
    "Resident",
    "file_contents",
    "layout_for",
    "mapped_file",
    "resident",
    "resident_from_arrays",
    "with_mapped_files",
]

RESIDENT_FLOAT_BYTES = 1 << 30
"""Up to this size a split is held as float32; beyond it as stored (uint8), and each batch is normalised when it is taken."""

SMALL_ELEMENTS = 1 << 15
"""Images of more pixels than this (three channels of 104 × 104) stay uint8 in any case: their normalisation is half a percent of a step
of AlexNet, and they would take four times the memory."""


MAPPED_BYTES = 64 << 20
"""Sequences of this size are read from their file: TensorFlow would hold them as int32, twice as large, in each task."""

SPLITS: tuple[Split, ...] = ("train", "test")

ColumnTensors: TypeAlias = tf.Tensor | dict[str, tf.Tensor]
"""One column of a fixed shape, or tensors by name; see models/base.py."""

Batch: TypeAlias = tuple[ColumnTensors, ColumnTensors]
"""Examples: inputs and target; of images x_bchw, y_b."""

VALUES, OFFSETS = ".values", ".offsets"
"""Behind the name of a column whose length varies: its two arrays."""


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A column's values in their file, as TensorFlow maps it: `elements` of type `dtype`, the first `header` of which are no values."""

    filename: str
    dtype: np.dtype[Any]
    header: int
    elements: int

    @property
    def spec(self) -> tf.TensorSpec:
        """Shape and type of the whole file."""
        return tf.TensorSpec([self.elements], tf.as_dtype(self.dtype))


def mapped_file(values: NDArray[Any]) -> MappedFile | None:
    """Return the file of a large column of sequences, None where `values` are not all of one, or small enough to be held."""
    if not isinstance(values, np.memmap) or values.filename is None or values.ndim != 1 or values.offset % values.itemsize:
        return None
    if values.nbytes < MAPPED_BYTES:
        return None
    header = values.offset // values.itemsize
    return MappedFile(str(values.filename), values.dtype, header, header + len(values))


@dataclass(frozen=True, slots=True)
class Layout:
    """How what a model reads of the data lies in memory: its columns `inputs` and `target`.

    `channels_last`: images are [n, h, w, c] instead of [n, c, h, w]. `changing`: training images are augmented. `compiled`: XLA compiles
    how a batch of stored pixels is normalised. `mapped` are the columns of each split that stay in their files, by split and name; their
    offsets count from the file's beginning.
    """

    info: DataInfo
    inputs: tuple[str, ...]
    target: str
    channels_last: bool
    changing: bool
    compiled: bool
    mapped: Mapping[tuple[Split, str], MappedFile] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns that are held, each once."""
        return tuple(self.info.column(name) for name in dict.fromkeys((*self.inputs, self.target)))

    def normalised(self, split: Split) -> bool:
        """Return whether a split's images are held as float32, normalised."""
        elements = math.prod(self.info.input_shape)
        small = elements <= SMALL_ELEMENTS and self.info.sizes[split] * elements * 4 <= RESIDENT_FLOAT_BYTES
        return small and not (self.changing and split == "train")

    @property
    def has_small_ops(self) -> bool:
        """Whether a step consists of small ops: images are neither convolved nor changed, and there are no products of whole sequences."""
        return not self.channels_last and not any(column.varies for column in self.columns)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of an image as it lies in memory."""
        channels, height, width = self.info.input_shape
        return (height, width, channels) if self.channels_last else self.info.input_shape

    def laid(self, images_nchw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return stored images as they are to lie in memory."""
        return np.ascontiguousarray(images_nchw.transpose(0, 2, 3, 1)) if self.channels_last else np.asarray(images_nchw)

    def arrays(self, data: Dataset, split: Split) -> dict[str, NDArray[Any]]:
        """Return a split's arrays by name, before any op: pixels as uint8, whole numbers as int32, offsets as int64, others as float32.

        Of a column that is mapped they are the offsets alone.
        """
        found: dict[str, NDArray[Any]] = {}
        for spec in self.columns:
            if spec.name == IMAGE:
                found[spec.name] = self.laid(data.images(split))
                continue
            column = data.column(split, spec.name)
            if (file := self.mapped.get((split, spec.name))) is not None:
                found[spec.name + OFFSETS] = np.asarray(column.offsets) + file.header
                continue
            values = np.asarray(column.values).astype(_number_type(spec).as_numpy_dtype)
            if column.offsets is None:
                found[spec.name] = values
            else:
                found |= {spec.name + VALUES: values, spec.name + OFFSETS: np.asarray(column.offsets)}
        return found

    def array_specs(self, split: Split) -> dict[str, tf.TensorSpec]:
        """Return shape and type of what `arrays` returns, in its order; the number of values of all examples together is not known.

        Of a column that is mapped they are those of its file.
        """
        size = self.info.sizes[split]
        found: dict[str, tf.TensorSpec] = {}
        for spec in self.columns:
            if spec.name == IMAGE:
                found[spec.name] = tf.TensorSpec([size, *self.image_shape], tf.uint8)
            elif spec.varies:
                file = self.mapped.get((split, spec.name))
                held = tf.TensorSpec([None, *spec.fixed_shape], _number_type(spec))
                found[spec.name + VALUES] = held if file is None else file.spec
                found[spec.name + OFFSETS] = tf.TensorSpec([size + 1], tf.int64)
            else:
                found[spec.name] = tf.TensorSpec([size, *spec.fixed_shape], _number_type(spec))
        return found

    def tensor_specs(self, split: Split) -> list[tf.TensorSpec]:
        """Return shape and type of a split's tensors as they are held, in the order of `arrays`."""
        specs = self.array_specs(split)
        if IMAGE in specs and self.normalised(split):
            specs[IMAGE] = tf.TensorSpec(specs[IMAGE].shape, tf.float32)
        return list(specs.values())


def _number_type(column: ColumnSpec) -> tf.DType:
    return tf.float32 if column.dtype.startswith("float") else tf.int32


def layout_for(job: Job, spec: ModelSpec, info: DataInfo) -> Layout:
    """Return the layout that suits a model: TensorFlow's convolutions work channels last, and so does the change of images.

    Large images are worth compiling for. Beside a GPU nothing is compiled: that has not been tried on one.
    """
    changing = job.augment != "none"
    reads_images = IMAGE in spec.inputs
    convolves = reads_images and any(len(parameter.shape) == 4 for parameter in spec.parameters)
    large = reads_images and math.prod(info.input_shape) > SMALL_ELEMENTS
    compiled = large and not tf.config.get_visible_devices("GPU")
    return Layout(info, spec.inputs, spec.target, channels_last=convolves or changing, changing=changing, compiled=compiled)


@dataclass(frozen=True, slots=True)
class Resident:
    """One split on the device: tensors by name, in the order of `Layout.arrays`; images float32 (normalised) or uint8, as stored."""

    layout: Layout
    tensors: Mapping[str, tf.Tensor]

    @classmethod
    def of(cls, layout: Layout, split: Split, tensors: Sequence[tf.Tensor]) -> Resident:
        """Return a split that is held as these tensors, which are as `Layout.tensor_specs` says."""
        return cls(layout, dict(zip(layout.array_specs(split), tensors, strict=True)))

    @property
    def labels(self) -> tf.Tensor:
        """The labels of images, int32 [n]."""
        return self.tensors[self.layout.target]

    @property
    def inputs(self) -> tf.Tensor:
        """Images as they are held."""
        return self.tensors[IMAGE]

    def batch(self, indices: tf.Tensor, changes: tf.Tensor | None = None) -> Batch:
        """Return inputs and target of the examples at `indices`, int32 [batch], with `changes` int32 [batch, 3] where there are any."""
        laid, target = self.laid_batch(indices, changes)
        return self.as_read(laid), target

    def laid_batch(self, indices: tf.Tensor, changes: tf.Tensor | None = None) -> Batch:
        """Return the same with images as they lie in memory."""
        names = self.layout.inputs
        given = {name: self._laid_images(indices, changes) if name == IMAGE else self._gathered(name, indices) for name in names}
        if len(given) == 1:
            return given[names[0]], self._gathered(self.layout.target, indices)
        named: dict[str, tf.Tensor] = {}
        for name, column in given.items():
            named |= column if isinstance(column, dict) else {name: column}
        return named, self._gathered(self.layout.target, indices)

    def longest(self, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        """In ops: return how long the longest of the examples start … stop − 1 is, int64, in any column whose length varies."""
        offsets = [tensor for name, tensor in self.tensors.items() if name.endswith(OFFSETS)]
        return tf.reduce_max([tf.reduce_max(each[start + 1 : stop + 1] - each[start:stop]) for each in offsets])

    def _laid_images(self, indices: tf.Tensor, changes: tf.Tensor | None) -> tf.Tensor:
        images = tf.gather(self.tensors[IMAGE], indices)
        if changes is not None:
            images = changed(images, changes)
        if images.dtype == tf.uint8:
            normalise = compiled_normalised if self.layout.compiled else normalised
            images = normalise(images, self.layout.info, channels_last=self.layout.channels_last)
        return images

    def _gathered(self, name: str, indices: tf.Tensor) -> ColumnTensors:
        """Return a column's examples: where their length varies, padded with zeros, and their lengths."""
        if name in self.tensors:
            return tf.gather(self.tensors[name], indices)
        offsets = self.tensors[name + OFFSETS]
        begins = tf.gather(offsets, indices)
        lengths = tf.gather(offsets, indices + 1) - begins
        longest = tf.reduce_max(tf.concat([[tf.constant(0, tf.int64)], lengths], axis=0))
        places = tf.range(longest)
        inside = places < lengths[:, None]
        stored = tf.gather(self.tensors[name + VALUES], tf.where(inside, begins[:, None] + places, 0))
        values = tf.cast(stored, _number_type(self.layout.info.column(name)))
        while len(inside.shape) < len(values.shape):
            inside = inside[..., None]
        return {name: tf.where(inside, values, tf.zeros([], values.dtype)), name + LENGTHS: tf.cast(lengths, tf.int32)}

    def micro_batches(self, laid: ColumnTensors, target: ColumnTensors, count: int) -> list[Batch]:
        """Cut what `laid_batch` gave into micro-batches (inputs, target); some are empty where there are fewer examples.

        They depend on nothing of each other, so that they can be computed at the same time. Raises ValueError for several of
        anything but images with a class.
        """
        if count == 1:
            return [(self.as_read(laid), target)]
        if isinstance(laid, dict) or isinstance(target, dict):
            raise ValueError("only images with a class are computed in micro-batches")
        size = tf.size(target)
        borders = [size * number // count for number in range(count + 1)]
        return [(self.as_read(laid[begin:end]), target[begin:end]) for begin, end in itertools.pairwise(borders)]

    def as_read(self, laid: ColumnTensors) -> ColumnTensors:
        """Return inputs whose images lie as in memory as a model reads them, x_bchw.

        A model that works channels last begins with the inverse, and TensorFlow's optimiser leaves out both.
        """
        if not self.layout.channels_last:
            return laid
        if isinstance(laid, dict):
            return {name: tf.transpose(value, [0, 3, 1, 2]) if name == IMAGE else value for name, value in laid.items()}
        return tf.transpose(laid, [0, 3, 1, 2])


def resident(data: Dataset, split: Split, layout: Layout) -> Resident:
    """Put a split on the current device; large columns of sequences stay in the store's files, which all tasks of a node share."""
    layout = with_mapped_files(layout, data)
    arrays = layout.arrays(data, split)
    mapped: dict[str, tf.Tensor] = {}
    for name, file in ((name, file) for (of, name), file in layout.mapped.items() if of == split):
        mapped[name + VALUES] = file_contents(file, file.filename)
        with tf.device("CPU"):  # from where a batch goes to the device
            mapped[name + OFFSETS] = tf.constant(arrays.pop(name + OFFSETS))
    return resident_from_arrays(layout, split, {**{name: tf.constant(array) for name, array in arrays.items()}, **mapped})


def with_mapped_files(layout: Layout, data: Dataset) -> Layout:
    """Return the layout of data whose large columns of sequences stay in their files, alike in every process that has the same data."""
    columns = [(split, spec.name) for split in SPLITS for spec in layout.columns if spec.varies]
    found = {(split, name): mapped_file(data.column(split, name).values) for split, name in columns}
    return replace(layout, mapped={key: file for key, file in found.items() if file is not None})


def file_contents(file: MappedFile, path: str) -> tf.Tensor:
    """In ops: map a file that is at `path` where they run, header included. They fail where it is shorter than `file` says."""
    with tf.device("CPU"):
        return tf.raw_ops.ImmutableConst(dtype=file.spec.dtype, shape=file.spec.shape, memory_region_name=path)


def resident_from_arrays(layout: Layout, split: Split, arrays: Mapping[str, tf.Tensor]) -> Resident:
    """Make the same, in ops, from what `Layout.arrays` returns, also for a process that TensorFlow runs remotely."""
    tensors = dict(arrays)
    if IMAGE in tensors and layout.normalised(split):
        tensors[IMAGE] = normalised_in_blocks(tensors[IMAGE], layout.info, channels_last=layout.channels_last)
    return Resident(layout, tensors)
