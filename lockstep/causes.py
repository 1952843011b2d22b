"""Why a result differs: of hypotheses in float64, the one that leaves rounding alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.layers.reference import EPSILON, LAYER_NORM_EPSILON, MOMENTUM, Call, convolution, normalised, pooled
from .rounding import LIMIT, UNIT, error
from .updates import Rule

Array = NDArray[Any]
MAX_SHARE_LEFT = 0.7  # of an error that operands in bf16 leave unexplained: their products may be summed otherwise
MIN_NOISE_ELEMENTS, MAX_LIKENESS, MIN_SHARE_TOUCHED = 30, 0.3, 0.9  # of derivatives: noise is unlike the result, and everywhere
PRODUCTS = ("conv", "conv_pool", "dense", "dense_relu", "linear", "logits", "attention")


def to_bf16(array: Array) -> Array:
    """Return the nearest bfloat16 values."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _fits(value: Array, exact: Array, magnitude: Array) -> bool:
    return error(value, exact, magnitude)[0] <= 2 * LIMIT


def of_layer(call: Call, tensor: str, value: Array, parameters: Mapping[str, Array], buffers: Mapping[str, Array]) -> str:
    """Return why a layer's result differs, in words; "" if no hypothesis explains it."""
    exact, magnitude = call.results[tensor]
    for words, hypothesis in _hypotheses(call, tensor, value, parameters, buffers):
        if hypothesis is not None and hypothesis.shape == value.shape and _fits(value, hypothesis, magnitude):
            return words
    if scaled := _scaled(value, exact, magnitude):
        return scaled
    if 2.0**-15 <= error(value, exact, magnitude)[0] * UNIT <= 2.0**-7 and _in_low_format(call, tensor, value, parameters):
        return "its products are bf16"
    return ""


def _scaled(value: Array, exact: Array, magnitude: Array) -> str:
    norm = float(np.sum(np.square(exact)))
    if not norm or value.shape != np.shape(exact) or not np.isfinite(value).all():
        return ""
    factor = float(np.sum(value * exact)) / norm
    if _fits(value, factor * exact, magnitude):
        return "it is zero" if abs(factor) < 1e-9 else f"it is scaled by {factor:.6g}"
    return ""


def _in_low_format(call: Call, tensor: str, value: Array, parameters: Mapping[str, Array]) -> bool:
    """Return whether operands in bf16 explain most of an error.

    Of derivatives: whether it is noise of that size.
    """
    exact = call.results[tensor][0]
    if tensor == "output" and call.operation in ("conv", "conv_pool", "dense", "dense_relu", "linear", "logits"):
        low = _product_in_bf16(call, parameters)
        left = min(float(np.linalg.norm(value - part)) for part in (low, to_bf16(low)))
        return left <= MAX_SHARE_LEFT * float(np.linalg.norm(value - exact))
    difference = (value - exact).ravel()
    if call.operation not in PRODUCTS or difference.size < MIN_NOISE_ELEMENTS:
        return False
    alike = abs(float(difference @ exact.ravel())) / max(float(np.linalg.norm(difference) * np.linalg.norm(exact)), 1e-300)
    touched = float(np.mean(difference[exact.ravel() != 0] != 0)) if exact.any() else 0.0
    return alike < MAX_LIKENESS and touched > MIN_SHARE_TOUCHED


def _product_in_bf16(call: Call, parameters: Mapping[str, Array]) -> Array:
    name, x = call.arguments[0], to_bf16(call.inputs[0].array)
    weight, bias = to_bf16(parameters[f"{name}.weight"]), parameters.get(f"{name}.bias")
    if call.operation in ("conv", "conv_pool"):
        stride, padding = call.arguments[1:3] if call.operation == "conv" else (1, call.arguments[3])
        low = convolution(x, weight, stride, padding)
        low = low if bias is None else low + bias[:, None, None]
        return np.maximum(pooled(low, call.arguments[1], call.arguments[2], 0)[0], 0.0) if call.operation == "conv_pool" else low
    low = (x.reshape(len(x), -1) if x.ndim == 4 else x) @ weight.T
    low = low if bias is None or call.operation in ("linear", "logits") else low + bias
    return np.maximum(low, 0.0) if call.operation == "dense_relu" else low


