"""The dataset as tensors on the device, handed out batch by batch.

What a model is given of its columns (`ColumnTensors`) is described in models/base.py; of images with a class it is x_bchw [batch, channels,
height, width] and y_b [batch].
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.job import Job
from ...data.augment import Changes
from ...data.base import IMAGE, LABEL, Dataset, Split
from ...data.columns import LENGTHS, Column
from ...data.sampler import Batches
from ...models.base import ModelSpec
from .preprocessing import Normaliser, change

__all__ = ["Batch", "ColumnTensors", "ResidentSplit", "part_of", "resident_splits", "share"]

FLOAT_LIMIT_BYTES = 2**30
"""A split is kept normalised, as float32, up to this size; beyond it as uint8 (a quarter) and normalised batch by batch."""

SMALL_ELEMENTS = 2**15
"""Images of more pixels than this (three channels of 104 × 104) stay uint8 in any case: what a step computes on each is so much that
normalising it costs nothing that could be measured, and they would take four times the memory."""

BLOCK_BYTES = 2**20
"""Batches are gathered several at once, about this much: it fits a second-level cache, and one gather for 32 batches of 10 × 784
costs less than 32 (21,500 instead of 17,200 updates per second with logistic regression on one core)."""

ColumnTensors: TypeAlias = torch.Tensor | dict[str, torch.Tensor]
"""One column of a fixed shape, or tensors by name."""

Batch = tuple[ColumnTensors, ColumnTensors]
"""Inputs and target."""


class ResidentColumn(Protocol):
    """One column of a split in the device's memory."""

    example_bytes: int

    def span(self, start: int, stop: int) -> ColumnTensors:
        """Return the examples start … stop − 1 in stored order, unchanged; they are valid until the next are asked for."""
        ...

    def batches(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[ColumnTensors]:
        """Return the examples at `chosen`, int64, in batches of the given sizes; images are changed where there are `changes`."""
        ...


class ResidentImages:
    """Images: normalised as `Normaliser.empty` lays them, or as stored, uint8 [n, h, w, c]."""

    def __init__(self, data: Dataset, split: Split, device: torch.device, *, channels_last: bool, changing: bool) -> None:
        size, elements = data.info.sizes[split], math.prod(data.info.input_shape)
        self.example_bytes = 4 * elements
        self._normaliser = Normaliser(data.info, device, channels_last=channels_last)
        self.normalised = not changing and elements <= SMALL_ELEMENTS and size * self.example_bytes <= FLOAT_LIMIT_BYTES
        images = share(data.images(split).transpose(0, 2, 3, 1)).to(device)
        if self.normalised:
            self._x = self._normaliser.empty(size)
            self._normaliser.convert(images.permute(0, 3, 1, 2), self._x)
        else:
            self._x = images
        self._room = self._normaliser.empty(0)

    def _normalise(self, images_bchw: torch.Tensor) -> torch.Tensor:
        """Normalise stored images into memory that the next call overwrites: fresh memory for 64 × 224 × 224 × 3 costs 10 ms a batch."""
        if len(self._room) < len(images_bchw):
            self._room = self._normaliser.empty(len(images_bchw))
        rows = self._room[: len(images_bchw)]
        self._normaliser.convert(images_bchw, rows)
        return self._normaliser.as_images(rows)

    def _as_read(self, rows: torch.Tensor, changes: Changes | None) -> torch.Tensor:
        """Return examples as they are held, changed where there are `changes`, as the model reads them: float32 [n, c, h, w]."""
        if self.normalised:
            return self._normaliser.as_images(rows)
        images_bchw = rows.permute(0, 3, 1, 2)
        return self._normalise(images_bchw if changes is None else change(images_bchw, changes))

    def span(self, start: int, stop: int) -> torch.Tensor:
        """See `ResidentColumn.span`."""
        return self._as_read(self._x[start:stop], None)

    def batches(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[torch.Tensor]:
        """See `ResidentColumn.batches`."""
        found: Sequence[torch.Tensor] = self._as_read(self._x.index_select(0, chosen), changes).split(sizes)
        return found


class ResidentNumbers:
    """A column of a fixed shape: whole numbers as int64, others as float32."""

    def __init__(self, column: Column, device: torch.device) -> None:
        self._values = _numbers(column.values).to(device)
        self.example_bytes = self._values.element_size() * math.prod(self._values.shape[1:])

    def span(self, start: int, stop: int) -> torch.Tensor:
        """See `ResidentColumn.span`."""
        return self._values[start:stop]

    def batches(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[torch.Tensor]:
        """See `ResidentColumn.batches`."""
        found: Sequence[torch.Tensor] = self._values.index_select(0, chosen).split(sizes)
        return found


class ResidentSequences:
    """A column whose length varies: the values of all examples as they are stored, and where each example begins."""

    def __init__(self, name: str, column: Column, device: torch.device) -> None:
        self._name, self._device = name, device
        self._offsets = np.asarray(column.offsets)
        self._column = Column(column.values, self._offsets)
        longest = int(self._column.lengths.max(initial=1))
        self.example_bytes = 8 * longest * math.prod(column.values.shape[1:])

    def longest(self, start: int, stop: int) -> int:
        """Return how long the longest of the examples start … stop − 1 is."""
        return int(np.diff(self._offsets[start : stop + 1]).max(initial=0))

    def _given(self, indices: NDArray[np.int64]) -> ColumnTensors:
        examples = self._column.take(indices)
        values, lengths = _numbers(examples.padded()), torch.from_numpy(examples.lengths)
        return {self._name: values.to(self._device), f"{self._name}{LENGTHS}": lengths.to(self._device)}

    def span(self, start: int, stop: int) -> ColumnTensors:
        """See `ResidentColumn.span`."""
        return self._given(np.arange(start, stop))

    def batches(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[ColumnTensors]:
        """See `ResidentColumn.batches`; each batch is as long as its own longest example."""
        indices = chosen.cpu().numpy()
        ends = np.cumsum(sizes)
        return [self._given(indices[end - size : end]) for end, size in zip(ends.tolist(), sizes, strict=True)]


class ResidentSplit:
    """One split in the device's memory: the columns that a model reads."""

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
        """Load the split. `channels_last`: how its images lie in memory. `changing`: batches carry changes of the stored pixels."""

        def resident(name: str) -> ResidentColumn:
            if name == IMAGE:
                return ResidentImages(data, split, device, channels_last=channels_last, changing=changing)
            column = data.column(split, name)
            return ResidentNumbers(column, device) if column.offsets is None else ResidentSequences(name, column, device)

        self._inputs, self._target = {name: resident(name) for name in inputs}, resident(target)
        self._size, self._target_name = data.info.sizes[split], target
        self._device = device
        self.wait_seconds = 0.0

    @property
    def normalised(self) -> bool:
        """Whether images are held normalised."""
        return any(isinstance(held, ResidentImages) and held.normalised for held in self._inputs.values())

    def __len__(self) -> int:
        return self._size

    def longest(self, start: int, stop: int) -> int:
        """Return how long the longest of the examples start … stop − 1 is, in any column whose length varies; 0 where none does."""
        columns = [held for held in (*self._inputs.values(), self._target) if isinstance(held, ResidentSequences)]
        return max((held.longest(start, stop) for held in columns), default=0)

    def span(self, start: int, stop: int) -> Batch:
        """Return the examples start … stop − 1 in stored order, unchanged; they are valid until the next are asked for."""
        inputs = {name: held.span(start, stop) for name, held in self._inputs.items()}
        return _together(inputs), self._target.span(start, stop)

    def blocks(self, batches: Batches) -> Iterator[list[Batch]]:
        """Yield the batches in order, several at a time; a batch may be empty. A block is valid until the next is asked for.

        `wait_seconds` grows by the time that gathering took, as the host sees it.
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

    def _gathered(self, chosen: torch.Tensor, sizes: list[int], changes: Changes | None) -> Sequence[ColumnTensors]:
        """Return the inputs of each batch."""
        found = [held.batches(chosen, sizes, changes) for held in self._inputs.values()]
        if len(found) == 1:
            return found[0]
        return [_together(dict(zip(self._inputs, of_batch, strict=True))) for of_batch in zip(*found, strict=True)]


def _together(inputs: Mapping[str, ColumnTensors]) -> ColumnTensors:
    """Return the inputs as a forward function takes them."""
    if len(inputs) == 1:
        return next(iter(inputs.values()))
    named: dict[str, torch.Tensor] = {}
    for name, given in inputs.items():
        named |= given if isinstance(given, dict) else {name: given}
    return named


def _numbers(values: NDArray[Any]) -> torch.Tensor:
    """Return whole numbers as int64 and others as float32."""
    return torch.from_numpy(np.array(values, dtype=np.float32 if values.dtype.kind == "f" else np.int64))


def resident_splits(job: Job, model: ModelSpec, data: Dataset, device: torch.device) -> dict[Split, ResidentSplit]:
    """Load both splits, as the job and the model want them.

    A model with convolutions reads images channels last: on two cores AlexNet's step takes 750 ms instead of 1050 with images of
    224 × 224. Its weights may stay in canonical layout: they are rearranged for each product in any case, and it makes no difference.
    """
    channels_last = any(len(parameter.shape) == 4 for parameter in model.parameters)
    changing = job.augment != "none"

    def split(name: Split, *, changing: bool) -> ResidentSplit:
        return ResidentSplit(data, name, device, inputs=model.inputs, target=model.target, channels_last=channels_last, changing=changing)

    return {"train": split("train", changing=changing), "test": split("test", changing=False)}


def part_of(given: ColumnTensors, begin: int, end: int) -> ColumnTensors:
    """Return the examples begin … end − 1 of a batch's inputs or target."""
    return {name: tensor[begin:end] for name, tensor in given.items()} if isinstance(given, dict) else given[begin:end]


def share(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor on the array's own memory: a read-only map stays shared by the node's tasks, and is never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))
