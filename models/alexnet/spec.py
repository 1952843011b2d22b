"""AlexNet as torchvision has it (Krizhevsky 2014, "One weird trick"), with its names; for any image size and number of classes."""

from __future__ import annotations

from ...data.base import DataInfo
from ..base import ModelSpec
from ..layers import LayerSpecs, convolved

__all__ = ["POOLED_SIDE", "build", "enlarged"]

SMALLEST_SIDE = 63
"""Pixels that leave one after the last pool."""

ENLARGED_SIDE = 64
"""What a smaller side is enlarged to."""

POOLED_SIDE = 6
"""Side of the image that the dense layers see, whatever the size of the input."""

HIDDEN = 4096
"""Width of the two hidden dense layers."""


def enlarged(side: int) -> int:
    """Return the side that the first convolution sees of an image's height or width."""
    return side if side >= SMALLEST_SIDE else ENLARGED_SIDE


def build(data: DataInfo) -> ModelSpec:
    """Fit the network to the data: the number of channels and of classes."""
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
