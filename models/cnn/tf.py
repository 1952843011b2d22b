"""The small convolutional network on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext
from ..layers.tf import Layers

__all__ = ["forward"]


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk."""
    layers = Layers(parameters, context)
    x = layers.max_pool(layers.relu(layers.conv(layers.images(x_bchw), "conv1")), 2, 2)
    x = layers.max_pool(layers.relu(layers.conv(x, "conv2", padding=2)), 2, 2)
    x = layers.relu(layers.dense(x, "fc1"))
    return layers.logits(layers.dense(x, "fc2"))
