"""ATen operations on images for TensorFlow: convolutions, pooling, normalisation, resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .operations import ChannelsLast, Pass, as_float32, canonical, cast, channels_last, operation, reshaped, shape_of


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
    if groups > 1 and inputs == 1 and strides[0] == strides[1]:
        depthwise = tf.reshape(tf.reshape(kernel, [*kernel.shape[:2], groups, outputs // groups]), [*kernel.shape[:2], groups, -1])
        return tf.nn.depthwise_conv2d(_padded(x, pads), depthwise, [1, *strides, 1], "VALID", dilations=list(dilations))
    if x.dtype == tf.float64 and dilations != (1, 1):  # no kernel has the gradient
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


@operation("aten.convolution.default", "aten.conv_transpose2d.input")
def _transposed_conv2d(
    run: Pass,
    input: Any,
    weight: Any,
    bias: tf.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    transposed: bool = True,
    output_padding: Sequence[int] = (0, 0),
    groups: int = 1,
) -> Any:
    if not transposed:
        return _conv2d(run, input, weight, bias, stride, padding, dilation, groups)
    if groups != 1:
        raise NotImplementedError("a transposed convolution with groups")
    x, kernel = run.low(channels_last(input)), run.low(tf.transpose(canonical(weight), [2, 3, 1, 0]))
    strides, dilations, pads, extra = _pair(stride), _pair(dilation), _pair(padding), _pair(output_padding)
    full = [
        (size - 1) * step + dilated * (side - 1) + 1
        for size, step, dilated, side in zip(x.shape[1:3], strides, dilations, kernel.shape[:2], strict=True)
    ]
    shape = tf.stack([tf.shape(x)[0], *full, kernel.shape[2]])
    y = tf.nn.conv2d_transpose(x, kernel, shape, [1, *strides, 1], "VALID", dilations=[1, *dilations, 1])
    y = _padded(y, [(0, more) for more in extra])
    ends = [size + more - pad for size, more, pad in zip(full, extra, pads, strict=True)]
    y = y[:, pads[0] : ends[0], pads[1] : ends[1]]
    return _biased(as_float32(y), bias)


@operation("aten.conv_transpose2d.default")
def _conv_transpose2d(
    run: Pass,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    output_padding: Any = (0, 0),
    groups: int = 1,
    dilation: Any = (1, 1),
) -> Any:
    return _transposed_conv2d(run, input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _window_ends(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    """Return the padding at the end that torch's ceil_mode implies; a window never begins in it."""
    span = dilation * (kernel - 1) + 1
    room = size + 2 * pad - span
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + pad:
        count -= 1
    return max(0, (count - 1) * stride + span - size - pad)


@operation("aten.max_pool2d.default", "aten.max_pool2d_with_indices.default")
def _max_pool2d(
    run: Pass,
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Any:
    x = channels_last(self)
    kernels, pads, dilations = _pair(kernel_size), _pair(padding), _pair(dilation)
    strides = _pair(stride or kernel_size)
    ends = [_window_ends(x.shape[1 + axis], kernels[axis], strides[axis], pads[axis], dilations[axis], ceil_mode) for axis in (0, 1)]
    x = _padded(x, list(zip(pads, ends, strict=True)), -math.inf)
    if dilations == (1, 1):
        y = ChannelsLast(tf.nn.max_pool2d(x, kernels, strides, "VALID"))
    elif strides == (1, 1):
        y = ChannelsLast(tf.nn.pool(x, kernels, "MAX", dilations=dilations))
    else:
        raise NotImplementedError("max pooling with a stride and a dilation")
    return (y, None) if "indices" in run.operation else y


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


@operation("aten.adaptive_max_pool2d.default")
def _adaptive_max_pool2d(run: Pass, self: Any, output_size: Sequence[int]) -> tuple[ChannelsLast, None]:
    x = channels_last(self)
    (height, width), (rows, columns) = x.shape[1:3], _pair(output_size)
    bands = [tf.reduce_max(x[:, row * height // rows : -(-(row + 1) * height // rows)], 1) for row in range(rows)]
    picture = tf.stack(bands, 1)
    cells = [tf.reduce_max(picture[:, :, col * width // columns : -(-(col + 1) * width // columns)], 2) for col in range(columns)]
    return ChannelsLast(tf.stack(cells, 2)), None


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
        return run.moved(before, before + cast(momentum, before.dtype) * (tf.stop_gradient(new) - before))

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


def _resize_weights(side: int, wanted: int, linear: bool, align_corners: bool, scale: float | None) -> Any:
    """Return torch's weights of a resized axis, [wanted, side].

    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html
    """
    weights = np.zeros((wanted, side))
    ratio = (side - 1) / max(1, wanted - 1) if align_corners else 1 / scale if scale else side / wanted
    for row in range(wanted):
        if not linear:
            weights[row, min(side - 1, int(row * ratio))] = 1
            continue
        place = row * ratio if align_corners else max(0.0, (row + 0.5) * ratio - 0.5)
        first = min(side - 1, int(place))
        share = place - first
        weights[row, first] += 1 - share
        weights[row, min(side - 1, first + 1)] += share
    return weights


def _resized(x: Any, size: Sequence[int], linear: bool, align_corners: bool, scales: Sequence[float | None]) -> ChannelsLast:
    images = channels_last(x)
    rows, columns = (
        tf.constant(_resize_weights(side, wanted, linear, align_corners, scale), images.dtype)
        for side, wanted, scale in zip(images.shape[1:3], size, scales, strict=True)
    )
    return ChannelsLast(tf.einsum("bhwc,ih,jw->bijc", images, rows, columns))


def _wanted(x: Any, size: Any, scales: Any) -> list[int]:
    sides = x.shape[2:4]
    return list(size) if size is not None else [math.floor(side * scale) for side, scale in zip(sides, scales, strict=True)]


@operation("aten.upsample_bilinear2d.vec", "aten.upsample_nearest2d.vec")
def _upsample(run: Pass, input: Any, output_size: Any = None, align_corners: bool = False, scale_factors: Any = None) -> ChannelsLast:
    scales = scale_factors or (None, None)
    return _resized(input, _wanted(input, output_size, scale_factors), "bilinear" in run.operation, align_corners, scales)


@operation("aten.upsample_bilinear2d.default", "aten.upsample_nearest2d.default")
def _upsample_sized(
    run: Pass,
    self: Any,
    output_size: Sequence[int],
    align_corners: bool = False,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> ChannelsLast:
    return _resized(self, output_size, "bilinear" in run.operation, align_corners, (scales_h, scales_w))


@operation("aten.pixel_shuffle.default")
def _pixel_shuffle(run: Pass, self: Any, upscale_factor: int) -> tf.Tensor:
    x = canonical(self)
    batch, channels, height, width = shape_of(x)
    factor, outputs = upscale_factor, channels // upscale_factor**2
    y = tf.transpose(reshaped(x, [batch, outputs, factor, factor, height, width]), [0, 1, 4, 2, 5, 3])
    return reshaped(y, [batch, outputs, height * factor, width * factor])
