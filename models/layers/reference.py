"""Layers in float64 by their formulas, with derivatives, as a reference for every framework.

Values are rounded to float32 between layers, in both directions, so that a framework can be given exactly what a layer was given here. A
result comes with the sum of the absolute terms that it is made of, its magnitude: by that the rounding of any order of summation is
bounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...data.text import PADDING
from ..base import ForwardContext
from .formulas import frequencies
from .protocol import NetworkLayers, SequenceNetworkLayers

Array = NDArray[Any]
Part = tuple[Array, Array]  # a result or derivative, and its magnitude
Derivatives = Callable[[Sequence[Array]], tuple[Sequence[Part], Mapping[str, Part]]]  # of slopes: by the inputs, by parameters
MOMENTUM, EPSILON = 0.1, 1e-5  # of batch normalisation
LAYER_NORM_EPSILON = 1e-6
NEAR = 1e-5  # of a magnitude: closer values may change places by rounding


def rounded(array: Array) -> Array:
    """Return float64 values that float32 holds."""
    return array.astype(np.float32).astype(np.float64)


@dataclass
class Value:
    """A layer's result, its slope during the backward pass, and where it comes from."""

    array: Array
    slope: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.array.shape

    def add_slope(self, slope: Array) -> None:
        """Add a part of the slope."""
        self.slope = slope if self.slope is None else self.slope + slope

    def __add__(self, added: Value) -> Value:
        total = Value(rounded(self.array + added.array))
        _tapes[-1].calls.append(_Sum((self, added), total))
        return total


@dataclass
class _Sum:
    """A sum between layers."""

    terms: tuple[Value, Value]
    total: Value

    def backward(self) -> None:
        if self.total.slope is not None:
            for term in self.terms:
                term.add_slope(self.total.slope)


@dataclass
class Call:
    """A layer: what it was given, exact results and their magnitudes.

    `results`: ``output``, ``slope of input N`` by the slope of its outputs, ``gradient of PARAMETER`` and ``buffer NAME``.
    """

    label: str
    operation: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    results: dict[str, Part]
    derivatives: Derivatives | None
    parameters: tuple[str, ...] = ()
    slopes: tuple[Array, ...] = ()
    kept: Array | None = None  # 0 where a slope depends on rounding, such as at equal maxima

    def backward(self) -> None:
        """Compute the derivatives from the slopes of the outputs, rounded to float32."""
        if self.derivatives is None or all(output.slope is None for output in self.outputs):
            return
        self.slopes = tuple(
            np.zeros_like(output.array) if output.slope is None else rounded(output.slope * (1.0 if self.kept is None else self.kept))
            for output in self.outputs
        )
        by_inputs, by_parameters = self.derivatives(self.slopes)
        for number, (value, part) in enumerate(zip(self.inputs, by_inputs, strict=True)):
            self.results[f"slope of input {number}"] = part
            value.add_slope(rounded(part[0]))
        for name, part in by_parameters.items():
            self.results[f"gradient of {name}"] = part


@dataclass
class Tape:
    """The layers of one pass, in order."""

    calls: list[Call | _Sum] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)

    @property
    def layers(self) -> list[Call]:
        """The calls of layers."""
        return [call for call in self.calls if isinstance(call, Call)]

    def label(self, operation: str, name: str) -> str:
        """Return what a layer is called: its parameters' name, or its operation and number."""
        text = name or operation
        self._counts[text] += 1
        return text if name and self._counts[text] == 1 else f"{text} {self._counts[text]}"

    def backward(self, logits: Value, slope: Array) -> None:
        """Compute all derivatives from the slope of the logits."""
        logits.add_slope(rounded(slope))
        for call in reversed(self.calls):
            call.backward()
        for layer in self.layers:
            layer.derivatives = None  # they refer to this tape, whose arrays would wait for the garbage collector


_tapes: list[Tape] = []  # of the pass that is being recorded


def record(network: Callable[[Any], Any]) -> tuple[Tape, Any]:
    """Return the tape of a network, which is given a tape, and its result."""
    tape = Tape()
    _tapes.append(tape)
    try:
        return tape, network(tape)
    finally:
        _tapes.pop()


