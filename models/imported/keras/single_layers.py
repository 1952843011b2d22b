"""Layers of a Keras model one by one, with derivatives: in float64 as a tape, or from one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..graph import NodeOnTape
from .library import keras_on

Array = NDArray[Any]
Arrays = dict[str, Array]
Pull = Callable[[Sequence[Any]], Sequence[Any]]
RESULT = "result"
_OPTIONS = ("axis", "data_format", "epsilon", "momentum", "padding", "rate")  # what a layer's formula depends on
_FUSED = ("Dense", "EinsumDense")  # beside convolutions: their activations are computed by themselves


class Derivatives(Protocol):
    """A framework's part. Missing derivatives are None."""

    def leaf(self, value: Any) -> Any:
        """Return a copy of a tensor, which derivatives can be taken by."""

    def part(self, compute: Callable[[], Sequence[Any]], leaves: Sequence[Any]) -> tuple[Sequence[Any], Pull]:
        """Return results of a part, which `whole` leaves out, and its derivatives by slopes."""

    def whole(self, results: Sequence[Any], slopes: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Return derivatives by leaves, through what is computed between the parts."""


@dataclass
class _Part:
    """A part of a pass: a layer, or its activation."""

    node: NodeOnTape
    arriving: list[Any]  # the inputs, as what comes before makes them
    names: list[str]  # of the weights
    shapes: list[tuple[int, ...]]  # of the inputs, and the weights
    pull: Pull
    leaves: list[Any]  # what the pass goes on with
    unclear: bool  # of equal elements, such as a ReLU's zeros, rounding takes one


class SingleLayers:
    """Carries each layer of a pass out by itself.

    Without a tape, `arrays` have exact results, ``N/output``, ``N/slope of input``, ``N/gradient of NAME``, ``N/buffer NAME``, and what a
    tape has: ``N/input``, ``N/result`` and ``N/slope``, float32. With a tape, each layer starts from these. ``N/given`` is what arrives,
    and shows what is computed between layers; that of ``result`` is the result. `names`: those of the weights, by identity. `moved`
    changes what each layer is computed from, in float64.
    """

    def __init__(
        self,
        framework: str,
        derivatives: Derivatives,
        names: Mapping[int, str],
        tape: Mapping[str, Array] | None,
        moved: Callable[[Any], Any] | None = None,
    ) -> None:
        self._keras, self._derivatives, self._names, self._tape = keras_on(framework), derivatives, names, tape
        self._moved, self._floats = moved, "float32" if tape is not None and moved is None else "float64"
        self._parts: list[_Part] = []
        self._result: NodeOnTape | None = None
        self._inside = False
        self.arrays: Arrays = {}

    @property
    def nodes(self) -> list[NodeOnTape]:
        """The parts in order."""
        return [*(part.node for part in self._parts), *([] if self._result is None else [self._result])]

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Within the block, layers that a model calls are carried out by themselves."""
        layer = self._keras.layers.Layer
        original = layer.__call__

        def call(called: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._is_whole(called):
                return original(called, *args, **kwargs)
            self._inside = True
            try:
                return self._carried_out(original, called, args, kwargs)
            finally:
                self._inside = False

        layer.__call__ = call
        try:
            yield
        finally:
            layer.__call__ = original

    def _is_whole(self, layer: Any) -> bool:
        if isinstance(layer, self._keras.layers.RNN) or not list(layer._flatten_layers(include_self=False)):
            return not isinstance(layer, self._keras.layers.InputLayer)
        return type(layer).__module__.startswith("keras.") and not isinstance(layer, self._keras.Model)

    def _carried_out(self, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind, name = type(layer), layer.path or layer.name
        activation = getattr(layer, "activation", None)
        separate = (
            activation is not None
            and not isinstance(activation, self._keras.layers.Layer)
            and activation is not self._keras.activations.linear
            and kind.__module__.startswith("keras.")
            and (kind.__name__ in _FUSED or ".convolutional." in kind.__module__)
        )
        if activation is None or not separate:
            return self._part(kind.__name__, name, lambda *a, **k: original(layer, *a, **k), args, kwargs, layer)
        layer.activation = self._keras.activations.linear
        try:
            result = self._part(kind.__name__, name, lambda *a, **k: original(layer, *a, **k), args, kwargs, layer)
        finally:
            layer.activation = activation
        activated = self._part(getattr(activation, "__name__", "activation"), name, activation, (result,), {}, None)
        _copy_mask(result, activated)
        return activated

    def _part(
        self, operation: str, name: str, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], layer: Any
    ) -> Any:
        keras, place = self._keras, str(len(self._parts))
        flat = keras.tree.flatten((args, kwargs))
        places = [position for position, value in enumerate(flat) if self._is_float(value)]
        arriving = [flat[position] for position in places]
        for position, value in enumerate(arriving):
            self.arrays[f"{place}/given {position}"] = self._array(value)
        leaves = [self._leaf(f"{place}/input {position}", value, is_input=True) for position, value in enumerate(arriving)]
        flat = list(flat)
        for position, leaf in zip(places, leaves, strict=True):
            flat[position] = leaf
        args, kwargs = keras.tree.pack_sequence_as((args, kwargs), flat)
        result, outputs, pull, weights = self._computed(place, lambda: compute(*args, **kwargs), layer, leaves)
        for position, output in enumerate(outputs):
            self.arrays[f"{place}/output {position}"] = self._array(output)
        exact = [self._leaf(f"{place}/result {position}", output) for position, output in enumerate(outputs)]
        unclear = "MaxPool" in operation
        shapes = [*(tuple(leaf.shape) for leaf in leaves), *weights.values()]
        sizes = [math.prod(value.shape) for value in (*leaves, *outputs)]
        node = NodeOnTape(place, name, operation, sum(sizes), options=_options(layer))
        part = _Part(node, arriving, list(weights), shapes, pull, exact, unclear)
        self._parts.append(part)
        if self._tape is not None:
            slopes = [self._tape.get(f"{place}/slope {position}") for position in range(len(outputs))]
            self._keep_derivatives(part, [None if slope is None else self._changed(self._tensor(slope)) for slope in slopes])
            part.pull = _no_more
        waiting = iter(exact)
        return keras.tree.map_structure(lambda value: next(waiting) if self._is_float(value) else value, result)

    def _computed(
        self, place: str, compute: Callable[[], Any], layer: Any, leaves: Sequence[Any]
    ) -> tuple[Any, Sequence[Any], Pull, dict[str, tuple[int, ...]]]:
        """Return a part's result, its float tensors, their derivatives, and its weights' shapes."""
        from keras.src.backend.common.stateless_scope import get_stateless_scope

        scope = get_stateless_scope()
        trained = [] if layer is None else [weight for weight in layer.trainable_weights if id(weight) in self._names]
        carried = [] if layer is None else [weight for weight in layer.non_trainable_weights if id(weight) in self._names]
        before = {id(weight): scope.get_current_value(weight) for weight in (*trained, *carried)}
        weights = [self._derivatives.leaf(self._changed(before[id(weight)])) for weight in trained]
        scope.state_mapping |= {id(weight): leaf for weight, leaf in zip(trained, weights, strict=True)}
        results: list[Any] = []

        def floats() -> Sequence[Any]:
            results.append(compute())
            return [value for value in self._keras.tree.flatten(results[0]) if self._is_float(value)]

        outputs, pull = self._derivatives.part(floats, [*leaves, *weights])
        scope.state_mapping |= {id(weight): before[id(weight)] for weight in trained}
        for weight in carried:
            if (value := scope.get_current_value(weight)) is not before[id(weight)]:
                self.arrays[f"{place}/buffer {self._names[id(weight)]}"] = self._array(value)
        return results[0], outputs, pull, {self._names[id(weight)]: tuple(weight.shape) for weight in trained}

    def end(self, result: Any) -> None:
        """Keep the result, which may be computed from that of the last layer."""
        self.arrays[f"{RESULT}/given 0"] = self._array(result)
        self._result = NodeOnTape(RESULT, RESULT, RESULT, math.prod(result.shape))

    def backward(self, result: Any, slope: Any) -> None:
        """Keep the slopes of a tape, from that of the result."""
        slopes: dict[int, Any] = {}
        leaves = [leaf for part in self._parts for leaf in part.leaves]

        def spread(results: Sequence[Any], of_results: Sequence[Any]) -> None:
            for leaf, part in zip(leaves, self._derivatives.whole(results, of_results, leaves), strict=True):
                if part is not None:
                    slopes[id(leaf)] = slopes[id(leaf)] + part if id(leaf) in slopes else part

        spread([result], [slope])
        for part in reversed(self._parts):
            arriving = [slopes.get(id(leaf)) for leaf in part.leaves]
            if part.unclear:
                zeros = [self._keras.ops.cast(leaf != 0, leaf.dtype) for leaf in part.leaves]
                arriving = [None if value is None else value * zero for value, zero in zip(arriving, zeros, strict=True)]
            rounded = [None if value is None else self._rounded(value) for value in arriving]
            for position, value in enumerate(rounded):
                if value is not None:
                    self.arrays[f"{part.node.place}/slope {position}"] = self._array(value).astype(np.float32)
            derivatives = self._keep_derivatives(part, rounded)
            sent = [(value, self._rounded(slope)) for value, slope in zip(part.arriving, derivatives, strict=False) if slope is not None]
            if sent:
                spread([value for value, _ in sent], [slope for _, slope in sent])

    def _keep_derivatives(self, part: _Part, slopes: Sequence[Any]) -> Sequence[Any]:
        if not slopes or all(slope is None for slope in slopes):
            return []
        derivatives, count = part.pull(slopes), len(part.arriving)
        texts = [*(f"slope of input {position}" for position in range(count)), *(f"gradient of {name}" for name in part.names)]
        for text, derivative, shape in zip(texts, derivatives, part.shapes, strict=True):
            self.arrays[f"{part.node.place}/{text}"] = np.zeros(shape) if derivative is None else self._array(derivative)
        return derivatives[:count]

    def _changed(self, value: Any) -> Any:
        return value if self._moved is None else self._moved(value)

    def _leaf(self, name: str, value: Any, *, is_input: bool = False) -> Any:
        """Return what a layer or the pass goes on with: the tape's, or what was computed, rounded."""
        if self._tape is None:
            self.arrays[name] = self._array(value).astype(np.float32)
            leaf = self._derivatives.leaf(self._rounded(value))
        else:
            exact = self._tensor(self._tape[name])
            leaf = self._derivatives.leaf(self._changed(exact) if is_input else exact)
        _copy_mask(value, leaf)
        return leaf

    def _is_float(self, value: Any) -> bool:
        return self._keras.ops.is_tensor(value) and "float" in str(value.dtype)

    def _array(self, tensor: Any) -> Array:
        array: Array = np.asarray(self._keras.ops.convert_to_numpy(tensor))
        return array

    def _tensor(self, array: Array) -> Any:
        return self._keras.ops.convert_to_tensor(array, dtype=self._floats)

    def _rounded(self, tensor: Any) -> Any:
        return self._keras.ops.cast(self._keras.ops.cast(tensor, "float32"), str(self._keras.backend.standardize_dtype(tensor.dtype)))


def _options(layer: Any) -> dict[str, float | str]:
    values = {name: getattr(layer, name, None) for name in _OPTIONS}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


def _copy_mask(source: Any, target: Any) -> None:
    from keras.src import backend

    if (mask := backend.get_keras_mask(source)) is not None:
        backend.set_keras_mask(target, mask)


def _no_more(slopes: Sequence[Any]) -> Sequence[Any]:
    raise RuntimeError("the derivatives of a part were taken already")
