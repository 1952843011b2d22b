"""Layers of a network one by one, each from the inputs and slopes of a tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from ..data.base import Dataset
from ..data.sampler import Batches
from ..models.base import ForwardContext, ModelSpec

Array = NDArray[Any]


class LayerOnTape(msgspec.Struct):
    """A layer of a tape: the operation, the number of inputs, and the names of its parameters."""

    operation: str
    inputs: int
    parameters: list[str]


class ReplayedPass(Protocol):
    """A backend's part: a model with parameters and buffers, on the CPU."""

    images_last: bool  # whether images have channels last between layers

    def columns(self, batches: Batches) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the inputs and the target of a batch, as training prepares them."""

    def forward(self, batches: Batches, context_layers: Callable[[Any], Any], step: int) -> ForwardContext[Any]:
        """Carry the forward function out while training, and return its context."""

    def tensor(self, array: Array) -> Any:
        """Return an array as a tensor."""

    def array(self, tensor: Any) -> Array:
        """Return a tensor as a float32 array."""

    def like(self, tensor: Any, result: Any) -> Any:
        """Return a tensor in the number format of another."""

    def derived(
        self, compute: Callable[[Sequence[Any]], Any], inputs: Sequence[Any], parameters: Sequence[str], slopes: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any], Mapping[str, Array]]:
        """Return results, and derivatives by inputs and parameters of results times slopes."""

    def nodes(self, batches: Batches, step: int, tape_arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return results and slopes of each node of an imported model's graph, from a tape's."""

    def loss(self, logits: Any, target: Mapping[str, Array]) -> tuple[Any, Any]:
        """Return the sum of losses, and its slope by the logits."""


class Replays(Protocol):
    """Further interface of a backend whose layers can be compared one by one."""

    def replayed(self, job: Job, spec: ModelSpec, data: Dataset, parameters: Mapping[str, Array], buffers: Mapping[str, Array]) -> Any:
        """Import the framework and return a `ReplayedPass`."""


class Replay:
    """Gives each layer of a network what the tape has, and keeps what it makes of it."""

    def __init__(self, replayed: ReplayedPass, layers: Sequence[LayerOnTape], tape: Mapping[str, Array]) -> None:
        self._pass, self._layers, self._tape = replayed, layers, tape
        self._position = 0
        self._context: ForwardContext[Any] | None = None
        self.results: dict[str, Array] = {}

    def around(self, layers: Any) -> _Observed:
        """Return what a network calls instead of these layers."""
        self._context = layers._context
        return _Observed(self, layers)

    @property
    def complete(self) -> bool:
        """Whether the network has called every layer of the tape."""
        return self._position == len(self._layers)

    def carry_out(self, operation: str, method: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Compute the next layer from the tape; others are carried out as they are."""
        if self._position >= len(self._layers) or self._layers[self._position].operation != operation:
            return method(*arguments, **options)
        number, layer = self._position, self._layers[self._position]
        self._position += 1
        rest = arguments[layer.inputs :]
        for place, given_tensor in enumerate(arguments[: layer.inputs]):
            self.results[f"{number}/given {place}"] = self._canonical(given_tensor)
        inputs = [self._laid(f"{number}/input {place}") for place in range(layer.inputs)]
        slopes = [self._laid(f"{number}/slope {place}") for place in range(self._count(f"{number}/slope "))]
        before = dict(self._context.updated) if self._context is not None else {}
        outputs, by_inputs, by_parameters = self._pass.derived(
            lambda tensors: method(*tensors, *rest, **options), inputs, layer.parameters, slopes
        )
        for place, output in enumerate(outputs):
            self.results[f"{number}/output{f' {place}' if place else ''}"] = self._canonical(output)
        for place, slope in enumerate(by_inputs):
            self.results[f"{number}/slope of input {place}"] = self._canonical(slope)
        self.results |= {f"{number}/gradient of {name}": value for name, value in by_parameters.items()}
        if self._context is not None:
            for name, value in self._context.updated.items():
                if before.get(name) is not value:
                    self.results[f"{number}/buffer {name}"] = self._pass.array(value)
        exact = [self._pass.like(self._laid(f"{number}/result {place}"), output) for place, output in enumerate(outputs)]
        return tuple(exact) if len(exact) > 1 or operation == "heads" else exact[0]

    def _count(self, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in self._tape)

    def _laid(self, name: str) -> Any:
        array = self._tape[name]
        return self._pass.tensor(np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if array.ndim == 4 and self._pass.images_last else array)

    def _canonical(self, tensor: Any) -> Array:
        array = self._pass.array(tensor)
        return array.transpose(0, 3, 1, 2) if array.ndim == 4 and self._pass.images_last else array


class _Observed:
    """Layers whose calls a `Replay` carries out."""

    def __init__(self, replay: Replay, layers: Any) -> None:
        self._replay, self._observed = replay, layers

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        method = getattr(self._observed, operation)
        return lambda *arguments, **options: self._replay.carry_out(operation, method, arguments, options)
