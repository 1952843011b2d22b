"""What a model is, apart from any framework: parameters with names, shapes and initial values, a loss and its metrics.

Canonical layouts: dense weights ``[out, in]``, convolutions ``OIHW``, images ``NCHW``. A backend converts at its border.

A model's forward function, one a framework (``models/<name>/<backend>.py``), is ``forward(parameters, x_bchw, context) -> logits_bk``:
`parameters` by canonical name in canonical layout, `x_bchw` float32 normalised, `context` a `ForwardContext`, logits float32.

Of a model that reads other columns than ``image``, `x` is what `ModelSpec.inputs` names: the tensor [batch, …] itself where that is one
column of a fixed shape, else a mapping from names to tensors. Of a column whose length varies it has two: its name, [batch, longest, …]
with zeros behind each example, and the name with ``_lengths``, [batch]. Whole numbers are int32 on TensorFlow and int64 on torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from ..data.base import IMAGE, LABEL
from .objectives import CLASSIFICATION, Objective

__all__ = ["Array", "BuildModel", "ForwardContext", "ModelSpec", "ParameterSpec", "initial_values"]

Array = NDArray[np.float32]

Tensor = TypeVar("Tensor")

_NAME = re.compile(r"[A-Za-z0-9][\w/-]*(\.[\w/-]+)*", re.ASCII)
"""What torch's modules and TensorFlow's scopes both accept as a name."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter (or buffer): canonical name, shape in canonical layout, and how its initial values are drawn.

    Initial values are uniform in ±`bound`, or normal with the standard deviation `deviation`, or else all `constant`.
    """

    name: str
    shape: tuple[int, ...]
    bound: float = 0.0
    deviation: float = 0.0
    constant: float = 0.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as numpy sees it. `objective` is what training lowers and what an evaluation counts; `classes` is the number of logits.

    `input_shape` is the shape of one image, channels first; a model without images or classes has () and 0. `multiply_adds` is the
    number of multiplications with a weight that one example's forward pass takes, or of sequences one piece of it; a model that uses
    its weights more than once (a convolution) says so, else each counts once.
    `inputs` are the columns of the data that the forward function is given, `target` the one that the loss compares its result with.
    `logits_per_position` is how many logits there are for each element of the target, of a model that has a result for each: it bounds
    how much an evaluation computes at once. 0 where an example has one result.
    `settings` is whatever the model's `build` made of its arguments (`models.arguments`), a frozen dataclass of its own; forward functions
    find it in their context.
    Names of parameters and buffers follow `_NAME`, are distinct, and none is the beginning of another (``a`` and ``a.b``): every format of
    an export holds them.
    `buffers` are numbers that training changes without a gradient (running statistics of batch normalisation). `dropout` says whether
    the forward function draws at random while training; one that does without saying so is refused. `width` is the size of the vectors
    that a model of one such size computes with throughout (a Transformer's d_model), which the schedule ``noam`` needs; None where there is
    none.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]
    input_shape: tuple[int, ...] = ()
    classes: int = 0
    multiply_adds: int | None = None
    buffers: tuple[ParameterSpec, ...] = ()
    dropout: bool = False
    objective: Objective = CLASSIFICATION
    inputs: tuple[str, ...] = (IMAGE,)
    target: str = LABEL
    logits_per_position: int = 0
    settings: Any = None
    width: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for names that a checkpoint or an export could not hold."""
        names = [part.name for part in (*self.parameters, *self.buffers)]
        for position, name in enumerate(names):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                allowed = "letters, digits, '_', '-' and '/', with dots between parts, beginning with a letter or digit"
                raise UsageError(f"model: {self.name!r} has a parameter or buffer called {name!r}; allowed: {allowed}")
            if name in names[:position]:
                raise UsageError(f"model: {self.name!r} has two parameters or buffers called {name!r}; give each a name of its own")
            if longer := next((other for other in names if isinstance(other, str) and other.startswith(f"{name}.")), None):
                raise UsageError(f"model: {self.name!r} has {name!r} and {longer!r}: no export holds both; rename one of them")

    @property
    def size(self) -> int:
        """Number of trained numbers."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def buffers_size(self) -> int:
        """Number of numbers in all buffers."""
        return sum(buffer.size for buffer in self.buffers)

    @property
    def training_flops(self) -> int:
        """Floating-point operations of training on one example, of sequences on one piece.

        Two a multiply-add, and the backward pass costs two forward passes.
        """
        return 6 * (self.size if self.multiply_adds is None else self.multiply_adds)

    def initial(self, seed: int) -> dict[str, Array]:
        """Return the initial values by canonical name; the same for every backend, mode and number of workers."""
        return initial_values(self.parameters, seed)

    def initial_buffers(self) -> dict[str, Array]:
        """Return the buffers' initial values by canonical name."""
        return {buffer.name: np.full(buffer.shape, buffer.constant, np.float32) for buffer in self.buffers}


@dataclass(slots=True)
class ForwardContext(Generic[Tensor]):
    """What a forward function needs beside parameters and examples. A backend makes one for each pass.

    - `training`: whether this pass trains; otherwise dropout is off and batch normalisation uses the running statistics.
    - `buffers`: current values by canonical name. A training pass puts new values of those it changes into `updated`.
    - `compute`: the framework's number format for convolutions and matrix products (None: float32). Normalisation, softmax, losses
      and reductions stay float32 (docs/adding-a-model.md).
    - `dropout(x, rate, layer)`: zeroes elements with probability `rate` and scales the others by 1 / (1 − rate); `layer` numbers
      the model's dropout layers from 0. The identity where `training` is false. `x` is [batch, features], [batch, positions, features]
      or an attention's [batch, heads, queries, keys]. A rate below 1 and above 1 − 2⁻¹⁵ is taken for that (`dropout_masks.LARGEST_RATE`).
    - `settings`: those of the `ModelSpec`.
    """

    training: bool
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    compute: Any = None
    dropout: Callable[[Tensor, float, int], Tensor] = lambda x, rate, layer: x
    updated: dict[str, Tensor] = field(default_factory=dict)
    settings: Any = None


DRAWN_AT_ONCE = 1 << 18
"""Initial values that are drawn at once: bounds the memory beside the result."""

BuildModel = Callable[..., ModelSpec]
"""What a model's `build` is: from the shape of the data (`DataInfo`) to the model that fits it; keyword-only parameters: arguments."""


def initial_values(parameters: tuple[ParameterSpec, ...], seed: int) -> dict[str, Array]:
    """Draw initial values, float32: each parameter from its own stream (seed, position), so that adding one changes no other."""
    values: dict[str, Array] = {}
    for position, parameter in enumerate(parameters):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, position])))
        values[parameter.name] = _drawn(parameter, generator).reshape(parameter.shape)
    return values


def _drawn(parameter: ParameterSpec, generator: np.random.Generator) -> Array:
    """Return the parameter's values as a vector. They are drawn as float64, piece by piece: the largest dense layers have 10⁸ of them."""
    drawn = np.full(parameter.size, parameter.constant, np.float32)
    for begin in range(0, parameter.size if parameter.bound or parameter.deviation else 0, DRAWN_AT_ONCE):
        piece = drawn[begin : begin + DRAWN_AT_ONCE]
        if parameter.bound:
            piece[:] = (2.0 * generator.random(len(piece)) - 1.0) * parameter.bound
        else:
            piece[:] = generator.standard_normal(len(piece)) * parameter.deviation
    return drawn