class _Recording:
    """The part of both kinds of layers: parameters, and the tape."""

    _parameters: Mapping[str, Array]
    _context: ForwardContext[Array]
    _tape: Tape

    def _call(
        self,
        operation: str,
        name: str,
        inputs: Sequence[Value],
        outputs: Part | Sequence[Part],
        derivatives: Derivatives | None,
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
        kept: Array | None = None,
    ) -> Any:
        several = isinstance(outputs, list)
        parts: Sequence[Part] = outputs if isinstance(outputs, list) else [outputs]  # type: ignore[list-item]
        values = tuple(Value(rounded(exact)) for exact, _ in parts)
        results = {"output" if not number else f"output {number}": part for number, part in enumerate(parts)}
        used = tuple(known for known in self._parameters if name and known in (f"{name}.weight", f"{name}.bias"))
        call = Call(
            self._tape.label(operation, name),
            operation,
            arguments,
            options or {},
            tuple(inputs),
            values,
            results,
            derivatives,
            used,
            kept=kept,
        )
        self._tape.calls.append(call)
        return values if several else values[0]

    def _weight(self, name: str) -> Array:
        return self._parameters[f"{name}.weight"].astype(np.float64)

    def _bias(self, name: str) -> Array | None:
        bias = self._parameters.get(f"{name}.bias")
        return None if bias is None else bias.astype(np.float64)

    def _dropped(self, x: Value, rate: float, layer: int) -> Any:
        kept = self._context.dropout(np.ones_like(x.array), rate, layer)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            return [(slopes[0] * kept, np.abs(slopes[0] * kept))], {}

        y = x.array * kept
        return self._call("dropout", "", [x], (y, np.abs(y)), derivatives, (rate, layer))


# Functions: each returns a result and its magnitude, and derivatives.


def convolution(x: Array, weight: Array, stride: int, padding: int) -> Array:
    """Return the cross-correlation of images [b, c, h, w] with [out, in, h, w]."""
    windows = _windows(_surrounded(x, padding), weight.shape[2:], stride)
    return np.tensordot(windows, weight, ([1, 4, 5], [1, 2, 3])).transpose(0, 3, 1, 2)


def _surrounded(x: Array, padding: int, value: float = 0.0) -> Array:
    return np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=value) if padding else x


def _windows(x: Array, kernel: Sequence[int], stride: int) -> Array:
    """Return views [b, c, rows, columns, kernel height, kernel width]."""
    return sliding_window_view(x, tuple(kernel), (2, 3))[:, :, ::stride, ::stride]


def _spread(
    slopes: Array, shape: Sequence[int], stride: int, padding: int, part: Callable[[int, int], Array], kernel: Sequence[int]
) -> Array:
    """Sum windows' parts, [b, c, rows, columns] by the place within the kernel, into images."""
    batch, channels, height, width = shape
    total = np.zeros((batch, channels, height + 2 * padding, width + 2 * padding))
    rows, columns = slopes.shape[2:]
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            total[:, :, i : i + stride * rows : stride, j : j + stride * columns : stride] += part(i, j)
    return total[:, :, padding : padding + height, padding : padding + width]


def convolution_derivatives(x: Array, weight: Array, slopes: Array, stride: int, padding: int) -> tuple[Array, Array]:
    """Return the slopes of the images and of the weight."""
    windows = _windows(_surrounded(x, padding), weight.shape[2:], stride)
    by_weight = np.tensordot(slopes, windows, ([0, 2, 3], [0, 2, 3]))
    moved = slopes.transpose(0, 2, 3, 1)
    by_images = _spread(slopes, x.shape, stride, padding, lambda i, j: (moved @ weight[:, :, i, j]).transpose(0, 3, 1, 2), weight.shape[2:])
    return by_images, by_weight


def _near_kink(x: Array, magnitude: Array) -> Array:
    """Return 1, and 0 where a ReLU's argument may have either sign by rounding."""
    return (np.abs(x) > NEAR * magnitude).astype(np.float64)


def pooled(x: Array, kernel: int, stride: int, padding: int) -> tuple[Array, Array, Array]:
    """Return maxima, 1 where the maximum is clear, and its place within the kernel."""
    windows = _windows(_surrounded(x, padding, -np.inf), (kernel, kernel), stride)
    flat = windows.reshape(*windows.shape[:4], kernel * kernel)
    place = flat.argmax(4)
    largest = np.take_along_axis(flat, place[..., None], 4)[..., 0]
    smaller = flat.copy()
    np.put_along_axis(smaller, place[..., None], -np.inf, 4)
    clear = smaller.max(4) < largest - NEAR * np.maximum(np.abs(largest), 1e-30)
    return largest, clear.astype(np.float64), place


