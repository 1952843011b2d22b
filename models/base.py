"""Framework-independent models: parameter specs, initial values, loss and metrics.

Canonical layouts: dense weights ``[out, in]``, convolutions ``OIHW``, images ``NCHW``; backends convert them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from ..core.job import Job
from ..data.base import IMAGE, LABEL
from .objectives import CLASSIFICATION, Objective

Array = NDArray[np.float32]
Method = Literal["native", "translated", "keras"]  # forward functions or modules of the framework; a graph of them; Keras layers
Tensor = TypeVar("Tensor")
_NAME = re.compile(r"[A-Za-z0-9][\w/-]*(\.[\w/-]+)*", re.ASCII)
"""Both torch's modules and TensorFlow's scopes accept these names."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter or buffer in canonical shape.

    Uniform in ±`bound`, or normal with std `deviation`, or all `constant`.
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
    """A model as numpy sees it.

    `objective`: the loss and the metrics; `classes`: number of logits.

    - `input_shape`: of one image, channels first; () without images.
    - `multiply_adds`: multiplications with a weight in an example's forward pass (of sequences, per piece); by default once per weight.
    - `inputs`: columns that the forward function reads. `target`: the column that the loss compares its result with.
    - `logits_per_position`: logits per element of the target, which bounds what an evaluation computes at once; else 0.
    - `settings`: what `build` made of its arguments, for forward functions, which find it in their context.
    - `buffers`: values that training changes without a gradient, such as running statistics.
    - `dropout`: whether the forward function draws at random while training; otherwise it must not.
    - `width`: size of the vectors computed with throughout (a Transformer's d_model), for the schedule ``noam``.
    - `source`: digest of the user's files that an imported model was made from.
    - `aliases`: further names of tied parameters and buffers in files of weights. `unsaved`: buffers that such files may lack.

    Names follow `_NAME`, are distinct, and none is a prefix of another (``a`` and ``a.b``), so every export format can hold them.
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
    source: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [part.name for part in (*self.parameters, *self.buffers)]
        for position, name in enumerate(names):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                allowed = "letters, digits, '_', '-' and '/', with dots between parts, beginning with a letter or digit"
                raise UsageError(f"model: {self.name!r} has a parameter or buffer called {name!r}; allowed: {allowed}")
            if name in names[:position]:
                raise UsageError(f"model: {self.name!r} has two parameters or buffers called {name!r}; give each a name of its own")
            if longer := next(
                (longer_name for longer_name in names if isinstance(longer_name, str) and longer_name.startswith(f"{name}.")), None
            ):
                raise UsageError(f"model: {self.name!r} has {name!r} and {longer!r}: no export holds both; rename one of them")

    @property
    def size(self) -> int:
        """Number of trained values."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def buffers_size(self) -> int:
        """Number of values in all buffers."""
        return sum(buffer.size for buffer in self.buffers)

    @property
    def training_flops(self) -> int:
        """FLOPs of training on one example (or piece): two per multiply-add, three forward passes."""
        return 6 * (self.size if self.multiply_adds is None else self.multiply_adds)

    def method(self, backend: str) -> Method:
        """Return how a backend carries the model out."""
        return "native"

    def refuse(self, job: Job) -> None:
        """Raise UsageError if the model is known not to train as the job asks."""

    def refuse_program(self) -> None:
        """Raise UsageError if the model's weights are all that can be exported."""

    def initial(self, seed: int) -> dict[str, Array]:
        """Return initial values by canonical name, which depend on the seed only."""
        return initial_values(self.parameters, seed)

    def initial_buffers(self, seed: int = 0) -> dict[str, Array]:
        """Return the buffers' initial values by canonical name.

        Those of imported models may depend on the seed.
        """
        return {buffer.name: np.full(buffer.shape, buffer.constant, np.float32) for buffer in self.buffers}


@dataclass(slots=True)
class ForwardContext(Generic[Tensor]):
    """The context of a forward pass, in addition to parameters and examples.

    A model's forward function, one per framework (``models/<name>/<backend>.py``), is ``forward(parameters, x_bchw, context) ->
    logits_bk``: `parameters` by canonical name in canonical layout, `x_bchw` normalised, float32, logits float32. For models that read
    columns other than ``image``, `x` has those of `ModelSpec.inputs`: the tensor [batch, …] of a single column of fixed shape, else a
    mapping from names to tensors. A column of varying length has two: its name, [batch, longest, …] padded with zeros, and the name with
    ``_lengths``, [batch]. Integers are int32 on TensorFlow and int64 on torch.

    - `training`: otherwise dropout is off and batch normalisation uses the running statistics.
    - `buffers`: current values by canonical name. A training pass puts new values of those it changes into `updated`.
    - `compute`: the framework's number format for convolutions and matrix products (None: float32). All else stays float32.
    - `dropout(x, rate, layer)`: zeroes elements with probability `rate` and scales the others by 1 / (1 − rate); `layer` numbers the
      model's dropout layers from 0. The identity unless `training`. `x` is [batch, features], [batch, positions, features] or
      [batch, heads, queries, keys]. Rates are at most 1 − 2⁻¹⁵ (`dropout_masks.MAX_RATE`).
    - `settings`: those of the `ModelSpec`.
    - `layers`: takes the framework's layers of a pass and returns what the network calls instead, to observe them.
    """

    training: bool
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    compute: Any = None
    dropout: Callable[[Tensor, float, int], Tensor] = lambda x, rate, layer: x
    updated: dict[str, Tensor] = field(default_factory=dict)
    settings: Any = None
    layers: Callable[[Any], Any] = lambda layers: layers


DRAW_CHUNK = 1 << 18  # bounds the memory of `initial_values`


def initial_values(parameters: tuple[ParameterSpec, ...], seed: int) -> dict[str, Array]:
    """Draw float32 values. Each parameter has its own stream, so adding one changes no other."""
    values: dict[str, Array] = {}
    for position, parameter in enumerate(parameters):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, position])))
        values[parameter.name] = _draw(parameter, generator).reshape(parameter.shape)
    return values


def _draw(parameter: ParameterSpec, generator: np.random.Generator) -> Array:
    """In pieces, as the float64 draws of the largest dense layers would take 10⁸ × 8 bytes."""
    drawn = np.full(parameter.size, parameter.constant, np.float32)
    for begin in range(0, parameter.size if parameter.bound or parameter.deviation else 0, DRAW_CHUNK):
        piece = drawn[begin : begin + DRAW_CHUNK]
        if parameter.bound:
            piece[:] = (2.0 * generator.random(len(piece)) - 1.0) * parameter.bound
        else:
            piece[:] = generator.standard_normal(len(piece)) * parameter.deviation
    return drawn
