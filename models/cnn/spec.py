"""The small convolutional network: sizes follow from the data; 3×32×32 pixels give 16×7×7 = 784 features before the dense layers.

Layers: conv1 5×5 to 6 channels, no padding; ReLU; pool 2; conv2 5×5 to 16 channels, padding 2; ReLU; pool 2; fc1 to 64; ReLU; fc2.
"""

from __future__ import annotations

from ...core.errors import UsageError
from ...data.base import DataInfo
from ..base import ModelSpec
from ..layers import LayerSpecs, convolved

__all__ = ["SMALLEST_SIDE", "build"]

SMALLEST_SIDE = 8
"""Pixels that leave one after both pools: (8 − 4) / 2 / 2."""

FEATURES = 64
"""Width of the layer before the logits."""


def build(data: DataInfo) -> ModelSpec:
    """Fit the network to the data. Raises UsageError where the images are too small."""
    channels, *sides = data.input_shape
    if min(sides) < SMALLEST_SIDE:
        raise UsageError(
            f"model: 'cnn' needs images of at least {SMALLEST_SIDE}×{SMALLEST_SIDE} pixels, "
            f"but those of {data.name!r} have {sides[0]}×{sides[1]}."
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
