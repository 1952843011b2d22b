"""Dataset as resident tensors, without an input pipeline: a batch is a gather by index.

See models/base.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.job import Job
from ...data.base import IMAGE, DataInfo, Dataset, Split
from ...data.columns import LENGTHS, ColumnSpec
from ...data.features import read_column
from ...data.preprocessing import normal_line, normal_table
from ...models.base import ModelSpec
from ..vectors import only_or_named

# Normalisation equals `Dataset.inputs` to the bit; images_bhwc are uint8 [batch, height, width, channels].

BLOCK_ELEMENTS = 1 << 22  # intermediate results take twice the memory of the result


def normalised(pixels: tf.Tensor, info: DataInfo, *, channels_last: bool) -> tf.Tensor:
    """Return (pixel / 255 − mean) / std, float32, of [n, h, w, c] or [n, c, h, w].

    It is computed as a float64 line if that is exact, else by a table.
    """
    shape = tf.shape(pixels)
    channels, height, width = info.input_shape
    rows = tf.reshape(pixels, [-1, width * channels] if channels_last else [shape[0], channels, height * width])
    if line := normal_line(info.mean, info.std):
        factor, summand = (_tiled(values_c, width, channels_last) for values_c in line)
        result = tf.cast(tf.cast(rows, tf.float64) * factor + summand, tf.float32)
    else:
        begin = _tiled(256 * np.arange(channels, dtype=np.int32), width, channels_last)
        result = tf.gather(tf.constant(normal_table(info.mean, info.std).ravel()), tf.cast(rows, tf.int32) + begin)
    return tf.ensure_shape(tf.reshape(result, shape), pixels.shape)


def compiled_normalised(pixels: tf.Tensor, info: DataInfo, *, channels_last: bool) -> tf.Tensor:
    """Return the same by XLA, compiled in 0.2 s per size.

    64 images of 224 × 224 × 3 take 2 ms on two cores, not 11 ms.
    """
    compiled = tf.function(lambda batch: normalised(batch, info, channels_last=channels_last), jit_compile=True, autograph=False)
    return tf.ensure_shape(compiled(pixels), pixels.shape)


def normalised_in_blocks(pixels: tf.Tensor, info: DataInfo, *, channels_last: bool) -> tf.Tensor:
    """Return the same of a whole split, with little memory apart from pieces and result."""
    size, elements = int(pixels.shape[0]), int(np.prod(info.input_shape))
    step = max(1, BLOCK_ELEMENTS // elements)
    pieces = tf.TensorArray(tf.float32, size=-(-size // step), element_shape=[None, *pixels.shape[1:]], infer_shape=False)

    def body(number: tf.Tensor, pieces: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        block = pixels[number * step : (number + 1) * step]
        return number + 1, pieces.write(number, normalised(block, info, channels_last=channels_last))

    _, pieces = tf.while_loop(lambda number, _: number * step < size, body, (tf.constant(0), pieces), parallel_iterations=1)
    return tf.ensure_shape(pieces.concat(), pixels.shape)


def changed(images_bhwc: tf.Tensor, changes: tf.Tensor) -> tf.Tensor:
    """In ops: apply `changes` int32 [b, 3] as `apply_changes` defines it."""
    _, height, width, channels = images_bhwc.shape
    dy, dx, flip = (changes[:, column, None] for column in range(3))
    rows_bh = tf.range(height) - dy
    columns = tf.range(width)
    columns_bw = tf.where(flip > 0, width - 1 - columns, columns) - dx
    inside_bhw = _is_within(rows_bh, height)[:, :, None] & _is_within(columns_bw, width)[:, None, :]
    places_bhw = tf.clip_by_value(rows_bh, 0, height - 1)[:, :, None] * width + tf.clip_by_value(columns_bw, 0, width - 1)[:, None, :]
    taken = tf.gather(tf.reshape(images_bhwc, [-1, height * width, channels]), places_bhw, batch_dims=1)
    return tf.where(inside_bhw[..., None], taken, tf.zeros([], tf.uint8))


def _is_within(positions: tf.Tensor, size: int) -> tf.Tensor:
    return (positions >= 0) & (positions < size)


def _tiled(values_c: NDArray[Any], width: int, channels_last: bool) -> NDArray[Any]:
    return np.tile(values_c, width) if channels_last else values_c[:, None]


RESIDENT_FLOAT_BYTES = 1 << 30  # larger splits stay uint8, normalised by batch
SMALL_ELEMENTS = 1 << 15  # larger images stay uint8: normalising takes half a percent of an AlexNet step
MAPPED_BYTES = 64 << 20  # larger sequences are mapped: TensorFlow holds int32, twice as large, per task
SPLITS: tuple[Split, ...] = ("train", "test")
Tensors: TypeAlias = Sequence[tf.Tensor]
Columns: TypeAlias = tf.Tensor | dict[str, tf.Tensor]  # one column of a fixed shape, or tensors by name
Batch: TypeAlias = tuple[Columns, Columns]  # inputs, target; of images x_bchw, y_b
Structure = TypeVar("Structure")
VALUES, OFFSETS = ".values", ".offsets"  # arrays of a column of varying length


@dataclass(frozen=True, slots=True)
class MappedFile:
    """Column's file as TensorFlow maps it: `elements` of `dtype`.

    The first `header` of them are no values.
    """

    filename: str
    dtype: np.dtype[Any]
    header: int
    elements: int

    @property
    def spec(self) -> tf.TensorSpec:
        """Shape and type of the whole file."""
        return tf.TensorSpec([self.elements], tf.as_dtype(self.dtype))


def mapped_file(values: NDArray[Any]) -> MappedFile | None:
    """Return the file of a large column of sequences, else None.

    `values` must not be small, and all of one file.
    """
    if not isinstance(values, np.memmap) or values.filename is None or values.ndim != 1 or values.offset % values.itemsize:
        return None
    if values.nbytes < MAPPED_BYTES:
        return None
    header = values.offset // values.itemsize
    return MappedFile(str(values.filename), values.dtype, header, header + len(values))


@dataclass(frozen=True, slots=True)
class Layout:
    """How the columns `inputs` and `target` lie in memory.

    `channels_last`: images are [n, h, w, c], not [n, c, h, w]. `changing`: training images are augmented. `compiled`: by XLA. `mapped`:
    columns that stay in their files, by split and name; their offsets count from the file's beginning.
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
        """The columns held, each once."""
        return tuple(self.info.column(name) for name in dict.fromkeys((*self.inputs, self.target)))

    def normalised(self, split: Split) -> bool:
        """Return whether a split's images are held as normalised float32."""
        elements = math.prod(self.info.input_shape)
        small = elements <= SMALL_ELEMENTS and self.info.sizes[split] * elements * 4 <= RESIDENT_FLOAT_BYTES
        return small and not (self.changing and split == "train")

    @property
    def has_small_ops(self) -> bool:
        """Whether a step has only small ops: no convolution, no augmentation, no whole sequences."""
        return not self.channels_last and not any(column.varies for column in self.columns)

    def arrays(self, data: Dataset, split: Split) -> dict[str, NDArray[Any]]:
        """Return the arrays of a split by name.

        Pixels are uint8, whole numbers int32, offsets int64, others float32. Mapped columns have only offsets here.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for spec in self.columns:
            if spec.name == IMAGE:
                images = data.images(split)
                arrays[spec.name] = np.ascontiguousarray(images.transpose(0, 2, 3, 1)) if self.channels_last else np.asarray(images)
                continue
            column = read_column(data, split, spec.name)
            if (file := self.mapped.get((split, spec.name))) is not None:
                arrays[spec.name + OFFSETS] = np.asarray(column.offsets) + file.header
                continue
            values = np.asarray(column.values).astype(_number_type(spec).as_numpy_dtype)
            if column.offsets is None:
                arrays[spec.name] = values
            else:
                arrays |= {spec.name + VALUES: values, spec.name + OFFSETS: np.asarray(column.offsets)}
        return arrays

    def array_specs(self, split: Split) -> dict[str, tf.TensorSpec]:
        """Return the specs of `arrays` in order, and those of mapped files.

        Sequences are of unknown total length.
        """
        size = self.info.sizes[split]
        specs: dict[str, tf.TensorSpec] = {}
        for spec in self.columns:
            if spec.name == IMAGE:
                channels, height, width = self.info.input_shape
                shape = (height, width, channels) if self.channels_last else (channels, height, width)
                specs[spec.name] = tf.TensorSpec([size, *shape], tf.uint8)
            elif spec.varies:
                file = self.mapped.get((split, spec.name))
                held = tf.TensorSpec([None, *spec.fixed_shape], _number_type(spec))
                specs[spec.name + VALUES] = held if file is None else file.spec
                specs[spec.name + OFFSETS] = tf.TensorSpec([size + 1], tf.int64)
            else:
                specs[spec.name] = tf.TensorSpec([size, *spec.fixed_shape], _number_type(spec))
        return specs

    def tensor_specs(self, split: Split) -> list[tf.TensorSpec]:
        """Return the specs of a split's tensors as held, in the order of `arrays`."""
        specs = self.array_specs(split)
        if IMAGE in specs and self.normalised(split):
            specs[IMAGE] = tf.TensorSpec(specs[IMAGE].shape, tf.float32)
        return list(specs.values())