def _unpooled(slopes: Array, place: Array, shape: Sequence[int], kernel: int, stride: int, padding: int) -> Array:
    return _spread(slopes, shape, stride, padding, lambda i, j: slopes * (place == i * kernel + j), (kernel, kernel))


def normalised(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array, Array]:
    """Return normalised values, their magnitude, 1 / deviation, and the variance."""
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    inverse = 1.0 / np.sqrt(variance + epsilon)
    return (x - mean) * inverse, (np.abs(x) + np.abs(mean)) * inverse, inverse, variance


def normalised_derivative(slopes: Array, normal: Array, magnitude: Array, inverse: Array, axes: tuple[int, ...]) -> Part:
    """Return the slope of what was normalised."""
    by_normal = (slopes * normal).mean(axes, keepdims=True)
    exact = inverse * (slopes - slopes.mean(axes, keepdims=True) - normal * by_normal)
    spread = (np.abs(slopes) * magnitude).mean(axes, keepdims=True)
    return exact, inverse * (np.abs(slopes) + np.abs(slopes).mean(axes, keepdims=True) + magnitude * spread + np.abs(by_normal) * magnitude)


class ReferenceLayers(_Recording, NetworkLayers):
    """`NetworkLayers` in float64."""

    def __init__(self, parameters: Mapping[str, Array], context: ForwardContext[Array], tape: Tape) -> None:
        self._parameters, self._context, self._tape = parameters, context, tape

    def images(self, x_bchw: Value) -> Value:
        """Return the images."""
        return x_bchw

    def enlarge(self, x: Value, height: int, width: int) -> Any:
        """Resize bilinearly."""
        if x.shape[2:] == (height, width):
            return x
        rows, columns = _resizing(x.shape[2], height), _resizing(x.shape[3], width)
        y = np.einsum("bchw,ih,jw->bcij", x.array, rows, columns, optimize=True)
        magnitude = np.einsum("bchw,ih,jw->bcij", np.abs(x.array), rows, columns, optimize=True)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            exact, size = (np.einsum("bcij,ih,jw->bchw", part, rows, columns, optimize=True) for part in (slopes[0], np.abs(slopes[0])))
            return [(exact, size)], {}

        return self._call("enlarge", "", [x], (y, magnitude), derivatives, (height, width))

    def conv(self, x: Value, name: str, stride: int = 1, padding: int = 0) -> Any:
        """Cross-correlate."""
        y, magnitude = self._convolved(x.array, name, stride, padding)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            return self._convolution_derivatives(x.array, name, slopes[0], stride, padding)

        return self._call("conv", name, [x], (y, magnitude), derivatives, (name, stride, padding))

    def _convolved(self, x: Array, name: str, stride: int, padding: int) -> Part:
        weight, bias = self._weight(name), self._bias(name)
        y, magnitude = convolution(x, weight, stride, padding), convolution(np.abs(x), np.abs(weight), stride, padding)
        if bias is None:
            return y, magnitude
        return y + bias[:, None, None], magnitude + np.abs(bias)[:, None, None]

    def _convolution_derivatives(
        self, x: Array, name: str, slopes: Array, stride: int, padding: int
    ) -> tuple[Sequence[Part], Mapping[str, Part]]:
        weight = self._weight(name)
        exact = convolution_derivatives(x, weight, slopes, stride, padding)
        sizes = convolution_derivatives(np.abs(x), np.abs(weight), np.abs(slopes), stride, padding)
        parameters = {f"{name}.weight": (exact[1], sizes[1])}
        if self._bias(name) is not None:
            parameters[f"{name}.bias"] = slopes.sum((0, 2, 3)), np.abs(slopes).sum((0, 2, 3))
        return [(exact[0], sizes[0])], parameters

    def conv_pool(self, x: Value, name: str, kernel: int, stride: int, padding: int = 0) -> Any:
        """Apply convolution, bias, ReLU and max pooling."""
        full, full_magnitude = self._convolved(x.array, name, 1, padding)
        largest, clear, place = pooled(full, kernel, stride, 0)
        magnitude, _, _ = pooled(full_magnitude, kernel, stride, 0)
        y = np.maximum(largest, 0.0)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            inner = _unpooled(slopes[0] * (largest > 0), place, full.shape, kernel, stride, 0)
            return self._convolution_derivatives(x.array, name, inner, 1, padding)

        kept = clear * _near_kink(largest, magnitude)
        return self._call("conv_pool", name, [x], (y, magnitude), derivatives, (name, kernel, stride, padding), kept=kept)

    def relu(self, x: Value) -> Any:
        """Return max(x, 0)."""
        positive = x.array > 0

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            return [(slopes[0] * positive, np.abs(slopes[0]))], {}

        return self._call("relu", "", [x], (np.maximum(x.array, 0.0), np.abs(x.array)), derivatives)

    def max_pool(self, x: Value, kernel: int, stride: int, padding: int = 0) -> Any:
        """Take maxima."""
        y, clear, place = pooled(x.array, kernel, stride, padding)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            exact, size = (_unpooled(part, place, x.shape, kernel, stride, padding) for part in (slopes[0], np.abs(slopes[0])))
            return [(exact, size)], {}

        return self._call("max_pool", "", [x], (y, np.abs(y)), derivatives, (kernel, stride, padding), kept=clear)

    def average_pool(self, x: Value, side: int) -> Any:
        """Average to side × side pixels."""
        rows, columns = averaging(x.shape[2], side), averaging(x.shape[3], side)
        y, magnitude = (np.einsum("bchw,ih,jw->bcij", part, rows, columns, optimize=True) for part in (x.array, np.abs(x.array)))

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            exact, size = (np.einsum("bcij,ih,jw->bchw", part, rows, columns, optimize=True) for part in (slopes[0], np.abs(slopes[0])))
            return [(exact, size)], {}

        return self._call("average_pool", "", [x], (y, magnitude), derivatives, (side,))

    def flatten(self, x: Value) -> Any:
        """Return features in canonical order."""

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            return [(slopes[0].reshape(x.shape), np.abs(slopes[0]).reshape(x.shape))], {}

        y = x.array.reshape(len(x.array), -1)
        return self._call("flatten", "", [x], (y, np.abs(y)), derivatives)

    def dense(self, x: Value, name: str) -> Any:
        """Multiply by the weight and add the bias."""
        return self._call("dense", name, [x], *_product(self, x, name, flat=True), (name,))

    def dropout(self, x_bf: Value, rate: float, layer: int) -> Any:
        """Drop by the context's mask."""
        return self._dropped(x_bf, rate, layer)

    def batch_norm(self, x: Value, name: str) -> Any:
        """Normalise by the batch, and update the running statistics."""
        axes, weight, bias = (0, 2, 3), self._weight(name)[:, None, None], self._bias(name)
        shift = np.zeros(1) if bias is None else bias[:, None, None]
        normal, normal_magnitude, inverse, variance = normalised(x.array, axes, EPSILON)
        y, magnitude = normal * weight + shift, normal_magnitude * np.abs(weight) + np.abs(shift)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            slope = slopes[0]
            part = normalised_derivative(slope * weight, normal, normal_magnitude, inverse, axes)
            by_weight = (slope * normal).sum(axes), (np.abs(slope) * normal_magnitude).sum(axes)
            return [part], {f"{name}.weight": by_weight, f"{name}.bias": (slope.sum(axes), np.abs(slope).sum(axes))}

        value = self._call("batch_norm", name, [x], (y, magnitude), derivatives, (name,))
        call = self._tape.layers[-1]
        count = x.array.size / x.shape[1]
        unbiased = variance.ravel() * (count / (count - 1.0) if count > 1 else 0.0)
        squares = (x.array**2).mean(axes)
        for buffer, new, size in (
            ("running_mean", x.array.mean(axes), np.abs(x.array).mean(axes)),
            ("running_var", unbiased, np.maximum(unbiased, squares)),
        ):
            old = self._context.buffers[f"{name}.{buffer}"].astype(np.float64)
            call.results[f"buffer {name}.{buffer}"] = (1 - MOMENTUM) * old + MOMENTUM * new, np.abs(old) + MOMENTUM * size
        return value

    def logits(self, x_bk: Value) -> Value:
        """Return the logits."""
        return x_bk


