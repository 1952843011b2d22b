"""ATen operations on TensorFlow: functions of a `Pass` and the operation's arguments.

Images [batch, channels, height, width] stay channels last between operations that allow it (`ChannelsLast`), as TensorFlow's CPU kernels
require; any other operation converts them to canonical order first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

_float_format = tf.float32
END = 1 << 62  # torch writes an open end of a slice as a number above this
_WHOLE = (tf.bool, tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64)
_ORDER = (*_WHOLE, tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128)


class ChannelsLast:
    """A tensor of canonical shape [b, c, h, w], stored as `value` [b, h, w, c]."""

    __slots__ = ("value",)

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value

    @property
    def shape(self) -> tf.TensorShape:
        """The canonical shape."""
        batch, height, width, channels = self.value.shape
        return tf.TensorShape([batch, channels, height, width])


class Pass(Protocol):
    """One execution of a graph."""

    operation: str  # the name of the operation that is carried out

    @property
    def training(self) -> bool:
        """Whether dropout draws and batch statistics are computed."""

    def low(self, x: tf.Tensor) -> tf.Tensor:
        """Cast an operand of a product or convolution to the job's precision."""

    def kernel(self, weight: Any) -> tf.Tensor:
        """Return a convolution's weight as [h, w, in, out]."""

    def dropout(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        """Zero elements and scale the others, by the next number of a dropout layer."""


Operation = Callable[..., Any]
OPERATIONS: dict[str, Operation] = {}


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Register a function for these operations."""

    def register(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def float_format() -> tf.DType:
    """Return the format that stands for float32 in graphs."""
    return _float_format


@contextmanager
def in_float64() -> Iterator[None]:
    """Within the block, float64 stands for float32 in graphs."""
    global _float_format
    _float_format = tf.float64
    try:
        yield
    finally:
        _float_format = tf.float32


def format_named(name: str) -> tf.DType:
    """Return a number format by its name in graphs."""
    named = tf.as_dtype(name)
    return float_format() if named == tf.float32 else named


def cast(value: Any, wanted: tf.DType) -> tf.Tensor:
    """Cast a tensor or number; TensorFlow would round a number to float32 first."""
    return tf.cast(tf.constant(value, tf.float64) if isinstance(value, float) else value, wanted)


def canonical(x: Any) -> Any:
    """Return a tensor in canonical order; other values unchanged."""
    return tf.transpose(x.value, [0, 3, 1, 2]) if isinstance(x, ChannelsLast) else x


def channels_last(x: Any) -> tf.Tensor:
    """Return images as [b, h, w, c]."""
    return x.value if isinstance(x, ChannelsLast) else tf.transpose(x, [0, 2, 3, 1])


def shape_of(x: tf.Tensor) -> list[Any]:
    """Return the sizes of a tensor, as integers where they are known."""
    if None not in x.shape:
        return list(x.shape)
    dynamic = tf.shape(x)
    return [dynamic[axis] if size is None else size for axis, size in enumerate(x.shape)]


def reshaped(x: tf.Tensor, shape: Sequence[Any]) -> tf.Tensor:
    """Reshape to sizes of which some are tensors.

    A single one of them becomes −1, which keeps the other sizes known.
    """
    dynamic = [axis for axis, size in enumerate(shape) if tf.is_tensor(size)]
    open_axes = [axis for axis, size in enumerate(shape) if not tf.is_tensor(size) and size == -1]
    if not dynamic:
        return tf.reshape(x, list(shape))
    if len(dynamic) == 1 and not open_axes:
        return tf.reshape(x, [-1 if axis in dynamic else size for axis, size in enumerate(shape)])
    y = tf.reshape(x, tf.stack([tf.cast(size, tf.int32) for size in shape]))
    y.set_shape([None if axis in dynamic or axis in open_axes else size for axis, size in enumerate(shape)])
    return y


def _elementwise(function: Callable[[tf.Tensor], tf.Tensor]) -> Operation:
    def carried_out(run: Pass, self: Any, **_: Any) -> Any:
        return ChannelsLast(function(self.value)) if isinstance(self, ChannelsLast) else function(self)

    return carried_out


def _float(x: tf.Tensor) -> tf.Tensor:
    return x if x.dtype.is_floating or x.dtype.is_complex else tf.cast(x, float_format())


def _hard_sigmoid(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.relu6(x + 3.0) * tf.constant(1 / 6, x.dtype)


def _truncated(x: tf.Tensor) -> tf.Tensor:
    return tf.sign(x) * tf.floor(tf.abs(x))


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017, as in torch
_ELEMENTWISE: Mapping[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "_conj": tf.math.conj,
    "abs": tf.abs,
    "acos": lambda x: tf.acos(_float(x)),
    "acosh": lambda x: tf.acosh(_float(x)),
    "alias": tf.identity,
    "angle": tf.math.angle,
    "asin": lambda x: tf.asin(_float(x)),
    "asinh": lambda x: tf.asinh(_float(x)),
    "atan": lambda x: tf.atan(_float(x)),
    "atanh": lambda x: tf.atanh(_float(x)),
    "bitwise_not": lambda x: tf.logical_not(x) if x.dtype == tf.bool else tf.bitwise.invert(x),
    "ceil": tf.math.ceil,
    "clone": tf.identity,
    "conj_physical": tf.math.conj,
    "contiguous": tf.identity,
    "cos": lambda x: tf.cos(_float(x)),
    "cosh": lambda x: tf.cosh(_float(x)),
    "detach": tf.stop_gradient,
    "digamma": tf.math.digamma,
    "erf": tf.math.erf,
    "erfc": tf.math.erfc,
    "erfinv": tf.math.erfinv,
    "exp": lambda x: tf.exp(_float(x)),
    "exp2": lambda x: tf.pow(tf.constant(2.0, _float(x).dtype), _float(x)),
    "expm1": lambda x: tf.math.expm1(_float(x)),
    "floor": tf.floor,
    "hardsigmoid": _hard_sigmoid,
    "hardswish": lambda x: x * _hard_sigmoid(x),
    "i0": tf.math.bessel_i0,
    "imag": tf.math.imag,
    "isfinite": tf.math.is_finite,
    "isinf": tf.math.is_inf,
    "isnan": tf.math.is_nan,
    "lgamma": tf.math.lgamma,
    "lift_fresh_copy": tf.identity,
    "log": lambda x: tf.math.log(_float(x)),
    "log10": lambda x: tf.math.log(_float(x)) / tf.constant(math.log(10), _float(x).dtype),
    "log1p": lambda x: tf.math.log1p(_float(x)),
    "log2": lambda x: tf.math.log(_float(x)) / tf.constant(math.log(2), _float(x).dtype),
    "log_sigmoid": tf.math.log_sigmoid,
    "logical_not": lambda x: tf.logical_not(tf.cast(x, tf.bool)),
    "mish": lambda x: x * tf.tanh(tf.nn.softplus(x)),
    "neg": tf.negative,
    "real": tf.math.real,
    "reciprocal": lambda x: tf.math.reciprocal(_float(x)),
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "round": tf.round,
    "rsqrt": lambda x: tf.math.rsqrt(_float(x)),
    "selu": lambda x: _SELU_SCALE * tf.where(x > 0, x, _SELU_ALPHA * tf.math.expm1(tf.minimum(x, 0.0))),
    "sigmoid": lambda x: tf.sigmoid(_float(x)),
    "sign": tf.sign,
    "silu": lambda x: x * tf.sigmoid(x),
    "sin": lambda x: tf.sin(_float(x)),
    "sinh": lambda x: tf.sinh(_float(x)),
    "special_i0": tf.math.bessel_i0,
    "special_i0e": tf.math.bessel_i0e,
    "special_i1": tf.math.bessel_i1,
    "special_i1e": tf.math.bessel_i1e,
    "sqrt": lambda x: tf.sqrt(_float(x)),
    "square": tf.square,
    "tan": lambda x: tf.tan(_float(x)),
    "tanh": lambda x: tf.tanh(_float(x)),
    "trunc": _truncated,
}
OPERATIONS.update({f"aten.{name}.default": _elementwise(function) for name, function in _ELEMENTWISE.items()})


def _lifted(x: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    return ChannelsLast(function(x.value)) if isinstance(x, ChannelsLast) else function(x)


@operation("aten.gelu.default")
def _gelu(run: Pass, self: Any, approximate: str = "none") -> Any:
    return _lifted(self, lambda x: _gelu_float64(x, approximate) if x.dtype == tf.float64 else tf.nn.gelu(x, approximate == "tanh"))


def _gelu_float64(x: tf.Tensor, approximate: str) -> tf.Tensor:
    """Compute GELU by its formula, as TensorFlow's function has constants of float32.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.GELU.html
    """
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + (tf.tanh(inner) if approximate == "tanh" else tf.math.erf(x * math.sqrt(0.5))))


@contextmanager
def gelu_by_formula() -> Iterator[None]:
    """Within the block, TensorFlow's GELU, which Keras calls, is exact in float64."""
    original = tf.nn.gelu

    def gelu(features: Any, approximate: bool = False, name: str | None = None) -> tf.Tensor:
        x = tf.convert_to_tensor(features)
        return _gelu_float64(x, "tanh" if approximate else "none") if x.dtype == tf.float64 else original(x, approximate, name)

    tf.nn.gelu = gelu
    try:
        yield
    finally:
        tf.nn.gelu = original


@operation("aten.hardtanh.default")
def _hardtanh(run: Pass, self: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    def clipped(x: tf.Tensor) -> tf.Tensor:
        """At a bound torch has no gradient here, unlike `_clamp`."""
        return tf.where((x > min_val) & (x < max_val), x, tf.stop_gradient(tf.clip_by_value(x, min_val, max_val)))

    return _lifted(self, clipped)


@operation("aten.leaky_relu.default")
def _leaky_relu(run: Pass, self: Any, negative_slope: float = 0.01) -> Any:
    return _lifted(self, lambda x: tf.where(x > 0, x, negative_slope * x) if x.dtype == tf.float64 else tf.nn.leaky_relu(x, negative_slope))


@operation("aten.elu.default")
def _elu(run: Pass, self: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    return _lifted(self, lambda x: scale * tf.where(x > 0, x, alpha * tf.math.expm1(tf.minimum(x * input_scale, 0.0))))


@operation("aten.celu.default")
def _celu(run: Pass, self: Any, alpha: float = 1.0) -> Any:
    return _lifted(self, lambda x: tf.where(x > 0, x, alpha * tf.math.expm1(tf.minimum(x / alpha, 0.0))))


@operation("aten.softplus.default")
def _softplus(run: Pass, self: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return _lifted(self, lambda x: tf.where(x * beta > threshold, x, tf.nn.softplus(tf.minimum(x * beta, threshold)) / beta))


@operation("aten.clamp.Tensor")
def _clamp_between(run: Pass, self: Any, min: Any = None, max: Any = None) -> tf.Tensor:
    """Share the gradient among equal values as torch: halves, or all to a bound that is passed."""
    x = canonical(self)
    low, high = (None if bound is None else cast(canonical(bound), x.dtype) for bound in (min, max))
    y = x if low is None else _larger(x, low)
    if low is None or high is None:
        return y if high is None else _smaller(y, high)
    return tf.where(low == high, tf.where(x < low, low, tf.where(x > high, high, x)), _smaller(y, high))


@operation("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default")
def _clamp(run: Pass, self: Any, min: Any = None, max: Any = None) -> Any:
    def clamped(x: tf.Tensor) -> tf.Tensor:
        """What is equal to a bound has no gradient, as on torch."""
        low, high = (None if bound is None else cast(bound, x.dtype) for bound in (min, max))
        y = x if low is None else tf.where(x <= low, low, x)
        return y if high is None else tf.where(y >= high, high, y)

    return _lifted(self, clamped)


@operation("aten.prelu.default", "aten._prelu_kernel.default")
def _prelu(run: Pass, self: Any, weight: tf.Tensor) -> Any:
    if isinstance(self, ChannelsLast):
        return ChannelsLast(tf.where(self.value > 0, self.value, self.value * tf.reshape(weight, [-1])))
    rank = self.shape.rank
    shape = [1, -1] + [1] * (rank - 2) if rank > 1 else [-1]
    return tf.where(self > 0, self, self * tf.reshape(weight, shape))


def promoted(a: Any, b: Any) -> tuple[Any, Any]:
    """Cast two operands, of which one may be a number, to torch's common type."""
    if tf.is_tensor(a) and tf.is_tensor(b):
        if a.dtype == b.dtype:
            return a, b
        if a.shape.rank == 0 and b.shape.rank and a.dtype.is_floating <= b.dtype.is_floating and a.dtype != tf.bool:
            return tf.cast(a, b.dtype), b  # as in torch, a tensor without dimensions does not widen another of its kind
        if b.shape.rank == 0 and a.shape.rank and b.dtype.is_floating <= a.dtype.is_floating and b.dtype != tf.bool:
            return a, tf.cast(b, a.dtype)
        common = max(a.dtype, b.dtype, key=_ORDER.index)
        return tf.cast(a, common), tf.cast(b, common)
    if tf.is_tensor(a):
        wide = isinstance(b, float) and not a.dtype.is_floating
        common = float_format() if wide else tf.int64 if a.dtype == tf.bool and not isinstance(b, bool) else a.dtype
        return cast(a, common), cast(b, common)
    if tf.is_tensor(b):
        second, first = promoted(b, a)
        return first, second
    return a, b


def _binary(function: Callable[[Any, Any], Any], floating: bool = False) -> Operation:
    def applied(a: Any, b: Any, alpha: float) -> Any:
        a, b = promoted(a, b)
        if floating and tf.is_tensor(a):
            a, b = _float(a), _float(b)
        return function(a, b if alpha == 1 else b * cast(alpha, b.dtype))

    def carried_out(run: Pass, self: Any, other: Any, alpha: float = 1, **_: Any) -> Any:
        pair = self, other
        if any(isinstance(x, ChannelsLast) for x in pair) and all(_fits_channels_last(x) for x in pair):
            a, b = (channels_last(x) if isinstance(x, ChannelsLast) or _rank(x) == 4 else x for x in pair)
            return ChannelsLast(applied(a, b, alpha))
        return applied(canonical(self), canonical(other), alpha)

    return carried_out


def _rank(x: Any) -> int:
    return x.shape.rank if tf.is_tensor(x) else 4 if isinstance(x, ChannelsLast) else 0


def _fits_channels_last(x: Any) -> bool:
    return _rank(x) in (0, 4)


def _floor_divide(a: Any, b: Any) -> Any:
    return a // b


def _truncated_remainder(a: Any, b: Any) -> Any:
    """Return a remainder with the sign of `a`.

    TensorFlow's has no gradient.
    """
    return a - _truncated(tf.divide(a, b)) * b


def _larger(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return the maximum; of equal values each gets half of the gradient, as on torch."""
    return tf.where(a == b, (a + b) / 2 if a.dtype.is_floating else a, tf.maximum(a, b))


def _smaller(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return the minimum, as `_larger`."""
    return tf.where(a == b, (a + b) / 2 if a.dtype.is_floating else a, tf.minimum(a, b))


_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": tf.add,
    "atan2": tf.atan2,
    "eq": tf.equal,
    "floor_divide": _floor_divide,
    "fmod": _truncated_remainder,
    "ge": tf.greater_equal,
    "gt": tf.greater,
    "le": tf.less_equal,
    "lt": tf.less,
    "maximum": _larger,
    "minimum": _smaller,
    "mul": tf.multiply,
    "ne": tf.not_equal,
    "remainder": tf.math.floormod,
    "sub": tf.subtract,
}
_KINDS = {"atan2": ("default",), "floor_divide": ("default", "Scalar"), "maximum": ("default",), "minimum": ("default",)}
for _name, _function in _BINARY.items():
    OPERATIONS.update({f"aten.{_name}.{_kind}": _binary(_function) for _kind in _KINDS.get(_name, ("Tensor", "Scalar"))})
for _kind in ("Tensor", "Scalar"):
    OPERATIONS[f"aten.div.{_kind}"] = OPERATIONS[f"aten.true_divide.{_kind}"] = _binary(tf.divide, floating=True)


def _logical(function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], bits: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None) -> Operation:
    def carried_out(run: Pass, self: Any, other: Any) -> Any:
        a, b = promoted(canonical(self), canonical(other))
        if bits is not None and a.dtype != tf.bool:
            return bits(a, b)
        return function(tf.cast(a, tf.bool), tf.cast(b, tf.bool))

    return carried_out


for _name, _bools, _bits in (
    ("and", tf.logical_and, tf.bitwise.bitwise_and),
    ("or", tf.logical_or, tf.bitwise.bitwise_or),
    ("xor", tf.math.logical_xor, tf.bitwise.bitwise_xor),
):
    OPERATIONS[f"aten.logical_{_name}.default"] = _logical(_bools, None)
    for _kind in ("Tensor", "Scalar"):
        OPERATIONS[f"aten.bitwise_{_name}.{_kind}"] = OPERATIONS[f"aten.__{_name}__.{_kind}"] = _logical(_bools, _bits)


@operation("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _divided(run: Pass, self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    a, b = promoted(canonical(self), canonical(other))
    if rounding_mode == "floor":
        return a // b
    quotient = tf.divide(_float(a), _float(b))
    return quotient if rounding_mode is None else tf.cast(_truncated(quotient), a.dtype)


@operation("aten.rsub.Scalar", "aten.rsub.Tensor")
def _reversed_subtraction(run: Pass, self: Any, other: Any, alpha: float = 1) -> Any:
    return OPERATIONS["aten.sub.Tensor"](run, other, self, alpha)


@operation("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def _power(run: Pass, self: Any, exponent: Any) -> Any:
    if not tf.is_tensor(exponent) and not isinstance(exponent, ChannelsLast):
        if exponent == 2:
            return _lifted(self, tf.square)
        if exponent == 0.5:
            return _lifted(self, tf.sqrt)
    a, b = promoted(canonical(self), canonical(exponent))
    return tf.pow(a, b)


@operation("aten.hypot.default")
def _hypotenuse(run: Pass, self: Any, other: Any) -> Any:
    return tf.sqrt(tf.square(canonical(self)) + tf.square(canonical(other)))


@operation("aten.copysign.Tensor", "aten.copysign.Scalar")
def _copysign(run: Pass, self: Any, other: Any) -> Any:
    x, signs = promoted(canonical(self), canonical(other))
    return tf.where(tf.math.reciprocal(signs) < 0, -tf.abs(x), tf.abs(x))  # also of a negative zero


@operation("aten.round.decimals")
def _round(run: Pass, self: Any, decimals: int) -> Any:
    return _lifted(self, lambda x: tf.round(x * 10.0**decimals) / 10.0**decimals)


@operation("aten.special_erfcx.default")
def _scaled_erfc(run: Pass, self: Any) -> tf.Tensor:
    """Compute exp(x²) · erfc(x), from 5 on by its asymptotic series.

    https://dlmf.nist.gov/7.12
    """
    x = canonical(self)
    far, near = tf.maximum(x, 5.0), tf.minimum(x, 5.0)
    step = 1 / (2 * tf.square(far))
    series = 1 - step * (1 - 3 * step * (1 - 5 * step * (1 - 7 * step * (1 - 9 * step))))
    return tf.where(x < 5.0, tf.exp(tf.square(near)) * tf.math.erfc(near), series / (far * math.sqrt(math.pi)))


@operation("aten.polygamma.default")
def _polygamma(run: Pass, n: int, self: Any) -> tf.Tensor:
    x = canonical(self)
    return tf.math.polygamma(tf.cast(n, x.dtype), x)


@operation("aten.addcmul.default")
def _addcmul(run: Pass, self: Any, tensor1: Any, tensor2: Any, value: float = 1.0) -> Any:
    return canonical(self) + canonical(tensor1) * canonical(tensor2) * value


@operation("aten.lerp.Scalar", "aten.lerp.Tensor")
def _lerp(run: Pass, self: Any, end: Any, weight: Any) -> Any:
    start = canonical(self)
    return start + (canonical(end) - start) * canonical(weight)


@operation("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(run: Pass, condition: Any, self: Any, other: Any) -> Any:
    a, b = promoted(canonical(self), canonical(other))
    return tf.where(canonical(condition), a, b)


@operation("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(run: Pass, self: Any, mask: Any, value: Any) -> Any:
    x = canonical(self)
    return tf.where(canonical(mask), cast(canonical(value), x.dtype), x)


@operation("aten.linear.default")
def _linear(run: Pass, input: Any, weight: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
    x = run.low(canonical(input))
    weight = run.low(weight)
    if x.shape.rank == 2:
        y = tf.matmul(x, weight, transpose_b=True)
    else:
        y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), weight, transpose_b=True)
        y = reshaped(y, [*shape_of(x)[:-1], weight.shape[0]])
    y = as_float32(y)
    return y if bias is None else tf.nn.bias_add(y, bias) if y.shape.rank == 2 else y + bias


def as_float32(y: tf.Tensor) -> tf.Tensor:
    """Return a product's result in float32, unless it is in float64."""
    return tf.cast(y, tf.float32) if y.dtype in (tf.bfloat16, tf.float16) else y


@operation("aten.matmul.default", "aten.bmm.default", "aten.mm.default", "aten.mv.default", "aten.dot.default")
def _matmul(run: Pass, self: Any, other: Any = None, mat2: Any = None, vec: Any = None, tensor: Any = None) -> tf.Tensor:
    second = next(x for x in (other, mat2, vec, tensor) if x is not None)
    a, b = run.low(canonical(self)), run.low(canonical(second))
    if a.shape.rank == 1 and b.shape.rank == 1:
        return as_float32(tf.reduce_sum(a * b))
    if b.shape.rank == 1:
        return as_float32(tf.linalg.matvec(a, b))
    if a.shape.rank == 1:
        return as_float32(tf.linalg.matvec(b, a, transpose_a=True))
    return as_float32(tf.matmul(a, b))


@operation("aten.addmm.default", "aten.baddbmm.default")
def _addmm(
    run: Pass, self: Any, mat1: Any = None, mat2: Any = None, batch1: Any = None, batch2: Any = None, beta: float = 1, alpha: float = 1
) -> tf.Tensor:
    product = _matmul(run, batch1 if mat1 is None else mat1, batch2 if mat2 is None else mat2)
    return (product if alpha == 1 else product * float(alpha)) + (self if beta == 1 else float(beta) * self)


@operation("aten.einsum.default")
def _einsum(run: Pass, equation: str, tensors: Sequence[Any], path: Any = None) -> tf.Tensor:
    return tf.einsum(equation.replace(" ", ""), *[canonical(x) for x in tensors])


@operation("aten.bilinear.default")
def _bilinear(run: Pass, input1: Any, input2: Any, weight: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
    y = tf.einsum("...i,kij,...j->...k", canonical(input1), weight, canonical(input2))
    return y if bias is None else y + bias


@operation("aten.scaled_dot_product_attention.default")
def _attention(
    run: Pass,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tf.Tensor:
    query, key, value = canonical(query), canonical(key), canonical(value)
    if enable_gqa:
        key, value = (tf.repeat(part, query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    query = query * tf.constant(scale or 1 / math.sqrt(query.shape[-1]), query.dtype)
    scores = as_float32(tf.matmul(run.low(query), run.low(key), transpose_b=True))
    if is_causal:
        rows, columns = tf.range(tf.shape(query)[-2]), tf.range(tf.shape(key)[-2])
        scores = tf.where(rows[:, None] >= columns[None], scores, tf.constant(-math.inf, scores.dtype))
    if attn_mask is not None:
        mask = canonical(attn_mask)
        scores = tf.where(mask, scores, tf.constant(-math.inf, scores.dtype)) if mask.dtype == tf.bool else scores + mask
    weights = tf.nn.softmax(scores)
    if dropout_p and run.training:
        weights = run.dropout(weights, dropout_p)
    return as_float32(tf.matmul(run.low(weights), run.low(value)))


@operation("aten._softmax.default", "aten.softmax.int")
def _softmax(run: Pass, self: Any, dim: int, half_to_float: Any = None, dtype: Any = None) -> tf.Tensor:
    return tf.nn.softmax(canonical(self), axis=dim)


@operation("aten._log_softmax.default", "aten.log_softmax.int")
def _log_softmax(run: Pass, self: Any, dim: int, half_to_float: Any = None, dtype: Any = None) -> tf.Tensor:
    return tf.nn.log_softmax(canonical(self), axis=dim)


@operation("aten.logsumexp.default")
def _logsumexp(run: Pass, self: Any, dim: Sequence[int], keepdim: bool = False) -> tf.Tensor:
    return tf.reduce_logsumexp(canonical(self), list(dim), keepdim)


@operation("aten.embedding.default")
def _embedding(
    run: Pass, weight: tf.Tensor, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> tf.Tensor:
    indices = canonical(indices)
    rows = tf.gather(weight, indices)
    return rows if padding_idx < 0 else tf.where((indices == padding_idx)[..., None], tf.stop_gradient(rows), rows)


@operation("aten.native_dropout.default")
def _dropout(run: Pass, input: Any, p: float, train: bool | None) -> tuple[Any, None]:
    if not train or not run.training or p == 0:
        return input, None
    return run.dropout(canonical(input), p), None


@operation("aten.dropout.default")
def _whole_dropout(run: Pass, input: Any, p: float, train: bool) -> Any:
    return _dropout(run, input, p, train)[0]


@operation("aten.bernoulli.p")
def _bernoulli(run: Pass, self: Any, p: float, generator: Any = None) -> tf.Tensor:
    if p in (0.0, 1.0):
        return tf.fill(tf.shape(canonical(self)), tf.constant(p, canonical(self).dtype))
    return run.dropout(tf.ones_like(canonical(self)), 1.0 - p) * tf.constant(p, canonical(self).dtype)


@operation("aten.layer_norm.default", "aten.native_layer_norm.default")
def _layer_norm(
    run: Pass,
    input: Any,
    normalized_shape: Sequence[int],
    weight: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    x = canonical(input)
    axes = list(range(x.shape.rank - len(normalized_shape), x.shape.rank))
    deviation = x - tf.reduce_mean(x, axes, keepdims=True)
    inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(deviation), axes, keepdims=True) + tf.constant(eps, x.dtype))
    y = deviation * inverse
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y, None, None) if run.operation == "aten.native_layer_norm.default" else y


@operation("aten.rms_norm.default")
def _rms_norm(run: Pass, input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> tf.Tensor:
    x = canonical(input)
    axes = list(range(x.shape.rank - len(normalized_shape), x.shape.rank))
    small = np.finfo(x.dtype.as_numpy_dtype).eps if eps is None else eps
    y = x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), axes, keepdims=True) + tf.constant(small, x.dtype))
    return y if weight is None else y * weight


_REDUCTIONS: Mapping[str, Callable[..., tf.Tensor]] = {
    "mean": tf.reduce_mean,
    "sum": tf.reduce_sum,
    "amax": tf.reduce_max,
    "amin": tf.reduce_min,
    "any": tf.reduce_any,
    "all": tf.reduce_all,
    "prod": tf.reduce_prod,
}


@operation(
    *(f"aten.{name}.default" for name in _REDUCTIONS),
    *(f"aten.{name}.{kind}" for name in ("any", "all") for kind in ("dim", "dims")),
    *("aten.mean.dim", "aten.sum.dim_IntList", "aten.prod.dim_int"),
)
def _reduction(run: Pass, self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    reduce = _REDUCTIONS[run.operation.split(".")[1]]
    axes = None if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    if isinstance(self, ChannelsLast) and axes is not None and sorted(axis % 4 for axis in axes) == [2, 3]:
        y = reduce(self.value, [1, 2], keepdim)
        return ChannelsLast(y) if keepdim else y
    x = canonical(self)
    if dtype is not None:
        x = tf.cast(x, dtype)
    elif reduce in (tf.reduce_sum, tf.reduce_prod) and not x.dtype.is_floating:
        x = tf.cast(x, tf.int64)
    elif reduce in (tf.reduce_any, tf.reduce_all):
        x = tf.cast(x, tf.bool)
    return reduce(x, axes, keepdim)


@operation("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.var.dim", "aten.std.dim")
def _variance(run: Pass, self: Any, dim: Any = None, correction: float | None = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    x = canonical(self)
    axes = list(range(x.shape.rank)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    mean = tf.reduce_mean(x, axes, keepdims=True)
    count = tf.cast(tf.math.reduce_prod([tf.cast(shape_of(x)[axis], tf.int32) for axis in axes]), x.dtype)
    freedom = count - tf.constant(float(unbiased) if correction is None else float(correction), x.dtype)
    variance = tf.reduce_sum(tf.square(x - mean), axes, keepdims=keepdim) / freedom
    if run.operation.startswith("aten.std"):
        return _root(variance)
    return (variance, mean if keepdim else tf.squeeze(mean, axes)) if "var_mean" in run.operation else variance


def _root(x: tf.Tensor) -> tf.Tensor:
    """Return √x; where it is 0, its gradient is 0, as that of torch's deviation."""
    return tf.where(x == 0, tf.zeros_like(x), tf.sqrt(tf.where(x == 0, tf.ones_like(x), x)))


@operation("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim")
def _norm(run: Pass, self: Any, ord: float = 2, p: float | None = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x = canonical(self)
    axes = list(range(x.shape.rank)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    return length(x if dtype is None else tf.cast(x, dtype), ord if p is None else p, axes, keepdim)


def length(x: tf.Tensor, p: float, axes: Sequence[int], keepdim: bool = False) -> tf.Tensor:
    """Return (Σ |x|ᵖ)^(1/p); where it is 0, its gradient is 0, as torch's."""
    x = tf.abs(x)
    if math.isinf(p):
        return (tf.reduce_max if p > 0 else tf.reduce_min)(x, axes, keepdim)
    if p == 0:
        return tf.reduce_sum(tf.cast(x > 0, x.dtype), axes, keepdim)
    if p == 1:
        return tf.reduce_sum(x, axes, keepdim)
    powers = tf.reduce_sum(tf.square(x) if p == 2 else tf.pow(x, p), axes, keepdim)
    safe = tf.where(powers > 0, powers, tf.ones_like(powers))
    return tf.where(powers > 0, tf.sqrt(safe) if p == 2 else tf.pow(safe, 1 / p), tf.zeros_like(powers))


@operation("aten.max.dim", "aten.min.dim")
def _extreme_along(run: Pass, self: Any, dim: int, keepdim: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    x, largest = canonical(self), run.operation == "aten.max.dim"
    positions = (tf.argmax if largest else tf.argmin)(x, dim)
    values = first_extreme(x, dim, positions)
    return (tf.expand_dims(values, dim), tf.expand_dims(positions, dim)) if keepdim else (values, positions)


def first_extreme(x: tf.Tensor, dim: int, positions: tf.Tensor) -> tf.Tensor:
    """Return the elements at positions along a dimension; these alone get the gradient."""
    if not x.shape.rank:
        return x
    axis = dim % x.shape.rank
    last = tf.transpose(x, [*(place for place in range(x.shape.rank) if place != axis), axis])
    return tf.gather(last, positions, axis=-1, batch_dims=x.shape.rank - 1)


@operation("aten.max.default", "aten.min.default")
def _extreme(run: Pass, self: Any) -> tf.Tensor:
    return (tf.reduce_max if run.operation == "aten.max.default" else tf.reduce_min)(canonical(self))


@operation("aten.argmax.default", "aten.argmin.default")
def _position_of_extreme(run: Pass, self: Any, dim: int | None = None, keepdim: bool = False) -> tf.Tensor:
    x, find = canonical(self), tf.argmax if run.operation == "aten.argmax.default" else tf.argmin
    positions = find(tf.reshape(x, [-1]), 0) if dim is None else find(x, dim)
    return tf.expand_dims(positions, dim) if keepdim and dim is not None else positions


@operation("aten.cumsum.default")
def _cumulative_sum(run: Pass, self: Any, dim: int, dtype: Any = None) -> tf.Tensor:
    x = canonical(self)
    return tf.cumsum(tf.cast(x, dtype or (x.dtype if x.dtype.is_floating else tf.int64)), dim)


@operation("aten.cumprod.default")
def _cumulative_product(run: Pass, self: Any, dim: int, dtype: Any = None) -> tf.Tensor:
    """Multiply what a triangular mask leaves: TensorFlow's own gradient divides by factors of 0."""
    x = canonical(self)
    x = tf.cast(x, dtype or (x.dtype if x.dtype.is_floating else tf.int64))
    if not x.dtype.is_floating or not x.shape.rank:
        return tf.math.cumprod(x, dim) if x.shape.rank else x
    axis = dim % x.shape.rank
    order = [*(place for place in range(x.shape.rank) if place != axis), axis]
    last = tf.transpose(x, order)
    places = tf.range(tf.shape(last)[-1])
    products = tf.reduce_prod(tf.where(places <= places[:, None], last[..., None, :], tf.ones([], x.dtype)), -1)
    return tf.transpose(products, np.argsort(order))


@operation("aten.logcumsumexp.default")
def _cumulative_logsumexp(run: Pass, self: Any, dim: int) -> tf.Tensor:
    return tf.math.cumulative_logsumexp(canonical(self), dim)


@operation("aten.topk.default")
def _top_k(run: Pass, self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[tf.Tensor, tf.Tensor]:
    x = canonical(self)
    axes = list(range(x.shape.rank))
    axes[dim], axes[-1] = axes[-1], axes[dim]
    moved = tf.transpose(x, axes)
    values, positions = tf.math.top_k(moved if largest else -moved, k)
    return tf.transpose(values if largest else -values, axes), tf.cast(tf.transpose(positions, axes), tf.int64)


@operation("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.view_copy.default")
def _view(run: Pass, self: Any, size: Any = None, shape: Any = None) -> tf.Tensor:
    size = shape if size is None else size
    if isinstance(self, ChannelsLast) and self.shape[2] == self.shape[3] == 1:
        return reshaped(tf.reshape(self.value, [-1, self.shape[1]]), size)
    return reshaped(canonical(self), size)


@operation("aten.flatten.using_ints")
def _flatten(run: Pass, self: Any, start_dim: int = 0, end_dim: int = -1) -> tf.Tensor:
    x = canonical(self)
    every, last = shape_of(x), end_dim % x.shape.rank
    return reshaped(x, [*every[:start_dim], -1, *every[last + 1 :]])


@operation("aten.unflatten.int")
def _unflatten(run: Pass, self: Any, dim: int, sizes: Sequence[Any]) -> tf.Tensor:
    x = canonical(self)
    every, axis = shape_of(x), dim % x.shape.rank
    return reshaped(x, [*every[:axis], *sizes, *every[axis + 1 :]])


@operation("aten.permute.default")
def _permute(run: Pass, self: Any, dims: Sequence[int]) -> Any:
    order = [axis % len(dims) for axis in dims]
    if isinstance(self, ChannelsLast) and order == [0, 2, 3, 1]:
        return self.value
    x = canonical(self)
    return ChannelsLast(x) if order == [0, 3, 1, 2] else tf.transpose(x, order)


@operation("aten.transpose.int")
def _transpose(run: Pass, self: Any, dim0: int, dim1: int) -> tf.Tensor:
    x = canonical(self)
    axes = list(range(x.shape.rank))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return tf.transpose(x, axes)


@operation("aten.t.default", "aten.numpy_T.default")
def _transposed(run: Pass, self: Any) -> tf.Tensor:
    return tf.transpose(canonical(self))


@operation("aten.unsqueeze.default")
def _unsqueeze(run: Pass, self: Any, dim: int) -> tf.Tensor:
    return tf.expand_dims(canonical(self), dim)


@operation("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def _squeeze(run: Pass, self: Any, dim: Any = None) -> tf.Tensor:
    x = canonical(self)
    axes = range(x.shape.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    return tf.squeeze(x, [axis for axis in axes if x.shape[axis] == 1]) if any(x.shape[axis] == 1 for axis in axes) else x


@operation("aten.select.int")
def _select(run: Pass, self: Any, dim: int, index: Any) -> tf.Tensor:
    x = canonical(self)
    return tf.gather(x, index if tf.is_tensor(index) or index >= 0 else tf.shape(x)[dim] + index, axis=dim)


@operation("aten.slice.Tensor")
def _slice(run: Pass, self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> tf.Tensor:
    x = canonical(self)
    parts = [slice(None)] * x.shape.rank
    first, last = (None if isinstance(bound, int) and bound >= END else bound for bound in (start, end))
    parts[dim] = slice(first, last, None if step == 1 else step)
    return x[tuple(parts)]


@operation("aten.narrow.default")
def _narrow(run: Pass, self: Any, dim: int, start: Any, length: Any) -> tf.Tensor:
    return _slice(run, self, dim, start, start + length)


@operation("aten.cat.default", "aten.concat.default")
def _concatenate(run: Pass, tensors: Sequence[Any], dim: int = 0) -> Any:
    if dim == 1 and all(isinstance(x, ChannelsLast) for x in tensors):
        return ChannelsLast(tf.concat([x.value for x in tensors], -1))
    parts = [canonical(x) for x in tensors]
    common = max((x.dtype for x in parts), key=_ORDER.index)
    if any(x.shape.rank > 1 for x in parts):  # torch lets a list begin with an empty vector, as caches of keys do
        parts = [x for x in parts if x.shape.as_list() != [0]]
    return tf.concat([tf.cast(x, common) for x in parts], dim)


@operation("aten.stack.default")
def _stack(run: Pass, tensors: Sequence[Any], dim: int = 0) -> tf.Tensor:
    return tf.stack([canonical(x) for x in tensors], dim)


@operation(
    "aten.split_with_sizes.default", "aten.split.Tensor", "aten.split.sizes", "aten.chunk.default", "aten.split_with_sizes_copy.default"
)
def _split(run: Pass, self: Any, split_sizes: Any = None, split_size: Any = None, chunks: int | None = None, dim: int = 0) -> list[Any]:
    if isinstance(self, ChannelsLast) and dim in (1, -3):
        pieces = _split(run, self.value, split_sizes, split_size, chunks, 3)
        return [ChannelsLast(piece) for piece in pieces]
    x = canonical(self)
    whole = x.shape[dim]
    if split_sizes is None and not isinstance(split_size, list):
        size = split_size or -(-whole // (chunks or 1))
        split_sizes = [min(size, whole - start) for start in range(0, whole, size)]
    return list(tf.split(x, split_sizes or split_size, dim))


@operation("aten.unbind.int")
def _unbind(run: Pass, self: Any, dim: int = 0) -> list[tf.Tensor]:
    return list(tf.unstack(canonical(self), axis=dim))


@operation("aten.expand.default", "aten.broadcast_to.default", "aten.expand_copy.default")
def _expand(run: Pass, self: Any, size: Sequence[Any], implicit: bool = False) -> tf.Tensor:
    x = canonical(self)
    x = reshaped(x, [*[1] * (len(size) - x.shape.rank), *shape_of(x)])
    every = shape_of(x)
    full = [every[axis] if not tf.is_tensor(wanted) and wanted == -1 else wanted for axis, wanted in enumerate(size)]
    if all(wanted is every[axis] or (isinstance(wanted, int) and wanted == every[axis]) for axis, wanted in enumerate(full)):
        return x
    y = tf.broadcast_to(x, tf.stack([tf.cast(wanted, tf.int32) for wanted in full]))
    y.set_shape([None if tf.is_tensor(wanted) else wanted for wanted in full])
    return y


@operation("aten.repeat.default")
def _repeat(run: Pass, self: Any, repeats: Sequence[Any]) -> tf.Tensor:
    x = canonical(self)
    return tf.tile(
        reshaped(x, [*[1] * (len(repeats) - x.shape.rank), *shape_of(x)]), tf.stack([tf.cast(times, tf.int32) for times in repeats])
    )


@operation("aten.repeat_interleave.self_int")
def _repeat_each(run: Pass, self: Any, repeats: int, dim: int | None = None, output_size: Any = None) -> tf.Tensor:
    x = canonical(self)
    return tf.repeat(tf.reshape(x, [-1]) if dim is None else x, repeats, 0 if dim is None else dim)


@operation("aten.flip.default")
def _flip(run: Pass, self: Any, dims: Sequence[int]) -> tf.Tensor:
    return tf.reverse(canonical(self), list(dims))


@operation("aten.roll.default")
def _roll(run: Pass, self: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> tf.Tensor:
    x = canonical(self)
    if dims:
        return tf.roll(x, list(shifts), list(dims))
    return tf.reshape(tf.roll(tf.reshape(x, [-1]), list(shifts), [0]), tf.shape(x))  # all elements in a row


@operation("aten.constant_pad_nd.default", "aten.pad.default")
def _pad(run: Pass, self: Any, pad: Sequence[int], value: float | None = 0.0, mode: str = "constant") -> Any:
    """`pad` begins with the last dimension, and may crop."""
    x = canonical(self)
    rank = x.shape.rank
    pairs = [[0, 0] for _ in range(rank)]
    for place in range(len(pad) // 2):
        pairs[rank - 1 - place] = [pad[2 * place], pad[2 * place + 1]]
    if any(amount < 0 for pair in pairs for amount in pair):
        x = x[tuple(slice(max(0, -before), min(0, after) or None) for before, after in pairs)]
        pairs = [[max(0, before), max(0, after)] for before, after in pairs]
    if mode == "constant":
        return tf.pad(x, pairs, constant_values=cast(value or 0.0, x.dtype))
    for axis, (before, after) in enumerate(pairs):
        x = bordered(x, axis, before, after, mode)
    return x


def bordered(x: tf.Tensor, axis: int, before: int, after: int, mode: str) -> tf.Tensor:
    """Lengthen a dimension by elements of its own: `mode` is reflect, replicate or circular."""
    if not before and not after:
        return x
    side = x.shape[axis]
    places = np.arange(-before, side + after)
    if mode == "reflect":
        places = np.abs(places)
        places = np.where(places >= side, 2 * (side - 1) - places, places)
    else:
        places = places % side if mode == "circular" else np.clip(places, 0, side - 1)
    return tf.gather(x, places, axis=axis)


@operation("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(run: Pass, self: Any, indices: Sequence[Any]) -> tf.Tensor:
    x = canonical(self)
    positions_by_axis = {axis: canonical(index) for axis, index in enumerate(indices) if index is not None}
    axes = list(positions_by_axis)
    if any(positions_by_axis[axis].dtype == tf.bool for axis in axes):
        raise NotImplementedError("a mask as an index, whose result has another size for each batch; use torch.where")
    if len(axes) == 1:
        whole = shape_of(x)[axes[0]]
        index = positions_by_axis[axes[0]]
        return tf.gather(x, tf.where(index < 0, index + tf.cast(whole, index.dtype), index), axis=axes[0])
    order = [*axes, *(axis for axis in range(x.shape.rank) if axis not in axes)]
    moved = tf.transpose(x, order)
    parts = [tf.cast(positions_by_axis[axis], tf.int64) for axis in axes]
    parts = [tf.where(part < 0, part + tf.cast(shape_of(x)[axis], tf.int64), part) for axis, part in zip(axes, parts, strict=True)]
    whole_shape = parts[0]
    for part in parts[1:]:
        whole_shape = whole_shape + part
    picked = tf.gather_nd(moved, tf.stack([part + tf.zeros_like(whole_shape) for part in parts], -1))
    if axes[0] == 0 or axes[-1] - axes[0] >= len(axes):  # with a whole dimension between indices, theirs come first
        return picked
    rank = whole_shape.shape.rank
    before = list(range(rank, rank + axes[0]))
    return tf.transpose(picked, [*before, *range(rank), *range(rank + axes[0], picked.shape.rank)])


@operation("aten.index_select.default")
def _index_select(run: Pass, self: Any, dim: int, index: Any) -> tf.Tensor:
    return tf.gather(canonical(self), canonical(index), axis=dim)


@operation("aten.gather.default")
def _gather(run: Pass, self: Any, dim: int, index: Any, sparse_grad: bool = False) -> tf.Tensor:
    x, index = canonical(self), canonical(index)
    rank = x.shape.rank
    axis = dim % rank
    order = [place for place in range(rank) if place != axis] + [axis]
    picked = tf.gather(tf.transpose(x, order), tf.transpose(index, order), axis=-1, batch_dims=rank - 1)
    return tf.transpose(picked, np.argsort(order))


@operation(
    "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default", "aten.new_empty.default", "aten.empty_like.default"
)
def _filled_like(run: Pass, self: Any, size: Any = None, fill_value: Any = None, dtype: Any = None, **_: Any) -> tf.Tensor:
    x = canonical(self)
    value = fill_value if fill_value is not None else float("ones" in run.operation)
    shape = tf.shape(x) if size is None else _dynamic_shape(size)
    return tf.fill(shape, cast(value, dtype or x.dtype))


def _dynamic_shape(size: Sequence[Any]) -> Any:
    return tf.stack([tf.cast(part, tf.int32) for part in size]) if size else tf.zeros([0], tf.int32)


@operation(
    *(f"aten.{name}.default" for name in ("full", "zeros", "ones", "new_ones", "new_zeros", "new_full")),
    "aten.empty.memory_format",
)
def _filled(run: Pass, size: Sequence[Any], fill_value: Any = None, dtype: Any = None, self: Any = None, **_: Any) -> tf.Tensor:
    value = fill_value if fill_value is not None else float("ones" in run.operation)
    like = None if self is None else canonical(self).dtype
    kind = bool if isinstance(value, bool) else int if isinstance(value, int) else float
    chosen = dtype or like or {bool: tf.bool, int: tf.int64, float: float_format()}[kind]
    return tf.fill(_dynamic_shape(size), cast(value, chosen))


@operation("aten.fill.Tensor", "aten.fill.Scalar")
def _fill(run: Pass, self: Any, value: Any) -> tf.Tensor:
    x = canonical(self)
    return tf.fill(tf.shape(x), cast(canonical(value), x.dtype))


@operation("aten.copy.default")
def _copy(run: Pass, self: Any, src: Any, non_blocking: bool = False) -> tf.Tensor:
    x = canonical(self)
    return tf.broadcast_to(tf.cast(canonical(src), x.dtype), tf.shape(x))


@operation("aten.slice_scatter.default", "aten.select_scatter.default")
def _scatter(
    run: Pass, self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, index: int | None = None
) -> tf.Tensor:
    """Return `self` with a slice, or one place, of a dimension replaced by `src`."""
    x, source = canonical(self), tf.cast(canonical(src), canonical(self).dtype)
    axis, whole = dim % x.shape.rank, shape_of(x)[dim]
    if index is not None:
        start, end, source = index, index + 1 if index != -1 else None, tf.expand_dims(source, axis)
    places = tf.range(whole)[slice(start, None if isinstance(end, int) and end >= END else end, step)]
    order = [axis, *(place for place in range(x.shape.rank) if place != axis)]
    replaced = tf.tensor_scatter_nd_update(tf.transpose(x, order), places[:, None], tf.transpose(source, order))
    return tf.transpose(replaced, np.argsort(order))


@operation("aten.scalar_tensor.default")
def _scalar(run: Pass, s: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
    return cast(s, dtype or float_format())


@operation("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(run: Pass, end: Any, start: Any = 0, step: Any = 1, dtype: Any = None, **_: Any) -> tf.Tensor:
    numbers = tf.range(start, end, step)
    return tf.cast(numbers, dtype or (float_format() if numbers.dtype.is_floating else tf.int64))


@operation("aten.linspace.default")
def _linspace(run: Pass, start: float, end: float, steps: int, dtype: Any = None, **_: Any) -> tf.Tensor:
    return tf.cast(tf.linspace(float(start), float(end), steps), dtype or float_format())


@operation("aten.tril.default", "aten.triu.default")
def _triangle(run: Pass, self: Any, diagonal: int = 0) -> tf.Tensor:
    x = canonical(self)
    rows, columns = (tf.range(size) for size in (tf.shape(x)[-2], tf.shape(x)[-1]))
    below = columns[None] - rows[:, None] <= diagonal if "tril" in run.operation else columns[None] - rows[:, None] >= diagonal
    return tf.where(below, x, tf.zeros([], x.dtype))


@operation("aten.one_hot.default")
def _one_hot(run: Pass, self: Any, num_classes: int = -1) -> tf.Tensor:
    return tf.one_hot(canonical(self), num_classes, dtype=tf.int64)


@operation("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default", "aten.type_as.default", "aten.to.other")
def _cast(run: Pass, self: Any, dtype: Any = None, other: Any = None, **_: Any) -> Any:
    wanted = canonical(other).dtype if other is not None and tf.is_tensor(canonical(other)) else dtype
    return self if wanted is None else _lifted(self, lambda x: tf.cast(x, wanted))


@operation(
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._linalg_check_errors.default",
    "aten.sym_constrain_range_for_size.default",
)
def _nothing(run: Pass, **_: Any) -> None:
    return None


@operation("aten.sym_size.int")
def _size(run: Pass, self: Any, dim: int) -> Any:
    return shape_of(canonical(self))[dim]


def _python(function: Callable[..., Any]) -> Operation:
    def carried_out(run: Pass, **arguments: Any) -> Any:
        return function(*arguments.values())

    return carried_out


def _whole_float(value: Any) -> Any:
    return tf.cast(value, float_format()) if tf.is_tensor(value) else float(value)


OPERATIONS.update(
    {
        "python.add": _python(lambda a, b: a + b),
        "python.floordiv": _python(lambda a, b: a // b),
        "python.mod": _python(lambda a, b: a % b),
        "python.mul": _python(lambda a, b: a * b),
        "python.neg": _python(lambda a: -a),
        "python.sub": _python(lambda a, b: a - b),
        "python.sym_float": _python(_whole_float),
        "python.truediv": _python(lambda a, b: _whole_float(a) / _whole_float(b)),
        **{f"python.{name}": _nothing for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    }
)
