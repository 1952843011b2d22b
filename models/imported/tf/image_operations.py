"""ATen operations on images for TensorFlow: convolutions, pooling, normalisation, resizing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .operations import (
    ChannelsLast,
    Pass,
    as_float32,
    bordered,
    canonical,
    cast,
    channels_last,
    first_extreme,
    operation,
    reshaped,
    shape_of,
)


def _pair(value: Sequence[int] | int) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def _padded(x_bhwc: tf.Tensor, pads: Sequence[tuple[int, int]], value: float = 0.0) -> tf.Tensor:
    if not any(amount for pair in pads for amount in pair):
        return x_bhwc
    return tf.pad(x_bhwc, [[0, 0], *map(list, pads), [0, 0]], constant_values=tf.constant(value, x_bhwc.dtype))


def _biased(y_bhwc: tf.Tensor, bias: tf.Tensor | None) -> ChannelsLast:
    return ChannelsLast(y_bhwc if bias is None else tf.nn.bias_add(y_bhwc, bias))


@operation("aten.conv2d.default", "aten.conv2d.padding")
def _conv2d(
    run: Pass,
    input: Any,
    weight: Any,
    bias: tf.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Any = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> ChannelsLast:
    x, kernel = run.low(channels_last(input)), run.kernel(weight)
    strides, dilations = _pair(stride), _pair(dilation)
    kernel_sides = tuple(kernel.shape[:2])
    spans = [dilated * (side - 1) for dilated, side in zip(dilations, kernel_sides, strict=True)]
    if isinstance(padding, str):
        pads = [(span // 2, span - span // 2) for span in spans] if padding == "same" else [(0, 0), (0, 0)]
    else:
        pads = [(amount, amount) for amount in _pair(padding)]
    y = _convolved(x, kernel, strides, dilations, pads, spans, groups)
    return _biased(as_float32(y), bias)


def _convolved(
    x: tf.Tensor,
    kernel: tf.Tensor,
    strides: tuple[int, int],
    dilations: tuple[int, int],
    pads: Sequence[tuple[int, int]],
    spans: Sequence[int],
    groups: int,
) -> tf.Tensor:
    """Convolve with padding SAME, or with a separate padding operation.

    Explicit paddings are five times as slow on CPUs.
    """
    inputs, outputs = kernel.shape[2], kernel.shape[3]
    depthwise = groups > 1 and inputs == 1
    if strides != (1, 1) and (max(dilations) > 1 or (depthwise and strides[0] != strides[1])):  # TensorFlow has neither
        return _convolved(x, kernel, (1, 1), dilations, pads, spans, groups)[:, :: strides[0], :: strides[1]]
    if depthwise:
        filters = tf.reshape(kernel, [*kernel.shape[:2], groups, outputs // groups])
        return tf.nn.depthwise_conv2d(_padded(x, pads), filters, [1, *strides, 1], "VALID", dilations=list(dilations))
    if dilations != (1, 1) and (x.dtype == tf.float64 or os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0"):  # no kernel has the gradient
        kernel, dilations = _spread(kernel, dilations), (1, 1)
    same = strides == (1, 1) and all(before == after and before + after == span for (before, after), span in zip(pads, spans, strict=True))
    if not same:
        x = _padded(x, pads)

    def convolve(images: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return tf.nn.conv2d(images, weights, [1, *strides, 1], "SAME" if same else "VALID", dilations=[1, *dilations, 1])

    if groups == 1:
        return convolve(x, kernel)
    parts = zip(tf.split(x, groups, -1), tf.split(kernel, groups, -1), strict=True)
    return tf.concat([convolve(images, weights) for images, weights in parts], -1)


def _spread(kernel: tf.Tensor, dilations: tuple[int, int]) -> tf.Tensor:
    """Return a kernel [h, w, in, out] with zeros between its elements, which dilates it."""
    height, width, inputs, outputs = kernel.shape
    spread = tf.pad(kernel[:, None, :, None], [[0, 0], [0, dilations[0] - 1], [0, 0], [0, dilations[1] - 1], [0, 0], [0, 0]])
    whole = tf.reshape(spread, [height * dilations[0], width * dilations[1], inputs, outputs])
    return whole[: dilations[0] * (height - 1) + 1, : dilations[1] * (width - 1) + 1]


@operation("aten.conv1d.default", "aten.conv1d.padding")
def _conv1d(
    run: Pass,
    input: Any,
    weight: Any,
    bias: tf.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Any = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> tf.Tensor:
    wide = padding if isinstance(padding, str) else (0, padding[0])
    x, kernel = tf.expand_dims(canonical(input), 2), tf.expand_dims(canonical(weight), 2)
    y = _conv2d(run, x, kernel, bias, (1, stride[0]), wide, (1, dilation[0]), groups)
    return tf.squeeze(canonical(y), [2])


@operation("aten.conv3d.default", "aten.conv3d.padding")
def _conv3d(
    run: Pass,
    input: Any,
    weight: tf.Tensor,
    bias: tf.Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Any = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> tf.Tensor:
    """Sum two-dimensional convolutions over the kernel's depth.

    TensorFlow has no groups and dilations in three dimensions.
    """
    (first, *strides), (apart, *dilations), x = _triple(stride), _triple(dilation), canonical(input)
    depth = weight.shape[2]
    if isinstance(padding, str):
        span = apart * (depth - 1) if padding == "same" else 0
        ends = span // 2, span - span // 2
    else:
        ends = (_triple(padding)[0],) * 2
    wide = padding if isinstance(padding, str) else _triple(padding)[1:]
    x = tf.pad(x, [[0, 0], [0, 0], ends, [0, 0], [0, 0]])
    count = (x.shape[2] - apart * (depth - 1) - 1) // first + 1
    taps = []
    for tap in range(depth):
        layers = x[:, :, tap * apart : tap * apart + (count - 1) * first + 1 : first]
        images = tf.reshape(tf.transpose(layers, [0, 2, 1, 3, 4]), [-1, x.shape[1], *x.shape[3:]])
        taps.append(_conv2d(run, images, weight[:, :, tap], None, strides, wide, dilations, groups).value)
    total = tf.add_n(taps) if bias is None else tf.nn.bias_add(tf.add_n(taps), bias)
    return tf.transpose(tf.reshape(total, [-1, count, *total.shape[1:]]), [0, 4, 1, 2, 3])


def _triple(value: Sequence[int] | int) -> tuple[int, ...]:
    return (value,) * 3 if isinstance(value, int) else tuple(value) * (3 if len(value) == 1 else 1)


@operation("aten.convolution.default")
def _convolution(
    run: Pass,
    input: Any,
    weight: Any,
    bias: tf.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    dimensions = len(input.shape) - 2
    if transposed:
        return _TRANSPOSED[dimensions](run, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return (_conv1d, _conv2d, _conv3d)[dimensions - 1](run, input, weight, bias, stride, padding, dilation, groups)


@operation("aten.conv_transpose2d.input")
def _conv_transpose2d(
    run: Pass,
    input: Any,
    weight: Any,
    bias: tf.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    output_padding: Sequence[int] = (0, 0),
    groups: int = 1,
    dilation: Sequence[int] = (1, 1),
) -> Any:
    strides, dilations, pads, extra = _pair(stride), _pair(dilation), _pair(padding), _pair(output_padding)
    if groups > 1 or max(dilations) > 1:
        return _spread_convolution(run, input, weight, bias, strides, pads, extra, groups, dilations)
    x, kernel = run.low(channels_last(input)), run.low(tf.transpose(canonical(weight), [2, 3, 1, 0]))
    full = [(size - 1) * step + side for size, step, side in zip(x.shape[1:3], strides, kernel.shape[:2], strict=True)]
    shape = tf.stack([tf.shape(x)[0], *full, kernel.shape[2]])
    y = tf.nn.conv2d_transpose(x, kernel, shape, [1, *strides, 1], "VALID")
    y = _padded(y, [(0, more) for more in extra])
    ends = [size + more - pad for size, more, pad in zip(full, extra, pads, strict=True)]
    y = y[:, pads[0] : ends[0], pads[1] : ends[1]]
    return _biased(as_float32(y), bias)


@operation("aten.conv_transpose1d.default")
def _conv_transpose1d(
    run: Pass,
    input: Any,
    weight: Any,
    bias: tf.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> tf.Tensor:
    x, kernel = tf.expand_dims(canonical(input), 2), tf.expand_dims(canonical(weight), 2)
    y = _conv_transpose2d(run, x, kernel, bias, (1, stride[0]), (0, padding[0]), (0, output_padding[0]), groups, (1, dilation[0]))
    return tf.squeeze(canonical(y), [2])


@operation("aten.conv_transpose3d.input")
def _conv_transpose3d(
    run: Pass,
    input: Any,
    weight: Any,
    bias: tf.Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    output_padding: Sequence[int] = (0, 0, 0),
    groups: int = 1,
    dilation: Sequence[int] = (1, 1, 1),
) -> tf.Tensor:
    strides, pads, extra, dilations = (_triple(value) for value in (stride, padding, output_padding, dilation))
    return _spread_convolution(run, input, weight, bias, strides, pads, extra, groups, dilations)


_TRANSPOSED = {1: _conv_transpose1d, 2: _conv_transpose2d, 3: _conv_transpose3d}


def _spread_convolution(
    run: Pass,
    input: Any,
    weight: Any,
    bias: Any,
    strides: Sequence[int],
    pads: Sequence[int],
    extra: Sequence[int],
    groups: int,
    dilations: Sequence[int],
) -> Any:
    """Convolve an input with zeros between its elements, by the reversed kernel.

    That is a transposed convolution.
    """
    x, kernel = canonical(input), canonical(weight)
    dimensions = len(strides)
    for axis, step in enumerate(strides):
        x = _with_zeros(x, 2 + axis, step)
    borders = [
        (dilated * (side - 1) - pad, dilated * (side - 1) - pad + more)
        for dilated, side, pad, more in zip(dilations, kernel.shape[2:], pads, extra, strict=True)
    ]
    x = tf.pad(x, [[0, 0], [0, 0], *([max(0, before), max(0, after)] for before, after in borders)])
    x = x[(slice(None), slice(None), *(slice(max(0, -before), min(0, after) or None) for before, after in borders))]
    parts = tf.reverse(kernel, list(range(2, 2 + dimensions)))
    inputs, outputs = kernel.shape[0] // groups, kernel.shape[1]
    parts = tf.reshape(parts, [groups, inputs, outputs, *kernel.shape[2:]])
    parts = tf.reshape(tf.transpose(parts, [0, 2, 1, *range(3, 3 + dimensions)]), [groups * outputs, inputs, *kernel.shape[2:]])
    plain = _conv2d if dimensions == 2 else _conv3d
    return plain(run, x, parts, bias, (1,) * dimensions, (0,) * dimensions, dilations, groups)


def _with_zeros(x: tf.Tensor, axis: int, step: int) -> tf.Tensor:
    """Put `step` − 1 zeros between the elements of a dimension."""
    if step == 1:
        return x
    sizes = shape_of(x)
    wide = tf.pad(tf.expand_dims(x, axis + 1), [[0, step - 1 if place == axis + 1 else 0] for place in range(x.shape.rank + 1)])
    y = reshaped(wide, [*sizes[:axis], sizes[axis] * step, *sizes[axis + 1 :]])
    return y[(*(slice(None) for _ in range(axis)), slice(None, sizes[axis] * step - step + 1))]


def _window_ends(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    """Return the padding at the end that torch's ceil_mode implies; a window never begins in it."""
    span = dilation * (kernel - 1) + 1
    room = size + 2 * pad - span
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + pad:
        count -= 1
    return max(0, (count - 1) * stride + span - size - pad)