def _resizing(size: int, wanted: int) -> Array:
    """Return the matrix [wanted, size] of bilinear resizing with half-pixel centres."""
    matrix = np.zeros((wanted, size))
    for i in range(wanted):
        place = min(max((i + 0.5) * size / wanted - 0.5, 0.0), size - 1.0)
        below = min(int(place), size - 1)
        matrix[i, below] += 1.0 - (place - below)
        matrix[i, min(below + 1, size - 1)] += place - below
    return matrix


def averaging(size: int, side: int) -> Array:
    """Return the matrix [side, size] of an adaptive average."""
    matrix = np.zeros((side, size))
    for i in range(side):
        begin, end = i * size // side, -(-(i + 1) * size // side)
        matrix[i, begin:end] = 1.0 / (end - begin)
    return matrix


def _product(layers: _Recording, x: Value, name: str, *, flat: bool = False, biased: bool = True) -> tuple[Part, Derivatives]:
    weight, bias = layers._weight(name), layers._bias(name) if biased else None
    rows = x.array.reshape(len(x.array), -1) if flat else x.array
    y, magnitude = rows @ weight.T, np.abs(rows) @ np.abs(weight).T
    if bias is not None:
        y, magnitude = y + bias, magnitude + np.abs(bias)

    def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
        slope = slopes[0]
        by_input = (slope @ weight).reshape(x.shape), (np.abs(slope) @ np.abs(weight)).reshape(x.shape)
        slope_nk, rows_nk = slope.reshape(-1, slope.shape[-1]), rows.reshape(-1, rows.shape[-1])
        parameters = {f"{name}.weight": (slope_nk.T @ rows_nk, np.abs(slope_nk).T @ np.abs(rows_nk))}
        if bias is not None:
            parameters[f"{name}.bias"] = slope_nk.sum(0), np.abs(slope_nk).sum(0)
        return [by_input], parameters

    return (y, magnitude), derivatives


