"""Dataset as tensors on the device, batch by batch.

models/base.py describes what a model gets (`Columns`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.job import Job
from ...data.base import IMAGE, LABEL, DataInfo, Dataset, Split
from ...data.columns import LENGTHS, Column
from ...data.features import read_column
from ...data.preprocessing import Changes, apply_changes, normal_line
from ...data.sampler import Batches
from ...models.base import ModelSpec
from ..vectors import only_or_named

# Normalisation equals `Dataset.inputs` to the bit; images_bchw are uint8 [batch, channels, height, width], in any order in memory.

CHUNK_ELEMENTS = 2**18  # a second-level cache holds their float64 values: 64 × 224 × 224 × 3 take 4 ms on two cores, in one piece 30 ms


class Normaliser:
    """Computation of (pixel / 255 − mean) / std in float64, rounded to float32.

    A line replaces it if that gives the same bits.
    """

    def __init__(self, info: DataInfo, device: torch.device, *, channels_last: bool) -> None:
        self._shape = info.input_shape
        self._device, self._channels_last = device, channels_last
        line = normal_line(info.mean, info.std)
        self._line = None if line is None else tuple(self._tiled(values_c) for values_c in line)
        self._mean, self._std = (self._tiled(np.array(values)) for values in (info.mean, info.std))

    def _tiled(self, values_c: NDArray[np.float64]) -> torch.Tensor:
        tiled = np.tile(values_c, self._shape[2]) if self._channels_last else values_c[:, None]
        return torch.from_numpy(np.ascontiguousarray(tiled)).to(self._device)

    def empty(self, count: int) -> torch.Tensor:
        """Return memory for `count` normalised images.

        Its shape is [n, h, w · c] channels last, else [n, c, h · w].
        """
        channels, height, width = self._shape
        rows = (height, width * channels) if self._channels_last else (channels, height * width)
        return torch.empty(count, *rows, device=self._device)

    def as_images(self, rows: torch.Tensor) -> torch.Tensor:
        """Return memory from `empty` as float32 [n, c, h, w]."""
        channels, height, width = self._shape
        if self._channels_last:
            return rows.view(-1, height, width, channels).permute(0, 3, 1, 2)
        return rows.view(-1, channels, height, width)

    def convert(self, images_bchw: torch.Tensor, out: torch.Tensor) -> None:
        """Normalise images into memory from `empty`; fastest if they lie in the same order."""
        images = images_bchw.permute(0, 2, 3, 1) if self._channels_last else images_bchw
        step = len(out) if self._device.type != "cpu" else max(1, CHUNK_ELEMENTS // math.prod(self._shape))
        for first in range(0, len(out), step):
            rows = out[first : first + step]
            values = images[first : first + step].reshape(rows.shape).to(torch.float64)
            rows.copy_(self._normal(values))

    def _normal(self, values: torch.Tensor) -> torch.Tensor:
        if self._line is None:
            return values.div_(255.0).sub_(self._mean).div_(self._std)
        factor, summand = self._line
        return torch.addcmul(summand, values, factor, out=values)


def change(images_bchw: torch.Tensor, changes: Changes) -> torch.Tensor:
    """Return changed copies of images on their device; see `apply_changes`."""
    if images_bchw.device.type == "cpu":
        return torch.from_numpy(apply_changes(images_bchw.numpy(), changes))
    return gather_changed(images_bchw, torch.from_numpy(changes).to(images_bchw.device, torch.int64))


def gather_changed(images_bchw: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
    """Apply `changes` int64 [b, 3] to all images in one operation, which suits a GPU."""
    batch, channels, height, width = images_bchw.shape
    dy, dx, flip = (changes[:, column, None] for column in range(3))
    columns = torch.arange(width, device=images_bchw.device)
    rows_bh = torch.arange(height, device=images_bchw.device) - dy
    columns_bw = torch.where(flip.bool(), width - 1 - columns, columns) - dx
    inside = ((rows_bh >= 0) & (rows_bh < height))[:, :, None] & ((columns_bw >= 0) & (columns_bw < width))[:, None, :]
    places = rows_bh.clamp(0, height - 1)[:, :, None] * width + columns_bw.clamp(0, width - 1)[:, None, :]
    chosen = places.view(batch, 1, -1).expand(batch, channels, -1)
    return images_bchw.reshape(batch, channels, -1).gather(2, chosen).view_as(images_bchw) * inside[:, None]


FLOAT_LIMIT_BYTES = 2**30  # larger splits stay uint8, normalised by batch
SMALL_ELEMENTS = 2**15  # larger images stay uint8: normalising them costs nothing measurable
BLOCK_BYTES = 2**20  # fits a second-level cache: logistic regression makes 21,500 instead of 17,200 updates/s on one core
Tensors: TypeAlias = Sequence[torch.Tensor]
Columns: TypeAlias = torch.Tensor | dict[str, torch.Tensor]  # one column of a fixed shape, or tensors by name
Batch = tuple[Columns, Columns]  # inputs, target


class ResidentColumn(Protocol):
    """A column of a split in the device's memory."""

    example_bytes: int

    def span(self, start: int, stop: int) -> Columns:
        """Return the examples start … stop − 1 as stored, valid until the next call."""

    def batches(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[Columns]:
        """Return the examples at `chosen`, int64, in batches of the given sizes.

        `changes` are made on images.
        """


class _Numbers:
    """A column of a fixed shape: whole numbers as int64, others as float32."""

    def __init__(self, column: Column, device: torch.device) -> None:
        self._values = _numbers(column.values).to(device)
        self.example_bytes = self._values.element_size() * math.prod(self._values.shape[1:])

    def _as_read(self, rows: torch.Tensor, changes: Changes | None) -> torch.Tensor:
        return rows

    def span(self, start: int, stop: int) -> torch.Tensor:
        return self._as_read(self._values[start:stop], None)

    def batches(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Tensors:
        batches: Tensors = self._as_read(self._values.index_select(0, chosen), changes).split(sizes)
        return batches


class _Images(_Numbers):
    """Images: normalised as `Normaliser.empty` lays them, or as stored, uint8 [n, h, w, c]."""

    def __init__(self, data: Dataset, split: Split, device: torch.device, *, channels_last: bool, changing: bool) -> None:
        size, elements = data.info.sizes[split], math.prod(data.info.input_shape)
        self.example_bytes = 4 * elements
        self._normaliser = Normaliser(data.info, device, channels_last=channels_last)
        self.normalised = not changing and elements <= SMALL_ELEMENTS and size * self.example_bytes <= FLOAT_LIMIT_BYTES
        images = share(data.images(split).transpose(0, 2, 3, 1)).to(device)
        if self.normalised:
            self._values = self._normaliser.empty(size)
            self._normaliser.convert(images.permute(0, 3, 1, 2), self._values)
        else:
            self._values = images
        self._room = self._normaliser.empty(0)

    def _normalise(self, images_bchw: torch.Tensor) -> torch.Tensor:
        """Normalise into memory that the next call overwrites.

        Fresh memory for 64 × 224 × 224 × 3 costs 10 ms a batch.
        """
        if len(self._room) < len(images_bchw):
            self._room = self._normaliser.empty(len(images_bchw))
        rows = self._room[: len(images_bchw)]
        self._normaliser.convert(images_bchw, rows)
        return self._normaliser.as_images(rows)

    def _as_read(self, rows: torch.Tensor, changes: Changes | None) -> torch.Tensor:
        if self.normalised:
            return self._normaliser.as_images(rows)
        images_bchw = rows.permute(0, 3, 1, 2)
        return self._normalise(images_bchw if changes is None else change(images_bchw, changes))


class _Sequences:
    """A column of varying length: the stored values of all examples, and their offsets."""

    def __init__(self, name: str, column: Column, device: torch.device) -> None:
        self._name, self._device = name, device
        self._offsets = np.asarray(column.offsets)
        self._column = Column(column.values, self._offsets)
        longest = int(self._column.lengths.max(initial=1))
        self.example_bytes = 8 * longest * math.prod(column.values.shape[1:])

    def longest(self, start: int, stop: int) -> int:
        """Return the longest length of the examples start … stop − 1."""
        return int(np.diff(self._offsets[start : stop + 1]).max(initial=0))

    def _given(self, indices: NDArray[np.int64]) -> Columns:
        examples = self._column.take(indices)
        values, lengths = _numbers(examples.padded()), torch.from_numpy(examples.lengths)
        return {self._name: values.to(self._device), f"{self._name}{LENGTHS}": lengths.to(self._device)}

    def span(self, start: int, stop: int) -> Columns:
        return self._given(np.arange(start, stop))

    def batches(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[Columns]:
        indices = chosen.cpu().numpy()
        ends = np.cumsum(sizes)
        return [self._given(indices[end - size : end]) for end, size in zip(ends.tolist(), sizes, strict=True)]


class ResidentSplit:
    """The columns of a split that a model reads, in the device's memory."""

    def __init__(
        self,
        data: Dataset,
        split: Split,
        device: torch.device,
        *,
        inputs: Sequence[str] = (IMAGE,),
        target: str = LABEL,
        channels_last: bool = False,
        changing: bool = False,
    ) -> None:
        def resident(name: str) -> ResidentColumn:
            if name == IMAGE:
                return _Images(data, split, device, channels_last=channels_last, changing=changing)
            column = read_column(data, split, name)
            return _Numbers(column, device) if column.offsets is None else _Sequences(name, column, device)

        self._inputs, self._target = {name: resident(name) for name in inputs}, resident(target)
        self._device = device
        self.wait_seconds = 0.0

    @property
    def normalised(self) -> bool:
        """Whether images are held normalised."""
        return any(isinstance(held, _Images) and held.normalised for held in self._inputs.values())

    def longest(self, start: int, stop: int) -> int:
        """Return the longest length of the examples start … stop − 1 in any varying column.

        It is 0 without one.
        """
        columns = [held for held in (*self._inputs.values(), self._target) if isinstance(held, _Sequences)]
        return max((held.longest(start, stop) for held in columns), default=0)

    def span(self, start: int, stop: int) -> Batch:
        """Return the examples start … stop − 1 as stored, valid until the next call."""
        inputs = {name: held.span(start, stop) for name, held in self._inputs.items()}
        return only_or_named(inputs), self._target.span(start, stop)

    def blocks(self, batches: Batches) -> Iterator[list[Batch]]:
        """Yield the batches, several together, in a list valid until the next one.

        `wait_seconds` grows by the host's time.
        """
        start, stop = batches.offsets[0], batches.offsets[-1]
        indices = torch.from_numpy(batches.indices[start:stop].astype(np.int64)).to(self._device)
        changes = None if batches.changes is None else batches.changes[start:stop]
        offsets = (batches.offsets - start).tolist()
        largest = max(1, int(np.diff(batches.offsets).max(initial=0)))
        stride = max(1, BLOCK_BYTES // (largest * sum(held.example_bytes for held in self._inputs.values())))
        for first in range(0, len(batches), stride):
            began = time.perf_counter()
            bounds = offsets[first : first + stride + 1]
            chosen = indices[bounds[0] : bounds[-1]]
            sizes = [after - before for before, after in pairwise(bounds)]
            own_changes = None if changes is None else changes[bounds[0] : bounds[-1]]
            x = self._gathered(chosen, sizes, own_changes)
            y = self._target.batches(chosen, sizes, None)
            self.wait_seconds += time.perf_counter() - began
            yield list(zip(x, y, strict=True))

    def _gathered(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[Columns]:
        columns = [held.batches(chosen, sizes, changes) for held in self._inputs.values()]
        if len(columns) == 1:
            return columns[0]
        return [only_or_named(dict(zip(self._inputs, batch, strict=True))) for batch in zip(*columns, strict=True)]


def _numbers(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32 if values.dtype.kind == "f" else np.int64))


def resident_splits(job: Job, model: ModelSpec, data: Dataset, device: torch.device) -> dict[Split, ResidentSplit]:
    """Load both splits; channels last for convolutions.

    AlexNet's step on two cores then takes 750 ms, not 1050 (224 × 224).
    """
    channels_last = any(len(parameter.shape) == 4 for parameter in model.parameters)
    changing = job.augment != "none"

    def split(name: Split, *, changing: bool) -> ResidentSplit:
        return ResidentSplit(data, name, device, inputs=model.inputs, target=model.target, channels_last=channels_last, changing=changing)

    return {"train": split("train", changing=changing), "test": split("test", changing=False)}


def part_of(tensors: Columns, begin: int, end: int) -> Columns:
    """Return the examples begin … end − 1 of a batch's inputs or target."""
    return {name: tensor[begin:end] for name, tensor in tensors.items()} if isinstance(tensors, dict) else tensors[begin:end]


def share(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor on the array's memory, which is never written.

    A read-only map stays shared by the node's tasks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))