def part_of(tensors: Structure, begin: tf.Tensor | int, end: tf.Tensor | int) -> Structure:
    """Return the examples begin … end − 1 of tensors in any structure, in ops."""
    part: Structure = tf.nest.map_structure(lambda tensor: tensor[begin:end], tensors)
    return part


def _number_type(column: ColumnSpec) -> tf.DType:
    return tf.float32 if column.dtype.startswith("float") else tf.int32


def layout_for(job: Job, spec: ModelSpec, info: DataInfo) -> Layout:
    """Return a model's layout: convolutions and augmentation work channels last.

    Compiling is untried with a GPU.
    """
    changing = job.augment != "none"
    reads_images = IMAGE in spec.inputs
    convolves = reads_images and any(len(parameter.shape) == 4 for parameter in spec.parameters)
    large = reads_images and math.prod(info.input_shape) > SMALL_ELEMENTS
    compiled = large and not tf.config.get_visible_devices("GPU")
    return Layout(info, spec.inputs, spec.target, channels_last=convolves or changing, changing=changing, compiled=compiled)


@dataclass(frozen=True, slots=True)
class Resident:
    """Split on the device: tensors by name, in the order of `Layout.arrays`.

    Images are normalised float32 or stored uint8.
    """

    layout: Layout
    tensors: Mapping[str, tf.Tensor]

    @classmethod
    def from_tensors(cls, layout: Layout, split: Split, tensors: Tensors) -> Resident:
        """Return a split of tensors as described by `Layout.tensor_specs`."""
        return cls(layout, dict(zip(layout.array_specs(split), tensors, strict=True)))

    def batch(self, indices: tf.Tensor, changes: tf.Tensor | None = None) -> Batch:
        """Return inputs and target of the examples at `indices`, int32 [batch].

        `changes` int32 [batch, 3] are made on images.
        """
        laid, target = self.laid_batch(indices, changes)
        return self.as_read(laid), target

    def laid_batch(self, indices: tf.Tensor, changes: tf.Tensor | None = None) -> Batch:
        """Return the same with images as they lie in memory."""
        names = self.layout.inputs
        inputs = {name: self._laid_images(indices, changes) if name == IMAGE else self._gathered(name, indices) for name in names}
        return only_or_named(inputs), self._gathered(self.layout.target, indices)

    def longest(self, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        """Return the longest length, int64, of the examples start … stop − 1, in ops.

        All varying columns count.
        """
        offsets = [tensor for name, tensor in self.tensors.items() if name.endswith(OFFSETS)]
        return tf.reduce_max([tf.reduce_max(column[start + 1 : stop + 1] - column[start:stop]) for column in offsets])

    def _laid_images(self, indices: tf.Tensor, changes: tf.Tensor | None) -> tf.Tensor:
        images = tf.gather(self.tensors[IMAGE], indices)
        if changes is not None:
            images = changed(images, changes)
        if images.dtype == tf.uint8:
            normalise = compiled_normalised if self.layout.compiled else normalised
            images = normalise(images, self.layout.info, channels_last=self.layout.channels_last)
        return images

    def _gathered(self, name: str, indices: tf.Tensor) -> Columns:
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

    def micro_batches(self, laid: Columns, target: Columns, count: int) -> list[Batch]:
        """Cut a `laid_batch` into micro-batches (inputs, target), maybe empty.

        Raises ValueError unless of images with a class.
        """
        if count == 1:
            return [(self.as_read(laid), target)]
        if isinstance(laid, dict) or isinstance(target, dict):
            raise ValueError("only images with a class are computed in micro-batches")
        size = tf.size(target)
        borders = [size * number // count for number in range(count + 1)]
        return [(self.as_read(laid[begin:end]), target[begin:end]) for begin, end in itertools.pairwise(borders)]

    def as_read(self, laid: Columns) -> Columns:
        """Return inputs with images as x_bchw.

        The optimiser removes this and its inverse in a model that works channels last.
        """
        if not self.layout.channels_last:
            return laid
        if isinstance(laid, dict):
            return {name: tf.transpose(value, [0, 3, 1, 2]) if name == IMAGE else value for name, value in laid.items()}
        return tf.transpose(laid, [0, 3, 1, 2])


def resident(data: Dataset, split: Split, layout: Layout) -> Resident:
    """Put a split on the current device.

    Large columns of sequences stay in the store's files, shared by a node's tasks.
    """
    layout = with_mapped_files(layout, data)
    arrays = layout.arrays(data, split)
    mapped: dict[str, tf.Tensor] = {}
    for name, file in ((name, file) for (of, name), file in layout.mapped.items() if of == split):
        mapped[name + VALUES] = file_contents(file, file.filename)
        with tf.device("CPU"):  # batches go to the device
            mapped[name + OFFSETS] = tf.constant(arrays.pop(name + OFFSETS))
    return resident_from_arrays(layout, split, {**{name: tf.constant(array) for name, array in arrays.items()}, **mapped})


def with_mapped_files(layout: Layout, data: Dataset) -> Layout:
    """Return the layout with large columns of sequences in their files.

    It is the same in every process with the same data.
    """
    columns = [(split, spec.name) for split in SPLITS for spec in layout.columns if spec.varies]
    files = {(split, name): mapped_file(read_column(data, split, name).values) for split, name in columns}
    return replace(layout, mapped={key: file for key, file in files.items() if file is not None})


def file_contents(file: MappedFile, path: str) -> tf.Tensor:
    """Map the file at `path`, header included, in ops.

    They fail where they run if it is too short.
    """
    with tf.device("CPU"):
        return tf.raw_ops.ImmutableConst(dtype=file.spec.dtype, shape=file.spec.shape, memory_region_name=path)


def resident_from_arrays(layout: Layout, split: Split, arrays: Mapping[str, tf.Tensor]) -> Resident:
    """Make the same, in ops, from `Layout.arrays`, also for remote processes."""
    tensors = dict(arrays)
    if IMAGE in tensors and layout.normalised(split):
        tensors[IMAGE] = normalised_in_blocks(tensors[IMAGE], layout.info, channels_last=layout.channels_last)
    return Resident(layout, tensors)
