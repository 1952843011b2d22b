"""The small convolutional network on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext, ModelSpec
from ..layers.storage_layouts import StorageLayout, after_flatten, convolutions
from ..layers.tf.image import Layers
from .network import network

__all__ = ["forward", "storage_layouts"]


def storage_layouts(spec: ModelSpec) -> dict[str, StorageLayout]:
    """Return how TensorFlow is to hold the weights: as its kernels read them."""
    return {**convolutions(spec), **after_flatten(spec, "fc1", channels=16)}


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk."""
    return network(Layers(parameters, context), x_bchw)
