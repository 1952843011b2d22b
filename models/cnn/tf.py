"""The small convolutional network on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext, ModelSpec
from ..layers.formulas import StorageLayout, after_flatten, convolutions
from ..layers.tf import Layers
from . import network


def storage_layouts(spec: ModelSpec) -> dict[str, StorageLayout]:
    """Return the weights' layouts in TensorFlow's kernels."""
    return {**convolutions(spec), **after_flatten(spec, "fc1", channels=16)}


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk."""
    return network(Layers(parameters, context), x_bchw)
