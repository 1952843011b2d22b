"""The dataset where the ops are: resident tensors, so that a batch is a gather by index and no input pipeline is waited for.

Shapes: x_bchw [batch, channels, height, width] float32; y_b [batch] int32.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.job import Job
from ...data.base import DataInfo, Dataset, Split
from ...models.base import ModelSpec
from .preprocessing import changed, compiled_normalised, normalised, normalised_in_blocks

__all__ = ["RESIDENT_FLOAT_BYTES", "SMALL_ELEMENTS", "Layout", "Part", "Resident", "layout_for", "resident", "resident_from_pixels"]

RESIDENT_FLOAT_BYTES = 1 << 30
"""Up to this size a split is held as float32; beyond it as stored (uint8), and each batch is normalised when it is taken."""

SMALL_ELEMENTS = 1 << 15
"""Images of more pixels than this (three channels of 104 × 104) stay uint8 in any case: their normalisation is half a percent of a step
of AlexNet, and they would take four times the memory."""


Part = tuple[tf.Tensor, tf.Tensor]
"""Examples: x_bchw, y_b."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How images lie in memory. `channels_last`: [n, h, w, c] instead of [n, c, h, w]. `changing`: training images are augmented.

    `compiled`: XLA compiles how a batch of stored pixels is normalised.
    """

    info: DataInfo
    channels_last: bool
    changing: bool
    compiled: bool

    def normalised(self, split: Split) -> bool:
        """Return whether a split is held as float32, normalised."""
        elements = math.prod(self.info.input_shape)
        small = elements <= SMALL_ELEMENTS and self.info.sizes[split] * elements * 4 <= RESIDENT_FLOAT_BYTES
        return small and not (self.changing and split == "train")

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of an image as it lies in memory."""
        channels, height, width = self.info.input_shape
        return (height, width, channels) if self.channels_last else self.info.input_shape

    def laid(self, images_nchw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return stored images as they are to lie in memory."""
        return np.ascontiguousarray(images_nchw.transpose(0, 2, 3, 1)) if self.channels_last else np.asarray(images_nchw)

    def inputs_spec(self, split: Split) -> tf.TensorSpec:
        """Return shape and type of a split's images."""
        return tf.TensorSpec([self.info.sizes[split], *self.image_shape], tf.float32 if self.normalised(split) else tf.uint8)


def layout_for(job: Job, spec: ModelSpec, info: DataInfo) -> Layout:
    """Return the layout that suits a model: TensorFlow's convolutions work channels last, and so does the change of images.

    Large images are worth compiling for. Beside a GPU nothing is compiled: that has not been tried on one.
    """
    changing = job.augment != "none"
    convolves = any(len(parameter.shape) == 4 for parameter in spec.parameters)
    compiled = math.prod(info.input_shape) > SMALL_ELEMENTS and not tf.config.get_visible_devices("GPU")
    return Layout(info, channels_last=convolves or changing, changing=changing, compiled=compiled)


@dataclass(frozen=True, slots=True)
class Resident:
    """One split on the device: `inputs` float32 (normalised) or uint8 (as stored), as the layout says; `labels` int32 [n]."""

    layout: Layout
    inputs: tf.Tensor
    labels: tf.Tensor

    def batch(self, indices: tf.Tensor, changes: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return (x_bchw, y_b) of the examples at `indices`, int32 [batch], with `changes` int32 [batch, 3] where there are any."""
        images, labels_b = self.laid_batch(indices, changes)
        return self.as_read(images), labels_b

    def laid_batch(self, indices: tf.Tensor, changes: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the same with the images as they lie in memory."""
        images = tf.gather(self.inputs, indices)
        if changes is not None:
            images = changed(images, changes)
        if images.dtype == tf.uint8:
            normalise = compiled_normalised if self.layout.compiled else normalised
            images = normalise(images, self.layout.info, channels_last=self.layout.channels_last)
        return images, tf.gather(self.labels, indices)

    def parts(self, images: tf.Tensor, y_b: tf.Tensor, count: int) -> list[Part]:
        """Cut images that lie as in memory, and their labels, into parts (x_bchw, y_b); some are empty where there are fewer examples.

        They depend on nothing of each other, so that they can be computed at the same time.
        """
        if count == 1:
            return [(self.as_read(images), y_b)]
        size = tf.size(y_b)
        borders = [size * part // count for part in range(count + 1)]
        return [(self.as_read(images[begin:end]), y_b[begin:end]) for begin, end in itertools.pairwise(borders)]

    def as_read(self, images: tf.Tensor) -> tf.Tensor:
        """Return images that lie as in memory as x_bchw.

        A model that works channels last begins with the inverse, and TensorFlow's optimiser leaves out both.
        """
        return tf.transpose(images, [0, 3, 1, 2]) if self.layout.channels_last else images


def resident(data: Dataset, split: Split, layout: Layout) -> Resident:
    """Put a split on the current device."""
    return resident_from_pixels(layout, split, tf.constant(layout.laid(data.images(split))), tf.constant(data.labels(split)))


def resident_from_pixels(layout: Layout, split: Split, pixels: tf.Tensor, labels_n: tf.Tensor) -> Resident:
    """Make the same from uint8 pixels as the layout lays them and labels [n], in ops, also for a process that TensorFlow runs remotely."""
    if layout.normalised(split):
        pixels = normalised_in_blocks(pixels, layout.info, channels_last=layout.channels_last)
    return Resident(layout, pixels, tf.cast(labels_n, tf.int32))
