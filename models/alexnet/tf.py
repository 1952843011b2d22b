"""AlexNet on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext, ModelSpec
from ..layers.held import HeldLayout, convolutions
from ..layers.tf import Layers
from .spec import POOLED_SIDE, enlarged

__all__ = ["forward", "held"]


def held(spec: ModelSpec) -> dict[str, HeldLayout]:
    """Return how TensorFlow is to hold the weights.

    The dense ones stay canonical: a copy of them in another order would stall training.
    """
    return convolutions(spec)


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk."""
    layers = Layers(parameters, context)
    _, _, height, width = x_bchw.shape
    x = layers.enlarge(layers.images(x_bchw), enlarged(height), enlarged(width))
    x = layers.max_pool(layers.relu(layers.conv(x, "features.0", stride=4, padding=2)), 3, 2)
    x = layers.max_pool(layers.relu(layers.conv(x, "features.3", padding=2)), 3, 2)
    x = layers.relu(layers.conv(x, "features.6", padding=1))
    x = layers.relu(layers.conv(x, "features.8", padding=1))
    x = layers.max_pool(layers.relu(layers.conv(x, "features.10", padding=1)), 3, 2)
    x = layers.flatten(layers.average_pool(x, POOLED_SIDE))
    x = layers.relu(layers.dense(layers.dropout(x, 0.5, 0), "classifier.1"))
    x = layers.relu(layers.dense(layers.dropout(x, 0.5, 1), "classifier.4"))
    return layers.logits(layers.dense(x, "classifier.6"))
