"""Components of a step, repeated by themselves when training is over: on a sync rank and on an async worker; see `Session.calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Protocol

import torch

from ...data.sampler import Batches
from ..base import CalibrationOrder
from ..timing import repeat
from .data import Batch, ColumnTensors, ResidentSplit

__all__ = ["Calibrator"]

SMALL_ELEMENTS = 16
"""Of a small all-reduce, for each rank. gloo leaves messages out where a vector has too few elements to be cut for every rank: two
ranks reduce one element in 0.3 ms, and eight or a thousand in 1.2 ms."""

Step = Callable[[], object]
Compute = Callable[[ColumnTensors, ColumnTensors, Batches], object]
"""Computes on a batch that has been gathered: inputs, target, and the same as the only one of some batches."""


class Exchange(Protocol):
    """What a step exchanges with other tasks."""

    def whole(self) -> None:
        """Exchange it once."""
        ...

    def small(self) -> None:
        """Exchange a few bytes in place of each message."""
        ...


class Calibrator:
    """Carries out orders. `batches` are those to gather, and the first of them is the one to compute on.

    `exchange` is None where there is nobody to exchange with.
    """

    def __init__(self, data: ResidentSplit, batches: Batches, compute: Compute, exchange: Exchange | None, device: torch.device) -> None:
        self._data, self._batches, self._compute, self._device = data, batches, compute, device
        self._exchanges: dict[str, Step] = {} if exchange is None else {"communicate": exchange.whole, "message": exchange.small}

    def run(self, order: CalibrationOrder, component: str | None = None) -> tuple[int, float]:
        """Return how often the component was repeated and the seconds that it took. Raises ValueError for one that does not exist here.

        `component` is what the order's is called here, where that is another name: also ``step``, which computes on the next batch.
        """
        component = component or order.component
        step = self._step(component)

        def carry_out(times: int) -> None:
            for _ in range(times):
                step()
            self._settle()

        if component in self._exchanges or component == "step":
            step()  # whoever is early waits here, before the clock starts
        self._settle()
        return repeat(order, carry_out)

    def _settle(self) -> None:
        """Wait until the device has done everything."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _step(self, name: str) -> Step:
        if name == "data":
            return self._gather()
        if name in ("compute", "half"):
            return self._computing(self._first(half=name == "half"))
        if name == "step":
            return self._whole()
        if name not in self._exchanges:
            raise ValueError(f"there is no component {name!r} of a step here")
        return self._exchanges[name]

    def _gather(self) -> Callable[[], Batch]:
        """Return what hands out the next batch, and gathers them in blocks as training does."""

        def batches() -> Iterator[Batch]:
            while True:
                for block in self._data.blocks(self._batches):
                    yield from block

        return batches().__next__

    def _whole(self) -> Step:
        """Return what computes on the next batch, fresh from memory as in training."""
        gather, each = self._gather(), cycle([self._batches.slice(place, 1) for place in range(len(self._batches))])
        return lambda: self._compute(*gather(), next(each))

    def _first(self, *, half: bool) -> Batches:
        first = self._batches.slice(0, 1)
        if not half:
            return first
        start, stop = first.offsets.tolist()
        offsets = first.offsets.copy()
        offsets[1] = start + (stop - start) // 2
        return replace(first, offsets=offsets)

    def _computing(self, batch: Batches) -> Step:
        ((x, y),) = next(iter(self._data.blocks(batch)))
        return lambda: self._compute(x, y, batch)
