"""AlexNet as in torchvision: five convolutions and three dense layers, with dropout.

Images below 63 pixels are enlarged. Krizhevsky 2014, "One weird trick".
"""

from __future__ import annotations

from typing import Any

from ...data.base import DataInfo
from ..base import ModelSpec
from ..layers import LayerSpecs, convolved
from ..layers.protocol import NetworkLayers

MIN_SIDE = 63  # leaves one pixel after the last pool
ENLARGED_SIDE = 64  # smaller sides are enlarged to this
POOLED_SIDE = 6  # image side before the dense layers
HIDDEN = 4096  # width of the two hidden dense layers


def enlarged(side: int) -> int:
    """Return the image side that the first convolution receives."""
    return side if side >= MIN_SIDE else ENLARGED_SIDE


def build(data: DataInfo) -> ModelSpec:
    """Fit the network to the data's image size, channels and classes."""
    channels = data.input_shape[0]
    first = [convolved(enlarged(side), 11, stride=4, padding=2) for side in data.input_shape[1:]]
    second = [convolved(side, 3, stride=2) for side in first]
    third = [convolved(side, 3, stride=2) for side in second]
    layers = LayerSpecs()
    layers.conv("features.0", (channels, 64), 11, first[0] * first[1])
    layers.conv("features.3", (64, 192), 5, second[0] * second[1])
    layers.conv("features.6", (192, 384), 3, third[0] * third[1])
    layers.conv("features.8", (384, 256), 3, third[0] * third[1])
    layers.conv("features.10", (256, 256), 3, third[0] * third[1])
    layers.dense("classifier.1", 256 * POOLED_SIDE**2, HIDDEN)
    layers.dense("classifier.4", HIDDEN, HIDDEN)
    layers.dense("classifier.6", HIDDEN, data.classes)
    return ModelSpec("alexnet", tuple(layers.parameters), data.input_shape, data.classes, multiply_adds=layers.multiply_adds, dropout=True)


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