def _hypotheses(
    call: Call, tensor: str, value: Array, parameters: Mapping[str, Array], buffers: Mapping[str, Array]
) -> Iterator[tuple[str, Array | None]]:
    if tensor == "output":
        x = call.inputs[0].array if call.inputs else np.zeros(0)
        if call.operation in ("batch_norm", "layer_norm"):
            yield _other_epsilon(call, value, parameters)
        elif call.operation == "conv":
            yield from _moved_padding(call, x, parameters)
        elif call.operation in ("relu", "conv_pool", "dense_relu"):
            yield from _other_kinks(call, x, value)
        elif call.operation in ("flatten", "dense") and x.ndim == 4:
            yield from _permuted(call, x, parameters)
        elif call.operation == "dropout":
            yield from _other_rate(call, x, value)
    elif tensor.startswith("buffer "):
        yield from _other_statistics(call, tensor, value, buffers)


def _other_epsilon(call: Call, value: Array, parameters: Mapping[str, Array]) -> tuple[str, Array | None]:
    """Search the ε with the smallest residual."""
    x, name = call.inputs[0].array, call.arguments[0]
    weight, bias = (parameters[f"{name}.{part}"].astype(np.float64) for part in ("weight", "bias"))
    batch = call.operation == "batch_norm"
    axes = (0, 2, 3) if batch else (x.ndim - 1,)
    known = EPSILON if batch else LAYER_NORM_EPSILON
    if batch:
        weight, bias = weight[:, None, None], bias[:, None, None]
    _, _, _, variance = normalised(x, axes, known)
    centred = (x - x.mean(axes, keepdims=True)) * weight

    def result(epsilon: float) -> Array:
        scaled: Array = centred / np.sqrt(variance + epsilon) + bias
        return scaled

    def residual(logarithm: float) -> float:
        return float(np.sum((value - result(math.exp(logarithm))) ** 2))

    best = _least(residual, math.log(1e-12), math.log(1.0))
    return f"its epsilon is {math.exp(best):.3g} instead of {known:.0e}", result(math.exp(best))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function of one number is least: a grid, then golden sections."""
    grid = np.linspace(low, high, 57)
    place = int(np.argmin([function(float(point)) for point in grid]))
    low, high = float(grid[max(place - 1, 0)]), float(grid[min(place + 1, len(grid) - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, second) if function(first) < function(second) else (first, high)
    return (low + high) / 2


def _moved_padding(call: Call, x: Array, parameters: Mapping[str, Array]) -> Iterator[tuple[str, Array | None]]:
    name, stride, padding = call.arguments[:3]
    if not padding:
        return
    weight, bias = parameters[f"{name}.weight"].astype(np.float64), parameters.get(f"{name}.bias")
    for rows in (-1, 0, 1):
        for columns in (-1, 0, 1):
            if (rows, columns) == (0, 0):
                continue
            y = convolution(_moved(x, rows, columns), weight, stride, padding)
            yield (
                f"its padding is moved by {rows} rows and {columns} columns (asymmetric, as 'SAME' is)",
                y if bias is None else y + bias[:, None, None],
            )


def _moved(x: Array, rows: int, columns: int) -> Array:
    moved = np.zeros_like(x)
    height, width = x.shape[2:]
    moved[:, :, max(-rows, 0) : height - max(rows, 0), max(-columns, 0) : width - max(columns, 0)] = x[
        :, :, max(rows, 0) : height - max(-rows, 0), max(columns, 0) : width - max(-columns, 0)
    ]
    return moved


def _other_kinks(call: Call, x: Array, value: Array) -> Iterator[tuple[str, Array | None]]:
    exact = call.results["output"][0]
    cap = float(value.max())
    yield f"it is capped at {cap:.4g}", np.minimum(exact, cap)
    if call.operation == "relu" and (x < 0).any():
        slope = float((value * x)[x < 0].sum() / (x[x < 0] ** 2).sum())
        yield f"it leaks: its slope below 0 is {slope:.4g}", np.where(x > 0, x, slope * x)


def _permuted(call: Call, x: Array, parameters: Mapping[str, Array]) -> Iterator[tuple[str, Array | None]]:
    flat = x.transpose(0, 2, 3, 1).reshape(len(x), -1)
    if call.operation == "flatten":
        yield "its features are permuted: channels come last", flat
        return
    name = call.arguments[0]
    yield (
        "its features are permuted: channels come last",
        flat @ parameters[f"{name}.weight"].T.astype(np.float64) + parameters[f"{name}.bias"],
    )


def _other_rate(call: Call, x: Array, value: Array) -> Iterator[tuple[str, Array | None]]:
    kept = (value != 0) & (x != 0)
    if not kept.any():
        return
    scale = float((value[kept] * x[kept]).sum() / (x[kept] ** 2).sum())
    rate = 1.0 - 1.0 / scale if scale > 0 else 0.0
    yield f"its dropout has the rate {rate:.3g} instead of {call.arguments[0]:.3g}", np.where(kept, scale * x, 0.0)


def _other_statistics(call: Call, tensor: str, value: Array, buffers: Mapping[str, Array]) -> Iterator[tuple[str, Array | None]]:
    name = tensor.removeprefix("buffer ")
    old, exact = buffers[name].astype(np.float64), call.results[tensor][0]
    new = (exact - (1 - MOMENTUM) * old) / MOMENTUM
    x = call.inputs[0].array
    count = x.size / x.shape[1]
    if name.endswith("running_var"):
        yield "its running variance is biased: by n instead of n − 1", (1 - MOMENTUM) * old + MOMENTUM * new * (count - 1) / count
    yield f"its momentum is {1 - MOMENTUM:g}, the complement of {MOMENTUM:g}", MOMENTUM * old + (1 - MOMENTUM) * new
    moved = new - old
    if float((moved**2).sum()):
        momentum = float(((value - old) * moved).sum() / (moved**2).sum())
        yield f"its momentum is {momentum:.4g} instead of {MOMENTUM:g}", old + momentum * moved


def of_rule(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Yield what may be wrong with an update rule, and the rule that has this fault."""
    if rule.adam:
        yield "without bias correction", replace(rule, corrected=False)
        yield "epsilon is inside the root", replace(rule, epsilon_inside=True)
        for factor in (10.0, 0.1, 100.0, 0.01):
            yield f"epsilon is {factor * rule.epsilon:.3g} instead of {rule.epsilon:.3g}", replace(rule, epsilon=factor * rule.epsilon)
        for beta in (0.99, 0.95, 0.999, 0.98):
            yield f"beta2 is {beta:g} instead of {rule.beta2:g}", replace(rule, beta2=beta)
        yield f"beta1 is {1 - rule.beta1:g}, the complement", replace(rule, beta1=1 - rule.beta1)
    else:
        yield f"momentum is {1 - rule.momentum:g}, the complement of {rule.momentum:g}", replace(rule, momentum=1 - rule.momentum)
        yield "momentum is Nesterov's" if not rule.nesterov else "momentum is not Nesterov's", replace(rule, nesterov=not rule.nesterov)
        yield "there is no momentum", replace(rule, momentum=0.0)
    yield f"weight decay is {'coupled' if rule.decoupled else 'decoupled'}", replace(rule, decoupled=not rule.decoupled)
    if rule.exempt:
        yield "weight decay spares no parameter", replace(rule, exempt=frozenset())
    yield "there is no weight decay", replace(rule, weight_decay=0.0)
    if rule.ema_decay is not None:
        yield "the moving average of the weights has no ramp", replace(rule, ramped=False)
