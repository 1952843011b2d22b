"""What a model is, apart from any framework: parameters with names, shapes and initial values, a loss and its metrics.

Canonical layouts: dense weights ``[out, in]``, convolutions ``OIHW``, images ``NCHW``. A backend converts at its border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.base import DataInfo

__all__ = ["Array", "BuildModel", "ModelSpec", "ParameterSpec", "initial_values"]

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: canonical name, shape in canonical layout, and how its initial values are drawn.

    Initial values are uniform in ±`bound`; a bound of 0 means zeros.
    """

    name: str
    shape: tuple[int, ...]
    bound: float = 0.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as numpy sees it. `loss` names the loss function; `classes` is the number of logits of a classifier.

    `input_shape` is the shape of one example, channels first. `multiply_adds` is the number of multiplications with a weight that one
    example's forward pass takes; a model that uses its weights more than once (a convolution) says so, else each counts once.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    input_shape: tuple[int, ...]
    classes: int
    loss: str = "cross_entropy"
    multiply_adds: int | None = None

    @property
    def size(self) -> int:
        """Number of trained numbers."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def training_flops(self) -> int:
        """Floating-point operations of one example's training: two a multiply-add, and the backward pass costs two forward passes."""
        return 6 * (self.size if self.multiply_adds is None else self.multiply_adds)

    def initial(self, seed: int) -> dict[str, Array]:
        """Return the initial values by canonical name; the same for every backend, mode and number of workers."""
        return initial_values(self.parameters, seed)


BuildModel = Callable[[DataInfo], ModelSpec]
"""What a model's `build` is: from the shape of the data to the model that fits it."""


def initial_values(parameters: tuple[ParameterSpec, ...], seed: int) -> dict[str, Array]:
    """Draw initial values, float32: each parameter from its own stream (seed, position), so that adding one changes no other."""
    values: dict[str, Array] = {}
    for position, parameter in enumerate(parameters):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, position])))
        uniform = generator.random(parameter.shape, dtype=np.float64)
        values[parameter.name] = ((2.0 * uniform - 1.0) * parameter.bound).astype(np.float32)
    return values
