"""Why a result differs: of hypotheses in float64, the one that leaves rounding alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.update_rules import MOMENTUM as MOMENTUM_OF_WEIGHTS
from ..core.update_rules import SECOND_MOMENT
from ..models.layers.reference import EPSILON, LAYER_NORM_EPSILON, MOMENTUM, Call, convolution, convolution_derivatives, normalised, pooled
from .rounding import LIMIT, UNIT, error
from .updates import PARAMETER, SLOT, Rule, gradients_of, updated

Array = NDArray[Any]
MIN_HIDDEN, MAX_HIDDEN_LEFT = 4.0, 0.25  # units of an error below its limit, and the share that another ε leaves of it
MAX_SHARE_LEFT = 0.7  # of an error that operands in bf16 leave unexplained: their products may be summed otherwise


def to_bf16(array: Array) -> Array:
    """Return the nearest bfloat16 values."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _fits(value: Array, exact: Array, magnitude: Array) -> bool:
    return error(value, exact, magnitude)[0] <= 2 * LIMIT


def of_layer(call: Call, tensor: str, value: Array, parameters: Mapping[str, Array], buffers: Mapping[str, Array]) -> str:
    """Return why a layer's result differs, in words; "" if no hypothesis explains it."""
    exact, magnitude = call.results[tensor]
    if value.shape != np.shape(exact):
        return f"its shape is {list(value.shape)} instead of {list(np.shape(exact))}"
    if not np.isfinite(value).all():
        return ""
    for words, hypothesis in _hypotheses(call, tensor, value, parameters, buffers):
        if hypothesis is not None and hypothesis.shape == value.shape and _fits(value, hypothesis, magnitude):
            return words
    if scaled := _scaled(value, exact, magnitude):
        return scaled
    if 2.0**-15 <= error(value, exact, magnitude)[0] * UNIT <= 2.0**-7 and _in_low_format(call, tensor, value, parameters):
        return "its products are bf16"
    return ""


def hidden_epsilon(call: Call, tensor: str, value: Array, parameters: Mapping[str, Array]) -> str:
    """Return which other ε explains an error that rounding alone might; "" for none.

    Rounding has no form, so that no ε leaves much less of it.
    """
    if tensor != "output" or call.operation not in ("batch_norm", "layer_norm"):
        return ""
    exact, magnitude = call.results[tensor]
    before = error(value, exact, magnitude)[0]
    words, result = _other_epsilon(call, value, parameters)
    return words if result is not None and error(value, result, magnitude)[0] <= MAX_HIDDEN_LEFT * before else ""


def _scaled(value: Array, exact: Array, magnitude: Array) -> str:
    norm = float(np.sum(np.square(exact)))
    if not norm:
        return ""
    factor = float(np.sum(value * exact)) / norm
    if _fits(value, factor * exact, magnitude):
        return "it is zero" if abs(factor) < 1e-9 else f"it is scaled by {factor:.6g}"
    return ""


def _in_low_format(call: Call, tensor: str, value: Array, parameters: Mapping[str, Array]) -> bool:
    """Return whether operands in bf16 explain most of an error."""
    exact = call.results[tensor][0]
    if tensor == "output" and call.operation in ("conv", "conv_pool", "dense", "dense_relu", "linear", "logits"):
        low = _product_in_bf16(call, parameters)
        left = min(float(np.linalg.norm(value - part)) for part in (low, to_bf16(low)))
        return left <= MAX_SHARE_LEFT * float(np.linalg.norm(value - exact))
    return any(
        float(np.linalg.norm(value - part)) <= MAX_SHARE_LEFT * float(np.linalg.norm(value - exact))
        for low in _derivatives_in_bf16(call, tensor, parameters)
        for part in (low, to_bf16(low))
    )


def _derivatives_in_bf16(call: Call, tensor: str, parameters: Mapping[str, Array]) -> Iterator[Array]:
    """Yield a derivative of a product from operands in bf16, with slopes in float32 and in bf16."""
    if call.operation not in ("conv", "dense", "linear", "logits") or not call.slopes:
        return
    name, x = call.arguments[0], to_bf16(call.inputs[0].array)
    weight = to_bf16(parameters[f"{name}.weight"])
    for slopes in (call.slopes[0], to_bf16(call.slopes[0])):
        if call.operation == "conv":
            by_input, by_weight = convolution_derivatives(x, weight, slopes, call.arguments[1], call.arguments[2])
        else:
            rows = x.reshape(len(x), -1) if x.ndim == 4 else x
            by_input = (slopes @ weight).reshape(x.shape)
            by_weight = slopes.reshape(-1, slopes.shape[-1]).T @ rows.reshape(-1, rows.shape[-1])
        if tensor == "slope of input 0":
            yield by_input
        elif tensor == f"gradient of {name}.weight":
            yield by_weight


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
    known = call.options.get("epsilon", EPSILON if batch else LAYER_NORM_EPSILON)
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
    return f"its epsilon is {math.exp(best):.3g} instead of {known:.3g}", result(math.exp(best))


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
    known = call.options.get("momentum", MOMENTUM)
    new = (exact - (1 - known) * old) / known
    x = call.inputs[0].array
    count = x.size / x.shape[1]
    if name.endswith("running_var"):
        yield "its running variance is biased: by n instead of n − 1", (1 - known) * old + known * new * (count - 1) / count
    yield f"its momentum is {1 - known:g}, the complement of {known:g}", known * old + (1 - known) * new
    moved = new - old
    if float((moved**2).sum()):
        momentum = float(((value - old) * moved).sum() / (moved**2).sum())
        yield f"its momentum is {momentum:.4g} instead of {known:g}", old + momentum * moved


