"""Components of a step, repeated by themselves when training is over: on a sync rank and on an async worker."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...data.sampler import Batches
from ..timing import Calibrator, Exchange
from .data import ColumnTensors, ResidentSplit

__all__ = ["SMALL_ELEMENTS", "make_calibrator"]

SMALL_ELEMENTS = 16
"""Of a small all-reduce, for each rank. gloo leaves messages out where a vector has too few elements to be cut for every rank: two
ranks reduce one element in 0.3 ms, and eight or a thousand in 1.2 ms."""

Compute = Callable[[ColumnTensors, ColumnTensors, Batches], object]
"""Computes on a batch that has been gathered: inputs, target, and the same as the only one of some batches."""


def make_calibrator(data: ResidentSplit, batches: Batches, compute: Compute, exchange: Exchange | None, device: torch.device) -> Calibrator:
    """Return what repeats the components; see `Calibrator`."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return Calibrator(
        batches,
        lambda some: (batch for block in data.blocks(some) for batch in block),
        lambda gathered, batch: compute(gathered[0], gathered[1], batch),
        exchange,
        settle,
    )
