"""ResNet-18 on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext
from ..layers.formulas import convolutions as storage_layouts
from ..layers.tf import Layers
from . import network

__all__ = ["forward", "storage_layouts"]


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk."""
    return network(Layers(parameters, context), x_bchw)
