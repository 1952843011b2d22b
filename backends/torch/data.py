"""The dataset as tensors on the device, handed out batch by batch. Shapes: x_bchw [batch, channels, height, width]; y_b [batch]."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.job import Job
from ...data.augment import Changes
from ...data.base import Dataset, Split
from ...data.sampler import Batches
from ...models.base import ModelSpec
from .preprocessing import Normaliser, change

__all__ = ["Batch", "ResidentSplit", "resident_splits", "share"]

FLOAT_LIMIT_BYTES = 2**30
"""A split is kept normalised, as float32, up to this size; beyond it as uint8 (a quarter) and normalised batch by batch."""

SMALL_ELEMENTS = 2**15
"""Images of more pixels than this (three channels of 104 × 104) stay uint8 in any case: what a step computes on each is so much that
normalising it costs nothing that could be measured, and they would take four times the memory."""

BLOCK_BYTES = 2**20
"""Batches are gathered several at once, about this much: it fits a second-level cache, and one gather for 32 batches of 10 × 784
costs less than 32 (21,500 instead of 17,200 updates per second with logistic regression on one core)."""

Batch = tuple[torch.Tensor, torch.Tensor]


class ResidentSplit:
    """One split in the device's memory: normalised as `Normaliser.empty` lays it, or as stored, uint8 [n, h, w, c]."""

    def __init__(self, data: Dataset, split: Split, device: torch.device, *, channels_last: bool = False, changing: bool = False) -> None:
        """Load the split. `channels_last`: how its images lie in memory. `changing`: batches carry changes of the stored pixels."""
        size, elements = data.info.sizes[split], math.prod(data.info.input_shape)
        self._example_bytes = 4 * elements
        self._normaliser = Normaliser(data.info, device, channels_last=channels_last)
        self.normalised = not changing and elements <= SMALL_ELEMENTS and size * self._example_bytes <= FLOAT_LIMIT_BYTES
        images = share(data.images(split).transpose(0, 2, 3, 1)).to(device)
        if self.normalised:
            self._x = self._normaliser.empty(size)
            self._normaliser.convert(images.permute(0, 3, 1, 2), self._x)
        else:
            self._x = images
        self._room = self._normaliser.empty(0)
        self._y = torch.tensor(np.asarray(data.labels(split)), dtype=torch.int64, device=device)
        self._device = device
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        return len(self._y)

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

    def span(self, start: int, stop: int) -> Batch:
        """Return the examples start … stop − 1 in stored order, unchanged; they are valid until the next are asked for."""
        return self._as_read(self._x[start:stop], None), self._y[start:stop]

    def blocks(self, batches: Batches) -> Iterator[list[Batch]]:
        """Yield the batches in order, several at a time; a batch may be empty. A block is valid until the next is asked for.

        `wait_seconds` grows by the time that gathering took, as the host sees it.
        """
        start, stop = batches.offsets[0], batches.offsets[-1]
        indices = torch.from_numpy(batches.indices[start:stop].astype(np.int64)).to(self._device)
        changes = None if batches.changes is None else batches.changes[start:stop]
        offsets = (batches.offsets - start).tolist()
        largest = max(1, int(np.diff(batches.offsets).max(initial=0)))
        stride = max(1, BLOCK_BYTES // (largest * self._example_bytes))
        for first in range(0, len(batches), stride):
            began = time.perf_counter()
            bounds = offsets[first : first + stride + 1]
            chosen = indices[bounds[0] : bounds[-1]]
            sizes = [after - before for before, after in pairwise(bounds)]
            own_changes = None if changes is None else changes[bounds[0] : bounds[-1]]
            x = self._as_read(self._x.index_select(0, chosen), own_changes).split(sizes)
            y = self._y.index_select(0, chosen).split(sizes)
            self.wait_seconds += time.perf_counter() - began
            yield list(zip(x, y, strict=True))


def resident_splits(job: Job, model: ModelSpec, data: Dataset, device: torch.device) -> dict[Split, ResidentSplit]:
    """Load both splits, as the job and the model want them.

    A model with convolutions reads images channels last: on two cores AlexNet's step takes 750 ms instead of 1050 with images of
    224 × 224. Its weights may stay in canonical layout: they are rearranged for each product in any case, and it makes no difference.
    """
    channels_last = any(len(parameter.shape) == 4 for parameter in model.parameters)
    changing = job.augment != "none"
    return {
        "train": ResidentSplit(data, "train", device, channels_last=channels_last, changing=changing),
        "test": ResidentSplit(data, "test", device, channels_last=channels_last),
    }


def share(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor on the array's own memory: a read-only map stays shared by the node's tasks, and is never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))