@operation("aten.max_pool2d.default")
def _max_pool2d(
    run: Pass,
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> ChannelsLast:
    x = channels_last(self)
    kernels, pads, dilations = _pair(kernel_size), _pair(padding), _pair(dilation)
    strides = _pair(stride or kernel_size)
    ends = [_window_ends(x.shape[1 + axis], kernels[axis], strides[axis], pads[axis], dilations[axis], ceil_mode) for axis in (0, 1)]
    x = _padded(x, list(zip(pads, ends, strict=True)), -math.inf)
    if dilations == (1, 1):
        return ChannelsLast(tf.nn.max_pool2d(x, kernels, strides, "VALID"))
    return ChannelsLast(tf.nn.pool(x, kernels, "MAX", dilations=dilations)[:, :: strides[0], :: strides[1]])


@operation("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def _max_pool_with_indices(
    run: Pass,
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return maxima, and their places in an example's flat image."""
    x = canonical(self)
    sides = x.shape[2:]
    dimensions = len(sides)
    kernels, pads, dilations, strides = (
        tuple(value) * (dimensions if len(value) == 1 else 1) for value in (kernel_size, padding, dilation, stride or kernel_size)
    )
    numbers = np.arange(math.prod(sides)).reshape(sides)
    for axis in range(dimensions):
        end = _window_ends(sides[axis], kernels[axis], strides[axis], pads[axis], dilations[axis], ceil_mode)
        border = [[0, 0]] * axis + [[pads[axis], end]] + [[0, 0]] * (dimensions - axis - 1)
        x = tf.pad(x, [[0, 0], [0, 0], *border], constant_values=tf.constant(-math.inf, x.dtype))
        numbers = np.pad(numbers, border)
    picks = []
    for axis in range(dimensions):
        starts = np.arange(0, numbers.shape[axis] - dilations[axis] * (kernels[axis] - 1), strides[axis])
        picks.append(starts[:, None] + dilations[axis] * np.arange(kernels[axis]))
    counts = [len(places) for places in picks]
    flat = np.zeros([1] * 2 * dimensions, np.int64)  # [windows of dimensions dimension, kernel of dimensions dimension]
    for axis, places in enumerate(picks):
        shape = [1] * 2 * dimensions
        shape[axis], shape[dimensions + axis] = places.shape
        flat = flat + places.reshape(shape) * math.prod(numbers.shape[axis + 1 :])
    flat = flat.reshape(math.prod(counts), -1)
    windows = tf.gather(tf.reshape(x, [-1, x.shape[1], numbers.size]), flat, axis=2)
    places = tf.argmax(windows, -1)
    values = tf.gather(windows, places, axis=-1, batch_dims=3)
    indices = tf.reduce_sum(tf.constant(numbers.ravel()[flat]) * tf.one_hot(places, flat.shape[1], dtype=tf.int64), -1)
    shape = [-1, x.shape[1], *counts]
    return tf.reshape(values, shape), tf.reshape(indices, shape)


@operation("aten.max_pool3d.default")
def _max_pool3d(
    run: Pass, self: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> tf.Tensor:
    return _max_pool_with_indices(run, self, kernel_size, stride, padding, dilation, ceil_mode)[0]


@operation("aten.max_pool1d.default")
def _max_pool1d(
    run: Pass, self: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Any:
    x = tf.expand_dims(canonical(self), 2)
    y = _max_pool2d(run, x, (1, kernel_size[0]), (1, (stride or kernel_size)[0]), (0, padding[0]), (1, dilation[0]), ceil_mode)
    return tf.squeeze(canonical(y), [2])


@operation("aten.avg_pool2d.default")
def _avg_pool2d(
    run: Pass,
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ChannelsLast:
    x = channels_last(self)
    kernels, pads, strides = _pair(kernel_size), _pair(padding), _pair(stride or kernel_size)
    ends = [_window_ends(x.shape[1 + axis], kernels[axis], strides[axis], pads[axis], 1, ceil_mode) for axis in (0, 1)]
    area = kernels[0] * kernels[1]
    means = tf.nn.avg_pool2d(_padded(x, list(zip(pads, ends, strict=True))), kernels, strides, "VALID")
    if divisor_override is not None:
        return ChannelsLast(means * tf.constant(area / divisor_override, means.dtype))
    counted = _counted(x.shape[1:3], kernels, strides, pads, ends, count_include_pad)
    return ChannelsLast(means if np.all(counted == area) else means * tf.constant(area / counted, means.dtype)[None, :, :, None])


def _counted(
    sides: Sequence[int], kernels: Sequence[int], strides: Sequence[int], pads: Sequence[int], ends: Sequence[int], count_include_pad: bool
) -> Any:
    """Return the number of elements of each window's mean, [rows, columns].

    The padding of ceil_mode never counts.
    """
    counts: list[Any] = []
    for side, kernel, stride, pad, end in zip(sides, kernels, strides, pads, ends, strict=True):
        begins = np.arange((side + pad + end - kernel) // stride + 1) * stride - pad
        last, first = (side + pad, -pad) if count_include_pad else (side, 0)
        counts.append(np.minimum(begins + kernel, last) - np.maximum(begins, first))
    return np.outer(*counts).astype(np.float64)


@operation("aten.avg_pool1d.default")
def _avg_pool1d(
    run: Pass, self: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False, count_include_pad: bool = True
) -> Any:
    x = tf.expand_dims(canonical(self), 2)
    y = _avg_pool2d(run, x, (1, kernel_size[0]), (1, (stride or kernel_size)[0]), (0, padding[0]), ceil_mode, count_include_pad)
    return tf.squeeze(canonical(y), [2])


@operation("aten.avg_pool3d.default")
def _avg_pool3d(
    run: Pass,
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tf.Tensor:
    """Multiply each dimension by a matrix of its windows' shares."""
    x, kernels, pads, strides = canonical(self), _triple(kernel_size), _triple(padding), _triple(stride or kernel_size)
    for axis in range(3):
        side, last = x.shape[2 + axis], axis == 2
        end = _window_ends(side, kernels[axis], strides[axis], pads[axis], 1, ceil_mode)
        begins = np.arange((side + pads[axis] + end - kernels[axis]) // strides[axis] + 1) * strides[axis] - pads[axis]
        within = (np.arange(side) >= begins[:, None]) & (np.arange(side) < begins[:, None] + kernels[axis])
        counted = np.minimum(begins + kernels[axis], side + pads[axis]) - begins if count_include_pad else within.sum(1)
        shares = within / counted[:, None] if divisor_override is None else within / (divisor_override if last else 1)
        x = _multiplied(x, 2 + axis, shares)
    return x


def _multiplied(x: tf.Tensor, axis: int, matrix: Any) -> tf.Tensor:
    """Multiply a dimension by a matrix [new size, size]."""
    y = tf.tensordot(x, tf.constant(matrix, x.dtype), [[axis], [1]])
    rank = x.shape.rank
    return tf.transpose(y, [*range(axis), rank - 1, *range(axis, rank - 1)])


@operation("aten.adaptive_avg_pool3d.default", "aten._adaptive_avg_pool3d.default")
def _adaptive_avg_pool3d(run: Pass, self: Any, output_size: Sequence[int]) -> tf.Tensor:
    x = canonical(self)
    for axis, wanted in enumerate(output_size):
        x = _multiplied(x, 2 + axis, _mean_windows(x.shape[2 + axis], wanted))
    return x


def _mean_windows(side: int, wanted: int) -> Any:
    """Return weights of torch's adaptive windows, [wanted, side].

    Window i is from floor(i · side / wanted) to ceil((i + 1) · side / wanted).
    """
    weights = np.zeros((wanted, side))
    for row in range(wanted):
        first, last = row * side // wanted, -(-(row + 1) * side // wanted)
        weights[row, first:last] = 1 / (last - first)
    return weights


@operation("aten.adaptive_avg_pool2d.default", "aten._adaptive_avg_pool2d.default")
def _adaptive_avg_pool2d(run: Pass, self: Any, output_size: Sequence[int]) -> ChannelsLast:
    x = channels_last(self)
    sides, wanted = tuple(x.shape[1:3]), _pair(output_size)
    if wanted == (1, 1):
        return ChannelsLast(tf.reduce_mean(x, [1, 2], keepdims=True))
    if sides == wanted:
        return ChannelsLast(x)
    if all(side % part == 0 for side, part in zip(sides, wanted, strict=True)):
        windows = [side // part for side, part in zip(sides, wanted, strict=True)]
        return ChannelsLast(tf.nn.avg_pool2d(x, windows, windows, "VALID"))
    rows, columns = (tf.constant(_mean_windows(side, part), x.dtype) for side, part in zip(sides, wanted, strict=True))
    return ChannelsLast(tf.einsum("bhwc,ih,jw->bijc", x, rows, columns))


@operation("aten.adaptive_avg_pool1d.default")
def _adaptive_avg_pool1d(run: Pass, self: Any, output_size: Sequence[int]) -> tf.Tensor:
    x = canonical(self)
    return tf.einsum("bcl,il->bci", x, tf.constant(_mean_windows(x.shape[2], output_size[0]), x.dtype))


@operation("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool1d.default", "aten.adaptive_max_pool3d.default")
def _adaptive_max_pool(run: Pass, self: Any, output_size: Sequence[int]) -> tuple[tf.Tensor, None]:
    """Take the first maximum of each window, of the last dimension first, as on torch."""
    x = canonical(self)
    for axis, wanted in reversed(list(enumerate(output_size, 2))):
        side, whole = x.shape[axis], (slice(None),) * axis
        bands = [x[(*whole, slice(row * side // wanted, -(-(row + 1) * side // wanted)))] for row in range(wanted)]
        x = tf.stack([first_extreme(band, axis, tf.argmax(band, axis)) for band in bands], axis)
    return x, None


def _along_channels(x: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(value, [1, -1] + [1] * (x.shape.rank - 2))


def _normalised(x: Any, mean: tf.Tensor, variance: tf.Tensor, weight: Any, bias: Any, eps: float) -> Any:
    """Normalise a tensor in canonical order by values of its channels."""
    y = (x - _along_channels(x, mean)) * _along_channels(x, tf.math.rsqrt(variance + tf.constant(eps, variance.dtype)))
    y = y if weight is None else y * _along_channels(x, weight)
    return y if bias is None else y + _along_channels(x, bias)


@operation("aten._native_batch_norm_legit_functional.default")
def _batch_norm_training(
    run: Pass,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: tf.Tensor,
    running_var: tf.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any, tf.Tensor, tf.Tensor]:
    """Normalise by the batch, and return the new running statistics.

    Running variances are unbiased, and 0 if a channel has a single value, as on torch's side.
    """
    y: Any
    if not training:
        y, _, _ = _batch_norm_evaluation(run, input, weight, bias, running_mean, running_var, momentum, eps)
        return y, None, None, running_mean, running_var
    if isinstance(input, ChannelsLast) and input.value.dtype == tf.float32:
        channels = input.shape[1]
        scale = tf.ones([channels]) if weight is None else weight
        offset = tf.zeros([channels]) if bias is None else bias
        value, mean, variance = tf.compat.v1.nn.fused_batch_norm(input.value, scale, offset, epsilon=eps, is_training=True)
        y = ChannelsLast(value)
        count = tf.size(value) // channels
        variance = tf.where(count > 1, variance, tf.zeros_like(variance))
    else:
        x = canonical(input)
        axes = [0, *range(2, x.shape.rank)]
        mean, biased = tf.nn.moments(x, axes)
        y = _normalised(x, mean, biased, weight, bias, eps)
        count = tf.cast(tf.size(x) // x.shape[1], x.dtype)
        variance = biased * count / tf.maximum(count - 1, tf.ones([], x.dtype))

    def moved(before: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        return before + cast(momentum, before.dtype) * (tf.stop_gradient(new) - before)

    return y, mean, variance, moved(running_mean, mean), moved(running_var, variance)


@operation("aten._native_batch_norm_legit_no_training.default", "aten.batch_norm.default")
def _batch_norm_evaluation(
    run: Pass,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: tf.Tensor,
    running_var: tf.Tensor,
    momentum: float,
    eps: float,
    training: bool = False,
    cudnn_enabled: bool = True,
) -> tuple[Any, None, None]:
    if isinstance(input, ChannelsLast):
        inverse = tf.math.rsqrt(running_var + tf.constant(eps, running_var.dtype))
        scale = inverse if weight is None else inverse * weight
        offset = -running_mean * scale if bias is None else bias - running_mean * scale
        return ChannelsLast(input.value * scale + offset), None, None
    return _normalised(canonical(input), running_mean, running_var, weight, bias, eps), None, None


@operation("aten._native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    run: Pass, input: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, None, None]:
    """Normalise by the batch, without running statistics."""
    x = canonical(input)
    mean, variance = tf.nn.moments(x, [0, *range(2, x.shape.rank)])
    return _normalised(x, mean, variance, weight, bias, eps), None, None


@operation("aten.instance_norm.default")
def _instance_norm(
    run: Pass,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> tf.Tensor:
    x = canonical(input)
    if not use_input_stats:
        return _normalised(x, running_mean, running_var, weight, bias, eps)
    mean, variance = tf.nn.moments(x, list(range(2, x.shape.rank)), keepdims=True)
    y = (x - mean) * tf.math.rsqrt(variance + tf.constant(eps, x.dtype))
    y = y if weight is None else y * _along_channels(x, weight)
    return y if bias is None else y + _along_channels(x, bias)


@operation("aten.group_norm.default")
def _group_norm(
    run: Pass, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> tf.Tensor:
    x = canonical(input)
    every = shape_of(x)
    grouped = tf.reshape(x, [-1, num_groups, math.prod(every[1:]) // num_groups])
    mean, variance = tf.nn.moments(grouped, [2], keepdims=True)
    y = reshaped((grouped - mean) * tf.math.rsqrt(variance + tf.constant(eps, x.dtype)), every)
    y = y if weight is None else y * _along_channels(x, weight)
    return y if bias is None else y + _along_channels(x, bias)


_CUBIC = -0.75  # torch's coefficient of Keys' cubic (https://en.wikipedia.org/wiki/Bicubic_interpolation)
_CUBIC_ANTIALIASED = -0.5  # as Pillow's


def _cubic(distance: Any, a: float) -> Any:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def _resize_weights(side: int, wanted: int, kind: str, align_corners: bool, scale: float | None) -> Any:
    """Return torch's weights of a resized axis, [wanted, side].

    `kind`: nearest, exact, linear or cubic. https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html
    """
    rows = np.arange(wanted)
    ratio = (side - 1) / max(1, wanted - 1) if align_corners else 1 / scale if scale else side / wanted
    weights = np.zeros((wanted, side))
    if kind in ("nearest", "exact"):
        ratio32 = np.float32(ratio)  # torch rounds these places in float32
        places = rows.astype(np.float32) * ratio32 if kind == "nearest" else (rows.astype(np.float32) + np.float32(0.5)) * ratio32
        weights[rows, np.minimum(side - 1, places.astype(int))] = 1
        return weights
    places = rows * ratio if align_corners else (rows + 0.5) * ratio - 0.5
    places = np.maximum(places, 0) if kind == "linear" else places
    first = np.floor(places).astype(int)
    for offset in (0, 1) if kind == "linear" else (-1, 0, 1, 2):
        apart = np.abs(places - first - offset)
        np.add.at(weights, (rows, np.clip(first + offset, 0, side - 1)), 1 - apart if kind == "linear" else _cubic(apart, _CUBIC))
    return weights


def _smooth_weights(side: int, wanted: int, kind: str, align_corners: bool, scale: float | None) -> Any:
    """Return weights of a resized axis for ``antialias=True``.

    The filter is as wide as an output's pixel.
    """
    ratio = (side - 1) / max(1, wanted - 1) if align_corners else 1 / scale if scale else side / wanted
    widened = max(ratio, 1.0)
    reach = (1 if kind == "linear" else 2) * widened
    weights = np.zeros((wanted, side))
    for row in range(wanted):
        centre = ratio * (row + 0.5)
        first, last = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), side)
        apart = np.abs((np.arange(first, last) - centre + 0.5) / widened)
        values = np.maximum(0, 1 - apart) if kind == "linear" else _cubic(apart, _CUBIC_ANTIALIASED)
        weights[row, first:last] = values / values.sum()
    return weights


def _resized(run: Pass, x: Any, size: Sequence[int], align_corners: bool, scales: Sequence[float | None]) -> Any:
    """Resize all dimensions after the channels; the operation's name has the kind."""
    name = run.operation
    kind = "exact" if "exact" in name else "nearest" if "nearest" in name else "cubic" if "cubic" in name else "linear"
    weigh = _smooth_weights if "_aa." in name else _resize_weights
    if len(size) == 2:
        images = channels_last(x)
        rows, columns = (
            tf.constant(weigh(side, wanted, kind, align_corners, scale), images.dtype)
            for side, wanted, scale in zip(images.shape[1:3], size, scales, strict=True)
        )
        return ChannelsLast(tf.einsum("bhwc,ih,jw->bijc", images, rows, columns))
    y = canonical(x)
    for axis, (wanted, scale) in enumerate(zip(size, scales, strict=True), 2):
        y = _multiplied(y, axis, weigh(y.shape[axis], wanted, kind, align_corners, scale))
    return y


_RESIZING = (
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"_upsample_nearest_exact{dimensions}d" for dimensions in (1, 2, 3)),
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


@operation(*(f"aten.{name}.vec" for name in _RESIZING))
def _upsample(run: Pass, input: Any, output_size: Any = None, align_corners: bool = False, scale_factors: Any = None) -> Any:
    sides = input.shape[2:]
    scales = scale_factors or [None] * len(sides)
    size = output_size or [math.floor(side * scale) for side, scale in zip(sides, scales, strict=True)]
    return _resized(run, input, size, align_corners, scales)


@operation(*(f"aten.{name}.default" for name in _RESIZING))
def _upsample_sized(
    run: Pass,
    self: Any,
    output_size: Sequence[int],
    align_corners: bool = False,
    scales: float | None = None,
    scales_d: float | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Any:
    every = {1: (scales,), 2: (scales_h, scales_w), 3: (scales_d, scales_h, scales_w)}[len(output_size)]
    return _resized(run, self, output_size, align_corners, every)


@operation(*(f"aten.{kind}_pad{dimensions}d.default" for kind in ("reflection", "replication") for dimensions in (1, 2, 3)))
def _border(run: Pass, self: Any, padding: Sequence[int]) -> tf.Tensor:
    """`padding` begins with the last dimension."""
    x = canonical(self)
    for place in range(len(padding) // 2):
        axis = x.shape.rank - 1 - place
        x = bordered(x, axis, padding[2 * place], padding[2 * place + 1], "reflect" if "reflection" in run.operation else "replicate")
    return x


@operation("aten.grid_sampler_2d.default", "aten.grid_sampler.default")
def _grid_sampler(run: Pass, input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> ChannelsLast:
    """Read images at places from −1 to 1.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grid_sample.html
    """
    images, grid = channels_last(input), canonical(grid)
    if interpolation_mode == 2 or padding_mode == 2 or grid.shape.rank != 4:
        raise NotImplementedError("grid_sample that is bicubic, reflected or in three dimensions")
    height, width = images.shape[1:3]

    def place(at: tf.Tensor, side: int) -> tf.Tensor:
        pixel = (at + 1) / 2 * (side - 1) if align_corners else ((at + 1) * side - 1) / 2
        return tf.clip_by_value(pixel, 0.0, float(side - 1)) if padding_mode == 1 else pixel

    column, row = place(grid[..., 0], width), place(grid[..., 1], height)

    def read(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        down = tf.cast(tf.clip_by_value(rows, 0.0, float(height - 1)), tf.int32)
        across = tf.cast(tf.clip_by_value(columns, 0.0, float(width - 1)), tf.int32)
        pixels = tf.gather(tf.reshape(images, [-1, height * width, images.shape[3]]), down * width + across, axis=1, batch_dims=1)
        return tf.where(inside[..., None], pixels, tf.zeros_like(pixels))

    if interpolation_mode == 1:
        return ChannelsLast(read(tf.round(row), tf.round(column)))
    top, left = tf.floor(row), tf.floor(column)
    down, across = (row - top)[..., None], (column - left)[..., None]
    upper = read(top, left) * (1 - across) + read(top, left + 1) * across
    lower = read(top + 1, left) * (1 - across) + read(top + 1, left + 1) * across
    return ChannelsLast(upper * (1 - down) + lower * down)


@operation("aten.pixel_shuffle.default")
def _pixel_shuffle(run: Pass, self: Any, upscale_factor: int) -> tf.Tensor:
    x = canonical(self)
    batch, channels, height, width = shape_of(x)
    factor, outputs = upscale_factor, channels // upscale_factor**2
    y = tf.transpose(reshaped(x, [batch, outputs, factor, factor, height, width]), [0, 1, 4, 2, 5, 3])
    return reshaped(y, [batch, outputs, height * factor, width * factor])


@operation("aten.pixel_unshuffle.default")
def _pixel_unshuffle(run: Pass, self: Any, downscale_factor: int) -> tf.Tensor:
    x, factor = canonical(self), downscale_factor
    batch, channels, height, width = shape_of(x)
    y = tf.transpose(reshaped(x, [batch, channels, height // factor, factor, width // factor, factor]), [0, 1, 3, 5, 2, 4])
    return reshaped(y, [batch, channels * factor**2, height // factor, width // factor])


@operation("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def _channel_shuffle(run: Pass, self: Any, groups: int) -> tf.Tensor:
    x = canonical(self)
    batch, channels, *sides = shape_of(x)
    y = reshaped(x, [batch, groups, channels // groups, *sides])
    return reshaped(tf.transpose(y, [0, 2, 1, *range(3, y.shape.rank)]), [batch, channels, *sides])
