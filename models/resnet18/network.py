"""ResNet-18, layer by layer, for every framework. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from typing import Any

from ..layers.protocol import NetworkLayers
from .spec import STAGES, STEM_CHANNELS

__all__ = ["network"]


def network(layers: NetworkLayers, x_bchw: Any) -> Any:
    """Return logits_bk."""
    x = layers.relu(layers.batch_norm(layers.conv(layers.images(x_bchw), "conv1", stride=2, padding=3), "bn1"))
    x = layers.max_pool(x, 3, 2, padding=1)
    channels = STEM_CHANNELS
    for stage, width, stride in STAGES:
        x = _block(layers, x, f"{stage}.0", stride, downsampled=channels != width)
        x = _block(layers, x, f"{stage}.1", 1, downsampled=False)
        channels = width
    return layers.logits(layers.dense(layers.average_pool(x, 1), "fc"))


def _block(layers: NetworkLayers, x: Any, name: str, stride: int, downsampled: bool) -> Any:
    """Return relu(x + two convolutions of x); where the shape changes, x goes through a 1×1 convolution."""
    y = layers.relu(layers.batch_norm(layers.conv(x, f"{name}.conv1", stride, padding=1), f"{name}.bn1"))
    y = layers.batch_norm(layers.conv(y, f"{name}.conv2", padding=1), f"{name}.bn2")
    if downsampled:
        x = layers.batch_norm(layers.conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
    return layers.relu(x + y)
