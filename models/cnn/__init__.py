"""A small convolutional network: two 5×5 convolutions with 2×2 pools, two dense layers.

Its sizes follow from the data: 3×32×32 pixels give 16×7×7 = 784 features before the dense layers.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import UsageError
from ...data.base import DataInfo
from ..base import ModelSpec
from ..layers import LayerSpecs, convolved
from ..layers.protocol import NetworkLayers

MIN_SIDE = 8  # leaves one pixel after both pools: (8 − 4) / 2 / 2
FEATURES = 64  # width of the layer before the logits


def build(data: DataInfo) -> ModelSpec:
    """Fit the network to the data. Raises UsageError for images that are too small."""
    channels, *sides = data.input_shape
    if min(sides) < MIN_SIDE:
        raise UsageError(
            f"model: 'cnn' needs images of at least {MIN_SIDE}×{MIN_SIDE} pixels, but those of {data.name!r} have {sides[0]}×{sides[1]}."
        )
    first = [convolved(side, 5) for side in sides]
    second = [side // 2 for side in first]
    third = [side // 2 for side in second]
    layers = LayerSpecs()
    layers.conv("conv1", (channels, 6), 5, first[0] * first[1])
    layers.conv("conv2", (6, 16), 5, second[0] * second[1])
    layers.dense("fc1", 16 * third[0] * third[1], FEATURES)
    layers.dense("fc2", FEATURES, data.classes)
    return ModelSpec("cnn", tuple(layers.parameters), data.input_shape, data.classes, multiply_adds=layers.multiply_adds)


def network(layers: NetworkLayers, x_bchw: Any) -> Any:
    """Return logits_bk [batch, classes] of x_bchw [batch, channels, height, width]."""
    x = layers.conv_pool(layers.images(x_bchw), "conv1", 2, 2)
    x = layers.conv_pool(x, "conv2", 2, 2, padding=2)
    x = layers.relu(layers.dense(x, "fc1"))
    return layers.logits(layers.dense(x, "fc2"))
