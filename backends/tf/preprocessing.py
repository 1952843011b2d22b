"""From pixels as stored to what a model reads: changed where the job says so, then normalised, to the bit as `Dataset.inputs`.

Shapes: images_bhwc uint8 [batch, height, width, channels].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...data.base import DataInfo
from ...data.normalisation import normal_line, normal_table

__all__ = ["changed", "compiled_normalised", "normalised", "normalised_in_blocks"]

BLOCK_ELEMENTS = 1 << 22
"""Pixels of a whole split that are normalised at once: what is computed on the way takes twice the memory of the result."""


def normalised(pixels: tf.Tensor, info: DataInfo, *, channels_last: bool) -> tf.Tensor:
    """Return (pixel / 255 − mean) / std, float32, of images [n, h, w, c] or [n, c, h, w].

    It is computed as a line in float64 where that gives the definition's bits, else looked up in its table.
    """
    shape = tf.shape(pixels)
    channels, height, width = info.input_shape
    rows = tf.reshape(pixels, [-1, width * channels] if channels_last else [shape[0], channels, height * width])
    if line := normal_line(info.mean, info.std):
        factor, summand = (_spread(values_c, width, channels_last) for values_c in line)
        result = tf.cast(tf.cast(rows, tf.float64) * factor + summand, tf.float32)
    else:
        begin = _spread(256 * np.arange(channels, dtype=np.int32), width, channels_last)
        result = tf.gather(tf.constant(normal_table(info.mean, info.std).ravel()), tf.cast(rows, tf.int32) + begin)
    return tf.ensure_shape(tf.reshape(result, shape), pixels.shape)


def compiled_normalised(pixels: tf.Tensor, info: DataInfo, *, channels_last: bool) -> tf.Tensor:
    """Return the same, compiled by XLA into one pass over the pixels: 64 images of 224 × 224 × 3 take 2 ms on two cores, not 11 ms.

    Compiling takes 0.2 s for each size of a batch.
    """
    compiled = tf.function(lambda batch: normalised(batch, info, channels_last=channels_last), jit_compile=True, autograph=False)
    return tf.ensure_shape(compiled(pixels), pixels.shape)


def normalised_in_blocks(pixels: tf.Tensor, info: DataInfo, *, channels_last: bool) -> tf.Tensor:
    """Return the same of a whole split, with little memory beside that of its pieces and of the result."""
    size, elements = int(pixels.shape[0]), int(np.prod(info.input_shape))
    step = max(1, BLOCK_ELEMENTS // elements)
    pieces = tf.TensorArray(tf.float32, size=-(-size // step), element_shape=[None, *pixels.shape[1:]], infer_shape=False)

    def body(number: tf.Tensor, pieces: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        block = pixels[number * step : (number + 1) * step]
        return number + 1, pieces.write(number, normalised(block, info, channels_last=channels_last))

    _, pieces = tf.while_loop(lambda number, _: number * step < size, body, (tf.constant(0), pieces), parallel_iterations=1)
    return tf.ensure_shape(pieces.concat(), pixels.shape)


def changed(images_bhwc: tf.Tensor, changes: tf.Tensor) -> tf.Tensor:
    """In ops: carry out `changes` int32 [b, 3] as `data.augment.apply_changes` defines it."""
    _, height, width, channels = images_bhwc.shape
    dy, dx, flip = (changes[:, column, None] for column in range(3))
    rows_bh = tf.range(height) - dy
    columns = tf.range(width)
    columns_bw = tf.where(flip > 0, width - 1 - columns, columns) - dx
    inside_bhw = _within(rows_bh, height)[:, :, None] & _within(columns_bw, width)[:, None, :]
    places_bhw = tf.clip_by_value(rows_bh, 0, height - 1)[:, :, None] * width + tf.clip_by_value(columns_bw, 0, width - 1)[:, None, :]
    taken = tf.gather(tf.reshape(images_bhwc, [-1, height * width, channels]), places_bhw, batch_dims=1)
    return tf.where(inside_bhw[..., None], taken, tf.zeros([], tf.uint8))


def _within(positions: tf.Tensor, size: int) -> tf.Tensor:
    return (positions >= 0) & (positions < size)


def _spread(values_c: NDArray[Any], width: int, channels_last: bool) -> NDArray[Any]:
    """Return a number a channel in the shape that fits an image as it lies in memory: a row [w · c] channels last, else [c, 1]."""
    return np.tile(values_c, width) if channels_last else values_c[:, None]
