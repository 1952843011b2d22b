"""The dataset where the ops are: resident tensors, so that a batch is a gather by index and no input pipeline is waited for.

Shapes: x_bchw [batch, channels, height, width] float32; y_b [batch] int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...data.base import DataInfo, Dataset, Split

__all__ = ["RESIDENT_FLOAT_BYTES", "Resident", "held_as_float", "normalised", "resident", "resident_from_pixels"]

RESIDENT_FLOAT_BYTES = 1 << 30
"""Up to this size a split is held as float32; beyond it as stored (uint8), and each batch is normalised when it is taken."""


@dataclass(frozen=True, slots=True)
class Resident:
    """One split on the device: `inputs` float32 (normalised) or uint8 (as stored) [n, c, h, w], `labels` int32 [n]."""

    info: DataInfo
    inputs: tf.Tensor
    labels: tf.Tensor

    def batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return (x_bchw, y_b) of the examples at `indices`, int32 [batch]."""
        x_bchw = tf.gather(self.inputs, indices)
        if x_bchw.dtype == tf.uint8:
            x_bchw = normalised(x_bchw, self.info)
        return x_bchw, tf.gather(self.labels, indices)


def resident(data: Dataset, split: Split) -> Resident:
    """Put a split on the current device."""
    labels = tf.constant(data.labels(split).astype(np.int32))
    if held_as_float(data.info, split):
        return Resident(data.info, tf.constant(data.inputs(split)), labels)
    return Resident(data.info, tf.constant(np.asarray(data.images(split))), labels)


def resident_from_pixels(info: DataInfo, split: Split, pixels_nchw: tf.Tensor, labels_n: tf.Tensor) -> Resident:
    """Make the same from uint8 pixels [n, c, h, w] and int64 labels [n], in ops, for a process that TensorFlow runs remotely."""
    inputs = normalised(pixels_nchw, info) if held_as_float(info, split) else pixels_nchw
    return Resident(info, inputs, tf.cast(labels_n, tf.int32))


def held_as_float(info: DataInfo, split: Split) -> bool:
    """Return whether a split is held as float32."""
    return info.sizes[split] * int(np.prod(info.input_shape)) * 4 <= RESIDENT_FLOAT_BYTES


def normalised(pixels_bchw: tf.Tensor, info: DataInfo) -> tf.Tensor:
    """Return (pixel / 255 − mean) / std, float32, by looking up the 256 values of each channel, so that the bits are numpy's."""
    table = tf.constant(_table(info).ravel())
    offsets_c11 = tf.constant(256 * np.arange(info.input_shape[0], dtype=np.int32)[:, None, None])
    return tf.gather(table, tf.cast(pixels_bchw, tf.int32) + offsets_c11)


def _table(info: DataInfo) -> NDArray[np.float32]:
    """Return the normalised value of every pixel value, float32 [channels, 256], computed in float64."""
    pixels = np.arange(256, dtype=np.float64) / 255.0
    mean, std = np.array(info.mean)[:, None], np.array(info.std)[:, None]
    table: NDArray[np.float32] = ((pixels[None, :] - mean) / std).astype(np.float32)
    return table
