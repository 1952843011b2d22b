"""What a framework has to compute of a model, with numpy arrays on both sides: the whole of what `ArrayBackend` asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...core.errors import UsageError
from ...data.base import IMAGE, LABEL
from ...models.base import Array, ModelSpec
from ...models.objectives import CROSS_ENTROPY
from ..capabilities import Device
from ..vectors.gathering import ColumnArrays

__all__ = ["ArrayModel", "Batch", "Gradients", "Outputs", "refuse_other_columns", "refuse_own_losses"]

Values = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples that are computed together: at least one.

    `inputs` and `target` are as models/base.py has them for a forward function, in numpy: images normalised, float32 [n, c, h, w], and
    labels int64 [n]; other whole numbers int64, others float32. `indices` int32 [n] are the examples' numbers in their split. `step` is the
    update, counted from the start of the run, and `micro_batch` the number among those of the update: dropout depends on them.
    """

    inputs: ColumnArrays
    target: ColumnArrays
    indices: NDArray[np.int32]
    step: int = 0
    micro_batch: int = 0

    def __len__(self) -> int:
        return len(self.indices)


class Gradients(NamedTuple):
    """Of a training pass: the loss, its gradient by each parameter's name, and the new values of those buffers that have changed."""

    loss: float
    parameters: Mapping[str, ArrayLike]
    buffers: Mapping[str, ArrayLike] = {}


@dataclass(frozen=True, slots=True)
class Outputs:
    """Of a pass that trains nothing: the forward function's result, of a classifier logits [n, classes]; and of each example the loss [n].

    `sums` are further numbers of each example, [n] by the name of the objective's sum, such as those of the model's `example_sums`. Counts
    of examples and tokens, and a classifier's ``correct``, need not be among them.
    """

    logits: ArrayLike
    losses: ArrayLike
    sums: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


class ArrayModel(Protocol):
    """One model on one device. Parameters and buffers are float32 by canonical name, in canonical layout, and are not to be written to."""

    device_used: Device

    def gradients(self, parameters: Values, buffers: Values, batch: Batch, weight: float) -> Gradients:
        """Return Σ of the examples' losses / `weight`, with its gradients: `weight` is what the whole update's examples weigh together."""
        ...

    def outputs(self, parameters: Values, buffers: Values, batch: Batch) -> Outputs:
        """Return what an evaluation and a prediction need."""
        ...


def refuse_other_columns(spec: ModelSpec, backend: str) -> None:
    """Raise UsageError for a model that reads anything but images and their labels, for a backend that knows these alone."""
    if (*spec.inputs, spec.target) != (IMAGE, LABEL):
        read = ", ".join((*spec.inputs, spec.target))
        raise UsageError(f"model: {spec.name!r} reads {read}; backend {backend} knows images and labels alone.")


def refuse_own_losses(spec: ModelSpec, backend: str) -> None:
    """Raise UsageError for a model with a loss of its own, for a backend that computes the cross entropy of one label an example alone."""
    if spec.objective.loss != CROSS_ENTROPY:
        raise UsageError(f"model: {spec.name!r} has the loss {spec.objective.loss!r}; backend {backend} knows {CROSS_ENTROPY} alone.")
