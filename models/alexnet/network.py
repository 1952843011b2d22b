"""AlexNet, layer by layer, for every framework. Shapes: x_bchw [batch, channels, height, width]; logits_bk [batch, classes]."""

from __future__ import annotations

from typing import Any

from ..layers.protocol import NetworkLayers
from .spec import POOLED_SIDE, enlarged

__all__ = ["network"]


def network(layers: NetworkLayers, x_bchw: Any) -> Any:
    """Return logits_bk."""
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
