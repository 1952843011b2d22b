"""TensorFlow layers: x_bhwc [batch, height, width, channels], or x_bi [batch, features].

Images are channels last, as TensorFlow's CPU kernels require. Heights, widths and channels must be known at tracing. Convolutions and
products take inputs and weights in `context.compute`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...data.text import PADDING
from ..base import ForwardContext, ModelSpec
from .formulas import StorageLayout, frequencies, gradient_uses_space_to_depth, refuse_mask, uses_space_to_depth
from .protocol import NetworkLayers, SequenceNetworkLayers

__path__: list[str] = []  # `core/plugins.py` finds former modules below this one
MOMENTUM, EPSILON = 0.1, 1e-5  # batch normalisation: weight of a new batch, term added to the variance
PERMUTED_WEIGHT = 1 << 18  # maximum elements of a dense weight permuted in each step instead of the activations


class HeldParameters(Mapping[str, Any]):
    """Parameters as canonical values of `shapes`, by canonical name.

    `held` has the tensors as stored.
    """

    def __init__(self, spec: ModelSpec, layouts: Mapping[str, StorageLayout], held: Mapping[str, tf.Tensor]) -> None:
        self.shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
        self.layouts, self.held = layouts, held

    def __getitem__(self, name: str) -> tf.Tensor:
        """Return the canonical value, computed in ops if it is stored otherwise."""
        value = self.held[name]
        if name not in self.layouts:
            return value
        layout = self.layouts[name]
        whole = tf.reshape(value, [layout.split_shape[axis] for axis in layout.order])
        return tf.reshape(tf.transpose(whole, np.argsort(layout.order)), self.shapes[name])

    def __contains__(self, name: object) -> bool:  # Mapping's would run the ops of __getitem__
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Layers(NetworkLayers):
    """TensorFlow's `NetworkLayers`."""

    def __init__(self, parameters: Mapping[str, tf.Tensor], context: ForwardContext[tf.Tensor]) -> None:
        super().__init__(parameters, context)
        self._held: Mapping[str, tf.Tensor] = {}
        if isinstance(parameters, HeldParameters):
            self._held = {name: parameters.held[name] for name in parameters.layouts}
        self._batch: tf.Tensor | None = None

    def images(self, x_bchw: tf.Tensor) -> tf.Tensor:
        """Convert canonical images [b, c, h, w] to channels last.

        TensorFlow's oneDNN convolution gives an empty batch a wrong shape, and its statistics are NaN. So one blank image replaces it until
        `logits`, unless a network has neither, as that condition costs time. The transposition comes first because TensorFlow removes it
        next to its inverse.
        """
        x_bhwc = tf.transpose(x_bchw, [0, 2, 3, 1])
        if not x_bhwc.shape[0] and (self._context.buffers or self._convolves()):
            image_hwc = x_bhwc.shape[1:]
            self._batch = tf.shape(x_bhwc)[0]
            x_bhwc = tf.cond(self._batch > 0, lambda: x_bhwc, lambda: tf.zeros([1, *image_hwc], x_bhwc.dtype))
            x_bhwc = tf.ensure_shape(x_bhwc, [None, *image_hwc])
        return x_bhwc

    def enlarge(self, x_bhwc: tf.Tensor, height: int, width: int) -> tf.Tensor:
        """Resize bilinearly, with half-pixel centres."""
        if tuple(x_bhwc.shape[1:3]) == (height, width):
            return x_bhwc
        return tf.image.resize(x_bhwc, (height, width), method="bilinear", antialias=False)

    def conv(self, x_bhwc: tf.Tensor, name: str, stride: int = 1, padding: int = 0) -> tf.Tensor:
        """Cross-correlate with ``<name>.weight`` [out, in, h, w].

        Add ``<name>.bias`` if there is one.
        """
        y_bhwc = self._convolve(x_bhwc, name, stride, padding)
        bias = self._parameters.get(f"{name}.bias")
        return y_bhwc if bias is None else tf.nn.bias_add(y_bhwc, self._low(bias))

    def conv_pool(self, x_bhwc: tf.Tensor, name: str, kernel: int, stride: int, padding: int = 0) -> tf.Tensor:
        """Apply convolution, max pooling, bias and ReLU."""
        y_bhwc = self.max_pool(self._convolve(x_bhwc, name, 1, padding), kernel, stride)
        return tf.nn.relu(tf.nn.bias_add(y_bhwc, self._low(self._parameters[f"{name}.bias"])))

    def _convolve(self, x_bhwc: tf.Tensor, name: str, stride: int, padding: int) -> tf.Tensor:
        x_bhwc, kernel_hwio = self._low(x_bhwc), self._kernel(f"{name}.weight")
        same = stride == 1 and all(2 * padding + 1 == side for side in kernel_hwio.shape[:2])
        if padding and not same:
            x_bhwc = tf.pad(x_bhwc, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
            padding = 0
        if not tf.config.get_visible_devices("GPU"):
            (kernel_height, kernel_width, inputs, outputs), width = kernel_hwio.shape, x_bhwc.shape[2]
            if uses_space_to_depth(width, inputs, outputs, kernel_width, stride, padding):
                return _conv_space_to_depth(x_bhwc, kernel_hwio, (padding, padding))
            if self._context.training and gradient_uses_space_to_depth(width, inputs, (kernel_height, kernel_width), stride, padding):
                return _conv_with_paired_gradient(x_bhwc, kernel_hwio, padding)
        return tf.nn.conv2d(x_bhwc, kernel_hwio, stride, "SAME" if padding else "VALID")

    def relu(self, x: tf.Tensor) -> tf.Tensor:
        """Return max(x, 0)."""
        return tf.nn.relu(x)

    def max_pool(self, x_bhwc: tf.Tensor, kernel: int, stride: int, padding: int = 0) -> tf.Tensor:
        """Take the maximum of each window that fits within the padding."""
        if padding:  # the pool's own padding is three times as slow, and unsupported by XLA
            around = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
            x_bhwc = tf.pad(x_bhwc, around, constant_values=tf.constant(-np.inf, x_bhwc.dtype))
        return tf.nn.max_pool2d(x_bhwc, kernel, stride, "VALID")

    def average_pool(self, x_bhwc: tf.Tensor, side: int) -> tf.Tensor:
        """Average to `side` × `side` pixels."""
        height, width = x_bhwc.shape[1:3]
        if (height, width) == (side, side):
            return x_bhwc
        x_bhwc = tf.cast(x_bhwc, tf.float32)
        if side == 1:
            return tf.reduce_mean(x_bhwc, axis=[1, 2], keepdims=True)
        rows, columns = tf.constant(_windows(height, side)), tf.constant(_windows(width, side))
        return tf.einsum("bhwc,ih,jw->bijc", x_bhwc, rows, columns)

    def flatten(self, x_bhwc: tf.Tensor) -> tf.Tensor:
        """Return [b, c·h·w], in canonical order."""
        _, height, width, channels = x_bhwc.shape
        return tf.reshape(tf.transpose(x_bhwc, [0, 3, 1, 2]) if height * width > 1 else x_bhwc, [-1, channels * height * width])

    def dense(self, x_bi: tf.Tensor, name: str) -> tf.Tensor:
        """Multiply by ``<name>.weight`` [out, in] and add ``<name>.bias``."""
        weight = f"{name}.weight"
        if weight in self._held:
            weight_oi = self._held[weight]
            x_bi = tf.reshape(x_bi, [-1, weight_oi.shape[1]])
        else:
            weight_oi = self._parameters[weight]
            if x_bi.shape.rank == 4:
                x_bi, weight_oi = self._flat_with(x_bi, weight_oi)
        y_bo = tf.linalg.matmul(self._low(x_bi), self._low(weight_oi), transpose_b=True)
        return tf.nn.bias_add(y_bo, self._low(self._parameters[f"{name}.bias"]))

    def batch_norm(self, x_bhwc: tf.Tensor, name: str) -> tf.Tensor:
        """Normalise by the batch while training, else by running statistics.

        Their variance is unbiased, 0 for a single value.
        """
        weight, bias = self._parameters[f"{name}.weight"], self._parameters[f"{name}.bias"]
        mean, variance = self._context.buffers[f"{name}.running_mean"], self._context.buffers[f"{name}.running_var"]
        if not self._context.training:
            normal, _, _ = tf.compat.v1.nn.fused_batch_norm(x_bhwc, weight, bias, mean, variance, EPSILON, is_training=False)
            return normal
        normal, seen_mean, seen_variance = tf.compat.v1.nn.fused_batch_norm(x_bhwc, weight, bias, epsilon=EPSILON, is_training=True)
        for old, seen, buffer in ((mean, seen_mean, "running_mean"), (variance, seen_variance, "running_var")):
            moved = old + MOMENTUM * (tf.stop_gradient(seen) - old)
            self._context.updated[f"{name}.{buffer}"] = moved if self._batch is None else tf.where(self._batch > 0, moved, old)
        return normal

    def logits(self, x_bk: tf.Tensor) -> tf.Tensor:
        """Return the last layer's result as float32."""
        x_bk = tf.cast(x_bk, tf.float32)
        return x_bk if self._batch is None else x_bk[: self._batch]

    def _flat_with(self, x_bhwc: tf.Tensor, weight_oi: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return x as [b, features], and the weight with the same order; a small weight is permuted."""
        _, height, width, channels = x_bhwc.shape
        features = height * width * channels
        if height * width > 1 and weight_oi.shape.num_elements() > PERMUTED_WEIGHT:
            return self.flatten(x_bhwc), weight_oi
        weight_ochw = tf.reshape(weight_oi, [-1, channels, height, width])
        return tf.reshape(x_bhwc, [-1, features]), tf.reshape(tf.transpose(weight_ochw, [0, 2, 3, 1]), [-1, features])

    def _convolves(self) -> bool:
        if isinstance(self._parameters, HeldParameters):
            return any(len(shape) == 4 for shape in self._parameters.shapes.values())
        return any(tensor.shape.rank == 4 for tensor in self._parameters.values())

    def _kernel(self, weight: str) -> tf.Tensor:
        """Return a convolution's weight as [h, w, in, out]."""
        if weight in self._held:
            return self._low(self._held[weight])
        return tf.transpose(self._low(self._parameters[weight]), [2, 3, 1, 0])

    def _low(self, x: tf.Tensor) -> tf.Tensor:
        return x if self._context.compute is None else tf.cast(x, self._context.compute)


def _conv_space_to_depth(x_bhwc: tf.Tensor, kernel_hwio: tf.Tensor, padding: tuple[int, int]) -> tf.Tensor:
    _, height, width, inputs = x_bhwc.shape
    kernel_height, kernel_width, _, outputs = kernel_hwio.shape
    pairs_hwio = [kernel_height, (kernel_width + 1) // 2, 2 * inputs, outputs]
    left, right = (tf.pad(kernel_hwio, [[0, 0], zeros, [0, 0], [0, 0]]) for zeros in ([0, 1], [1, 0]))
    kernel_pairs_hwio = tf.concat([tf.reshape(left, pairs_hwio), tf.reshape(right, pairs_hwio)], axis=3)
    (rows, columns), x_pairs_bhwc = padding, tf.reshape(x_bhwc, [-1, height, width // 2, 2 * inputs])
    around = [[0, 0], [rows, rows], [columns // 2, columns // 2], [0, 0]]
    y_pairs_bhwc = tf.nn.conv2d(x_pairs_bhwc, kernel_pairs_hwio, 1, around if rows or columns else "VALID")
    return tf.reshape(y_pairs_bhwc, [-1, y_pairs_bhwc.shape[1], 2 * y_pairs_bhwc.shape[2], outputs])


def _conv_with_paired_gradient(x_bhwc: tf.Tensor, kernel_hwio: tf.Tensor, padding: int) -> tf.Tensor:
    """Convolve with stride 1; the images' gradient takes two neighbouring columns at once."""
    around = "SAME" if padding else "VALID"

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def convolved(x_bhwc: tf.Tensor, kernel_hwio: tf.Tensor) -> Any:
        def gradients(y_bhwo: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            rest_rows, rest_columns = (side - 1 - padding for side in kernel_hwio.shape[:2])
            turned_hwoi = tf.transpose(tf.reverse(kernel_hwio, [0, 1]), [0, 1, 3, 2])
            kernel_gradient = tf.raw_ops.Conv2DBackpropFilter(
                input=x_bhwc, filter_sizes=kernel_hwio.shape, out_backprop=y_bhwo, strides=[1, 1, 1, 1], padding=around
            )
            return _conv_space_to_depth(y_bhwo, turned_hwoi, (rest_rows, rest_columns)), kernel_gradient

        return tf.nn.conv2d(x_bhwc, kernel_hwio, 1, around), gradients

    return convolved(x_bhwc, tf.convert_to_tensor(kernel_hwio))


def _windows(inputs: int, outputs: int) -> NDArray[np.float32]:
    """Return the matrix [outputs, inputs] of an adaptive average pool along one side."""
    matrix = np.zeros((outputs, inputs), np.float32)
    for i in range(outputs):
        begin, end = i * inputs // outputs, -(-(i + 1) * inputs // outputs)
        matrix[i, begin:end] = 1.0 / (end - begin)
    return matrix


LAYER_NORM_EPSILON = 1e-6  # added to the variance
OUT_OF_REACH = -1e9  # added to masked scores: their share is 0 in float32


class SequenceLayers(SequenceNetworkLayers):
    """TensorFlow's `SequenceNetworkLayers`; one trace serves all batch sizes and lengths."""

    def embedding(self, tokens_bt: tf.Tensor, name: str) -> tf.Tensor:
        """Return x_btd."""
        weight_vd = self._parameters[f"{name}.weight"]
        scale_bt1 = tf.cast(tokens_bt != PADDING, tf.float32)[..., None] * math.sqrt(weight_vd.shape[1])
        return tf.gather(weight_vd, tokens_bt) * scale_bt1

    def positions(self, x_btd: tf.Tensor, start: tf.Tensor | int = 0) -> tf.Tensor:
        """Add position codes counted from `start`; angles are float64, as on other frameworks."""
        places = tf.cast(tf.range(tf.shape(x_btd)[1]) + start, tf.float64)
        angles = places[:, None] * frequencies(x_btd.shape[2])
        return tf.cast(x_btd, tf.float32) + tf.cast(tf.concat([tf.sin(angles), tf.cos(angles)], axis=1), tf.float32)

    def shifted(self, tokens_bt: tf.Tensor, first: int) -> tf.Tensor:
        """Shift the tokens one place to the right."""
        return tf.pad(tokens_bt, [[0, 0], [1, 0]], constant_values=first)[:, : tf.shape(tokens_bt)[1]]

    def attended(self, lengths_b: tf.Tensor, tokens_bt: tf.Tensor) -> tf.Tensor:
        """Return the mask, boolean [batch, 1, 1, time]."""
        return (tf.range(tf.shape(tokens_bt)[1]) < lengths_b[:, None])[:, None, None, :]

    def layer_norm(self, x_btd: tf.Tensor, name: str) -> tf.Tensor:
        """Normalise each position, float32."""
        x_btd = tf.cast(x_btd, tf.float32)
        mean_bt1 = tf.reduce_mean(x_btd, axis=2, keepdims=True)
        centred_btd = x_btd - mean_bt1
        scale_bt1 = tf.math.rsqrt(tf.reduce_mean(tf.square(centred_btd), axis=2, keepdims=True) + LAYER_NORM_EPSILON)
        return centred_btd * scale_bt1 * self._parameters[f"{name}.weight"] + self._parameters[f"{name}.bias"]

    def dense_relu(self, x_btd: tf.Tensor, name: str, *, low: bool = False) -> tf.Tensor:
        """Return max(0, dense)."""
        y_bto = tf.nn.relu(self._product(x_btd, name, biased=True))
        return y_bto if low else tf.cast(y_bto, tf.float32)

    def heads(self, x_btd: tf.Tensor, parts: int, count: int) -> tuple[tf.Tensor, ...]:
        """Return `parts` tensors x_bhte."""
        batch, time = tf.shape(x_btd)[0], tf.shape(x_btd)[1]
        split = tf.reshape(x_btd, [batch, time, parts, count, x_btd.shape[2] // (parts * count)])
        return tuple(tf.unstack(tf.transpose(split, [2, 0, 3, 1, 4]), num=parts))

    def attention(
        self,
        query_bhqe: tf.Tensor,
        key_bhke: tf.Tensor,
        value_bhke: tf.Tensor,
        mask: tf.Tensor | None,
        rate: float,
        layer: int,
        *,
        causal: bool = False,
        low: bool = False,
    ) -> tf.Tensor:
        """Return attention with heads concatenated: [batch, query, width]."""
        query_bhqe, key_bhke, value_bhke = self._low(query_bhqe), self._low(key_bhke), self._low(value_bhke)
        _, count, _, width = query_bhqe.shape
        scores_bhqk = tf.cast(tf.matmul(query_bhqe * tf.cast(width**-0.5, query_bhqe.dtype), key_bhke, transpose_b=True), tf.float32)
        if mask is not None:
            refuse_mask(mask.dtype.name, layer)
        if causal:
            earlier_qk = tf.range(tf.shape(key_bhke)[2]) <= tf.range(tf.shape(query_bhqe)[2])[:, None]
            mask = earlier_qk if mask is None else mask & earlier_qk
        if mask is not None:
            scores_bhqk += tf.where(mask, 0.0, OUT_OF_REACH)
        shares_bhqk = tf.nn.softmax(scores_bhqk)
        if rate:
            shares_bhqk = self._context.dropout(shares_bhqk, rate, layer)
        mixed_bhqe = tf.matmul(self._low(shares_bhqk), value_bhke)
        shape = tf.shape(mixed_bhqe)
        mixed_bqd = tf.reshape(tf.transpose(mixed_bhqe, [0, 2, 1, 3]), [shape[0], shape[2], count * width])
        return mixed_bqd if low else tf.cast(mixed_bqd, tf.float32)

    def appended(self, before: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        """Concatenate along time."""
        return tf.concat([before, new], axis=2)

    def _product(self, x_btd: tf.Tensor, name: str, *, biased: bool = False) -> tf.Tensor:
        """Flattens batch and time, as a product of three dimensions is slower."""
        weight_oi = self._low(self._parameters[f"{name}.weight"])
        outputs, inputs = weight_oi.shape
        y_no = tf.linalg.matmul(tf.reshape(self._low(x_btd), [-1, inputs]), weight_oi, transpose_b=True)
        if biased:
            y_no = tf.nn.bias_add(y_no, self._low(self._parameters[f"{name}.bias"]))
        return tf.reshape(y_no, tf.concat([tf.shape(x_btd)[:2], [outputs]], axis=0))

    def _float32(self, x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float32)

    def _low(self, x: tf.Tensor) -> tf.Tensor:
        return x if self._context.compute is None else tf.cast(x, self._context.compute)
