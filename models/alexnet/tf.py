"""AlexNet on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext, ModelSpec
from ..layers.storage_layouts import StorageLayout, convolutions
from ..layers.tf.image import Layers
from .network import network

__all__ = ["forward", "storage_layouts"]


def storage_layouts(spec: ModelSpec) -> dict[str, StorageLayout]:
    """Return how TensorFlow is to hold the weights.

    The dense ones stay canonical: a copy of them in another order would stall training.
    """
    return convolutions(spec)


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk."""
    return network(Layers(parameters, context), x_bchw)
