"""ResNet-18 on TensorFlow. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from ..base import ForwardContext, ModelSpec
from ..layers.held import HeldLayout, convolutions
from ..layers.tf import Layers
from .spec import STAGES

__all__ = ["forward", "held"]


def held(spec: ModelSpec) -> dict[str, HeldLayout]:
    """Return how TensorFlow is to hold the weights: those of convolutions as its kernels read them."""
    return convolutions(spec)


def forward(parameters: Mapping[str, tf.Tensor], x_bchw: tf.Tensor, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
    """Return logits_bk."""
    layers = Layers(parameters, context)
    x = layers.relu(layers.batch_norm(layers.conv(layers.images(x_bchw), "conv1", stride=2, padding=3), "bn1"))
    x = layers.max_pool(x, 3, 2, padding=1)
    for stage, _, stride in STAGES:
        x = _block(layers, x, f"{stage}.0", stride, downsampled=f"{stage}.0.downsample.0.weight" in parameters)
        x = _block(layers, x, f"{stage}.1", 1, downsampled=False)
    return layers.logits(layers.dense(layers.average_pool(x, 1), "fc"))


def _block(layers: Layers, x: tf.Tensor, name: str, stride: int, downsampled: bool) -> tf.Tensor:
    """Return relu(x + two convolutions of x); where the shape changes, x goes through a 1×1 convolution."""
    y = layers.relu(layers.batch_norm(layers.conv(x, f"{name}.conv1", stride, padding=1), f"{name}.bn1"))
    y = layers.batch_norm(layers.conv(y, f"{name}.conv2", padding=1), f"{name}.bn2")
    if downsampled:
        x = layers.batch_norm(layers.conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
    return layers.relu(x + y)