class ReferenceSequenceLayers(_Recording, SequenceNetworkLayers):
    """`SequenceNetworkLayers` in float64."""

    def __init__(self, parameters: Mapping[str, Array], context: ForwardContext[Array], tape: Tape) -> None:
        self._parameters, self._context, self._tape = parameters, context, tape

    def embedding(self, tokens_bt: Array, name: str) -> Any:
        """Return rows of the weight times √width, zeros for padding."""
        weight = self._weight(name)
        scale = math.sqrt(weight.shape[1]) * (tokens_bt != PADDING)[..., None]
        y = weight[tokens_bt] * scale

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            exact, size = np.zeros_like(weight), np.zeros_like(weight)
            np.add.at(exact, tokens_bt, slopes[0] * scale)
            np.add.at(size, tokens_bt, np.abs(slopes[0]) * scale)
            return [], {f"{name}.weight": (exact, size)}

        return self._call("embedding", name, [], (y, np.abs(y)), derivatives, (tokens_bt, name))

    def positions(self, x_btd: Value, start: Any = 0) -> Any:
        """Add the position codes."""
        angles = (np.arange(x_btd.shape[1]) + start)[:, None] * frequencies(x_btd.shape[2])
        codes = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return self._call("positions", "", [x_btd], (x_btd.array + codes, np.abs(x_btd.array) + 1.0), _identity, (start,))

    def shifted(self, tokens_bt: Array, first: int) -> Array:
        """Shift the tokens."""
        return np.concatenate([np.full((len(tokens_bt), 1), first, tokens_bt.dtype), tokens_bt], axis=1)[:, :-1]

    def attended(self, lengths_b: Array, tokens_bt: Array) -> Array:
        """Return the mask [batch, 1, 1, time]."""
        return (np.arange(tokens_bt.shape[1]) < lengths_b[:, None])[:, None, None, :]

    def layer_norm(self, x_btd: Value, name: str) -> Any:
        """Normalise each position."""
        axes, weight, bias = (x_btd.array.ndim - 1,), self._weight(name), self._bias(name)
        shift = np.zeros(1) if bias is None else bias
        normal, normal_magnitude, inverse, _ = normalised(x_btd.array, axes, LAYER_NORM_EPSILON)
        rest = tuple(range(x_btd.array.ndim - 1))

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            slope = slopes[0]
            part = normalised_derivative(slope * weight, normal, normal_magnitude, inverse, axes)
            by_weight = (slope * normal).sum(rest), (np.abs(slope) * normal_magnitude).sum(rest)
            return [part], {f"{name}.weight": by_weight, f"{name}.bias": (slope.sum(rest), np.abs(slope).sum(rest))}

        result = normal * weight + shift, normal_magnitude * np.abs(weight) + np.abs(shift)
        return self._call("layer_norm", name, [x_btd], result, derivatives, (name,))

    def linear(self, x_btd: Value, name: str, *, low: bool = False) -> Any:
        """Multiply by the weight."""
        return self._call("linear", name, [x_btd], *_product(self, x_btd, name, biased=False), (name,), {"low": low})

    def dense(self, x_btd: Value, name: str) -> Any:
        """Multiply by the weight and add the bias."""
        return self._call("dense", name, [x_btd], *_product(self, x_btd, name), (name,))

    def dense_relu(self, x_btd: Value, name: str, *, low: bool = False) -> Any:
        """Return max(0, dense)."""
        (inner, magnitude), inner_derivatives = _product(self, x_btd, name)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            return inner_derivatives([slopes[0] * (inner > 0)])

        result, kept = (np.maximum(inner, 0.0), magnitude), _near_kink(inner, magnitude)
        return self._call("dense_relu", name, [x_btd], result, derivatives, (name,), {"low": low}, kept)

    def heads(self, x_btd: Value, parts: int, count: int) -> Any:
        """Split into tuples of heads."""
        batch, time, width = x_btd.shape
        split = x_btd.array.reshape(batch, time, parts, count, width // (parts * count)).transpose(2, 0, 3, 1, 4)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            joined = np.stack(slopes).transpose(1, 3, 0, 2, 4).reshape(x_btd.shape)
            return [(joined, np.abs(joined))], {}

        return self._call("heads", "", [x_btd], [(part, np.abs(part)) for part in split], derivatives, (parts, count))

    def attention(
        self,
        query_bhqe: Value,
        key_bhke: Value,
        value_bhke: Value,
        mask: Array | None,
        rate: float,
        layer: int,
        *,
        causal: bool = False,
        low: bool = False,
    ) -> Any:
        """Return softmax(query · key / √e) · value, heads concatenated."""
        query, key, value = query_bhqe.array, key_bhke.array, value_bhke.array
        batch, count, time, width = query.shape
        scores = query @ key.swapaxes(2, 3) * width**-0.5
        spread = 1.0 + (np.abs(query) @ np.abs(key).swapaxes(2, 3) * width**-0.5).max(3, keepdims=True)
        allowed = np.ones(scores.shape, bool) if mask is None else np.broadcast_to(mask, scores.shape)
        if causal:
            allowed = allowed & np.tri(time, key.shape[2], dtype=bool)
        shares = np.exp(np.where(allowed, scores - np.where(allowed, scores, -np.inf).max(3, keepdims=True), -np.inf))
        shares /= shares.sum(3, keepdims=True)
        kept = self._context.dropout(np.ones_like(shares), rate, layer) if rate else np.ones_like(shares)
        mixed, magnitude = (shares * kept) @ value, spread * ((shares * kept) @ np.abs(value))

        def joined(part: Array) -> Array:
            return part.transpose(0, 2, 1, 3).reshape(batch, time, count * width)

        def derivatives(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
            slope = slopes[0].reshape(batch, time, count, width).transpose(0, 2, 1, 3)
            sized = np.abs(slope)
            by_value = (shares * kept).swapaxes(2, 3) @ slope, (spread * shares * kept).swapaxes(2, 3) @ sized
            by_shares, by_shares_size = slope @ value.swapaxes(2, 3) * kept, sized @ np.abs(value).swapaxes(2, 3) * kept
            by_scores = shares * (by_shares - (shares * by_shares).sum(3, keepdims=True)) * width**-0.5
            sizes = spread * shares * (by_shares_size + (shares * by_shares_size).sum(3, keepdims=True)) * width**-0.5
            by_query = by_scores @ key, sizes @ np.abs(key)
            by_key = by_scores.swapaxes(2, 3) @ query, sizes.swapaxes(2, 3) @ np.abs(query)
            return [by_query, by_key, by_value], {}

        arguments, options = (mask, rate, layer), {"causal": causal, "low": low}
        return self._call(
            "attention", "", [query_bhqe, key_bhke, value_bhke], (joined(mixed), joined(magnitude)), derivatives, arguments, options
        )

    def appended(self, before: Any, new: Any) -> Any:
        """Training does not decode."""
        raise NotImplementedError

    def dropout(self, x_btd: Value, rate: float, layer: int) -> Any:
        """Drop by the context's mask."""
        return self._dropped(x_btd, rate, layer) if rate else x_btd

    def logits(self, x_btd: Value, name: str) -> Any:
        """Multiply by the weight: logits."""
        return self._call("logits", name, [x_btd], *_product(self, x_btd, name, biased=False), (name,))


def _identity(slopes: Sequence[Array]) -> tuple[Sequence[Part], Mapping[str, Part]]:
    return [(slopes[0], np.abs(slopes[0]))], {}