def of_rule(
    rule: Rule, before: Mapping[str, Array], measured: Mapping[str, Array], after: Mapping[str, Array]
) -> Iterator[tuple[str, Rule]]:
    """Yield what may be wrong with an update rule, and the rule that has this fault.

    Some settings are fitted to the state before and after, and to `measured_gradients`.
    """
    yield from _of_adam(rule, before, measured, after) if rule.adam else _of_momentum(rule, before, measured, after)
    yield f"weight decay is {'coupled' if rule.decoupled else 'decoupled'}", replace(rule, decoupled=not rule.decoupled)
    if rule.exempt:
        yield "weight decay spares no parameter", replace(rule, exempt=frozenset())
    yield "there is no weight decay", replace(rule, weight_decay=0.0)
    if rule.decoupled:
        bare = updated(replace(rule, weight_decay=0.0), before, gradients_of(rule, before, measured))
        pairs = [(bare[PARAMETER + name][0] - after[PARAMETER + name], before[PARAMETER + name].astype(np.float64)) for name in measured]
        if _is_other(decay := _ratio(pairs) / rule.rate, rule.weight_decay):
            yield f"weight decay is {decay:.4g} instead of {rule.weight_decay:g}", replace(rule, weight_decay=decay)
    if rule.ema_decay is not None:
        yield "the moving average of the weights has no ramp", replace(rule, ramped=False)


def _of_momentum(
    rule: Rule, before: Mapping[str, Array], measured: Mapping[str, Array], after: Mapping[str, Array]
) -> Iterator[tuple[str, Rule]]:
    yield f"momentum is {1 - rule.momentum:g}, the complement of {rule.momentum:g}", replace(rule, momentum=1 - rule.momentum)
    yield "momentum is Nesterov's" if not rule.nesterov else "momentum is not Nesterov's", replace(rule, nesterov=not rule.nesterov)
    yield "there is no momentum", replace(rule, momentum=0.0)
    keys = {name: f"{SLOT}{MOMENTUM_OF_WEIGHTS}/{name}" for name in measured}
    if all(key in before and key in after for key in keys.values()):
        pairs = [(after[key].astype(np.float64) - measured[name], before[key].astype(np.float64)) for name, key in keys.items()]
        if _is_other(momentum := _ratio(pairs), rule.momentum):
            yield f"momentum is {momentum:.4g} instead of {rule.momentum:g}", replace(rule, momentum=momentum)


def _of_adam(
    rule: Rule, before: Mapping[str, Array], measured: Mapping[str, Array], after: Mapping[str, Array]
) -> Iterator[tuple[str, Rule]]:
    yield "without bias correction", replace(rule, corrected=False)
    yield "its bias correction counts one update more", replace(rule, update=rule.update + 1)
    yield "epsilon is inside the root", replace(rule, epsilon_inside=True)
    for factor in (10.0, 0.1, 100.0, 0.01):
        yield f"epsilon is {factor * rule.epsilon:.3g} instead of {rule.epsilon:.3g}", replace(rule, epsilon=factor * rule.epsilon)
    yield f"beta1 is {1 - rule.beta1:g}, the complement of {rule.beta1:g}", replace(rule, beta1=1 - rule.beta1)
    for beta1 in (0.5, 0.8, 0.95, 0.99):
        yield f"beta1 is {beta1:g} instead of {rule.beta1:g}", replace(rule, beta1=beta1)
    gradients = {
        name: gradient if rule.decoupled else gradient + rule.decay(name) * before[PARAMETER + name]
        for name, gradient in gradients_of(rule, before, measured).items()
    }
    keys = {name: f"{SLOT}{SECOND_MOMENT}/{name}" for name in measured}
    held = {name: before.get(key, np.zeros_like(measured[name])).astype(np.float64) for name, key in keys.items()}
    pairs = [(after[key] - held[name], gradients[name] ** 2 - held[name]) for name, key in keys.items() if key in after]
    if _is_other(share := _ratio(pairs), 1 - rule.beta2):
        yield f"beta2 is {1 - share:.4g} instead of {rule.beta2:g}", replace(rule, beta2=round(1 - share, 6))


def _ratio(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Return the factor of the second arrays that fits the first ones best; 0 if these are zero."""
    square = sum(float((second**2).sum()) for _, second in pairs)
    return sum(float((first * second).sum()) for first, second in pairs) / square if square else 0.0


def _is_other(fitted: float, setting: float) -> bool:
    """Return whether a fitted value differs from its setting in three digits."""
    return f"{fitted:.3g}" != f"{setting:.3g}"
