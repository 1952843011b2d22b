"""The layers on TensorFlow. Shapes: x_bhwc [batch, height, width, channels], or x_bi [batch, features].

Images are worked on channels last, which TensorFlow's CPU kernels require; `images` and `flatten` are the border to the canonical order.
Heights, widths and channels must be known when the function is traced; the batch may have any size. Of an empty one every layer gives an
empty result, and gradients of zero. Convolutions and dense products take inputs and weights in `context.compute`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...base import ForwardContext, ModelSpec
from ..space_to_depth import gradient_uses_space_to_depth, uses_space_to_depth
from ..storage_layouts import StorageLayout

__all__ = ["HeldParameters", "Layers"]

MOMENTUM, EPSILON = 0.1, 1e-5
"""Batch normalisation: the share of a new batch in the running statistics, and what is added to the variance."""

PERMUTED_WEIGHT = 1 << 18
"""Most elements of a dense weight that are put in the order of the activations at each step, instead of the activations in its order."""


class HeldParameters(Mapping[str, Any]):
    """Parameters by canonical name. Each reads as its canonical value, of a shape in `shapes`; `held` has the tensors as they are held."""

    def __init__(self, spec: ModelSpec, layouts: Mapping[str, StorageLayout], held: Mapping[str, tf.Tensor]) -> None:
        self.shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
        self.layouts, self.held = layouts, held

    def __getitem__(self, name: str) -> tf.Tensor:
        """Return the canonical value, in ops where it is held otherwise."""
        value = self.held[name]
        if name not in self.layouts:
            return value
        layout = self.layouts[name]
        whole = tf.reshape(value, [layout.split_shape[axis] for axis in layout.order])
        return tf.reshape(tf.transpose(whole, np.argsort(layout.order)), self.shapes[name])

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a parameter, without an op."""
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.held)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self.held)


class Layers:
    """The layers of one forward pass; each takes the name under which its parameters are found."""

    def __init__(self, parameters: Mapping[str, tf.Tensor], context: ForwardContext[tf.Tensor]) -> None:
        self._parameters = parameters
        self._held: Mapping[str, tf.Tensor] = {}
        if isinstance(parameters, HeldParameters):
            self._held = {name: parameters.held[name] for name in parameters.layouts}
        self._context = context
        self._batch: tf.Tensor | None = None

    def images(self, x_bchw: tf.Tensor) -> tf.Tensor:
        """Return canonical images [b, c, h, w] in the layout that the other layers work in.

        TensorFlow's oneDNN convolution gives an empty batch a wrong shape, and the statistics of one are no numbers. One blank image stands
        for it up to `logits`, which drops it; a network without either does without that condition, which a small step would feel.
        The transposition comes first: next to one that undoes it, TensorFlow leaves out both.
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
        """Cross-correlate with ``<name>.weight`` [out, in, h, w], zeros around the image; add ``<name>.bias`` where there is one."""
        y_bhwc = self._convolved(x_bhwc, name, stride, padding)
        bias = self._parameters.get(f"{name}.bias")
        return y_bhwc if bias is None else tf.nn.bias_add(y_bhwc, self._low(bias))

    def conv_pool(self, x_bhwc: tf.Tensor, name: str, kernel: int, stride: int, padding: int = 0) -> tf.Tensor:
        """Convolve with a bias, take max(x, 0) and the maximum of each window."""
        y_bhwc = self.max_pool(self._convolved(x_bhwc, name, 1, padding), kernel, stride)
        return tf.nn.relu(tf.nn.bias_add(y_bhwc, self._low(self._parameters[f"{name}.bias"])))

    def _convolved(self, x_bhwc: tf.Tensor, name: str, stride: int, padding: int) -> tf.Tensor:
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
        """Take the maximum of each window; windows that would reach beyond the padding are left out."""
        if padding:  # by an op before it: the pool's own padding is three times as slow, and XLA has no code for it
            around = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
            x_bhwc = tf.pad(x_bhwc, around, constant_values=tf.constant(-np.inf, x_bhwc.dtype))
        return tf.nn.max_pool2d(x_bhwc, kernel, stride, "VALID")

    def average_pool(self, x_bhwc: tf.Tensor, side: int) -> tf.Tensor:
        """Average to `side` × `side` pixels; output i of a side of n covers the pixels ⌊i·n/side⌋ … ⌈(i+1)·n/side⌉ − 1."""
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
        """Multiply by ``<name>.weight`` [out, in] and add ``<name>.bias``. An image [b, h, w, c] is taken in canonical order."""
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

    def dropout(self, x_bi: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
        """Drop at random while training; `layer` numbers the model's dropout layers."""
        return self._context.dropout(x_bi, rate, layer)

    def batch_norm(self, x_bhwc: tf.Tensor, name: str) -> tf.Tensor:
        """Normalise each channel: by the batch while training (which moves the running statistics), else by the running statistics.

        The running variance takes up the unbiased variance; of a single value that is taken as 0. An empty batch moves nothing.
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
        """Return x as [b, features], and the weight with its features in the same order; a small weight is brought to the order of x."""
        _, height, width, channels = x_bhwc.shape
        features = height * width * channels
        if height * width > 1 and weight_oi.shape.num_elements() > PERMUTED_WEIGHT:
            return self.flatten(x_bhwc), weight_oi
        weight_ochw = tf.reshape(weight_oi, [-1, channels, height, width])
        return tf.reshape(x_bhwc, [-1, features]), tf.reshape(tf.transpose(weight_ochw, [0, 2, 3, 1]), [-1, features])

    def _convolves(self) -> bool:
        """Return whether the network has a convolution."""
        if isinstance(self._parameters, HeldParameters):
            return any(len(shape) == 4 for shape in self._parameters.shapes.values())
        return any(tensor.shape.rank == 4 for tensor in self._parameters.values())

    def _kernel(self, weight: str) -> tf.Tensor:
        """Return a convolution's weight as [h, w, in, out]."""
        if weight in self._held:
            return self._low(self._held[weight])
        return tf.transpose(self._low(self._parameters[weight]), [2, 3, 1, 0])

    def _low(self, x: tf.Tensor) -> tf.Tensor:
        """Return x in the number format of convolutions and products."""
        return x if self._context.compute is None else tf.cast(x, self._context.compute)


def _conv_space_to_depth(x_bhwc: tf.Tensor, kernel_hwio: tf.Tensor, padding: tuple[int, int]) -> tf.Tensor:
    """Convolve two neighbouring columns at once (space_to_depth.py), `padding` rows and columns of zeros around the image."""
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
    """Convolve with stride 1; the gradient with respect to the images takes two neighbouring columns at once (space_to_depth.py)."""
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
    """Return the matrix [outputs, inputs] that averages the windows of an adaptive pool along one side."""
    matrix = np.zeros((outputs, inputs), np.float32)
    for i in range(outputs):
        begin, end = i * inputs // outputs, -(-(i + 1) * inputs // outputs)
        matrix[i, begin:end] = 1.0 / (end - begin)
    return matrix
