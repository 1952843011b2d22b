"""What a framework computes for a worker of the parameter server, on two flat vectors in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ...data.base import Split
from ...data.sampler import Batches
from ...exchange.parameter_server.shards import Vector
from ..capabilities import Device
from ..timing import Calibrator, Exchange

__all__ = ["Computation", "Computed"]

Computed = tuple[float, bool]
"""Of an update: the mean loss of its examples, and whether its gradient overflowed."""


class Computation(Protocol):
    """Called by one thread at a time.

    `values` and `gradient`, float32 [parameters + buffers], stay where they are: the network fills the one and sends from the other. A
    computation that has ended its warm-up has left nothing in them that counts, and its buffers begin as the values say.

    `loss_scale` is what losses are multiplied by from now on, None where none is scaled; the worker sets it to what the chief says.
    `precision_used` and `device_used` go into the summary.
    """

    values: Vector
    gradient: Vector
    loss_scale: float | None
    precision_used: str
    device_used: Device

    def gradients(self, batches: Batches, first_step: int) -> Iterator[Computed]:
        """Compute one update after another, of which batch i is update `first_step` + i, and yield each when it lies in `gradient`.

        That is the gradient of the mean loss by each parameter, clipped where the job says so, and for each buffer its value before less
        its value after. By the time the next is asked for, `values` are new ones; until then neither vector is touched.
        """
        ...

    def sums(self, split: Split, start: int, stop: int) -> Sequence[float]:
        """Return the sums of the model's objective over examples of a split, with `values`."""
        ...

    def calibrator(self, batches: Batches, exchange: Exchange) -> Calibrator:
        """Return what repeats the components of a step on these batches."""
        ...
