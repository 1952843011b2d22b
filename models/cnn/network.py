"""The small convolutional network, layer by layer, for every framework.

Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes].
"""

from __future__ import annotations

from typing import Any

from ..layers.protocol import NetworkLayers

__all__ = ["network"]


def network(layers: NetworkLayers, x_bchw: Any) -> Any:
    """Return logits_bk."""
    x = layers.conv_pool(layers.images(x_bchw), "conv1", 2, 2)
    x = layers.conv_pool(x, "conv2", 2, 2, padding=2)
    x = layers.relu(layers.dense(x, "fc1"))
    return layers.logits(layers.dense(x, "fc2"))
