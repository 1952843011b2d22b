"""ResNet-18 as torchvision has it (He et al. 2016), with torchvision's names; for any image size and number of classes."""

from __future__ import annotations

from ...data.base import DataInfo
from ..base import ModelSpec
from ..layers import LayerSpecs, convolved

__all__ = ["STAGES", "STEM_CHANNELS", "build"]

STEM_CHANNELS = 64
"""Channels of the first convolution."""

STAGES = (("layer1", 64, 1), ("layer2", 128, 2), ("layer3", 256, 2), ("layer4", 512, 2))
"""Name, channels and stride of each stage. A stage has two blocks of two convolutions; the stride is that of its first convolution."""


def build(data: DataInfo) -> ModelSpec:
    """Fit the network to the data: the number of channels and of classes."""
    channels = data.input_shape[0]
    sides = [convolved(side, 7, stride=2, padding=3) for side in data.input_shape[1:]]
    layers = LayerSpecs()
    _conv_norm(layers, "conv1", "bn1", (channels, STEM_CHANNELS), 7, sides)
    sides = [convolved(side, 3, stride=2, padding=1) for side in sides]
    channels = STEM_CHANNELS
    for stage, width, stride in STAGES:
        sides = [convolved(side, 3, stride, padding=1) for side in sides]
        for block in (f"{stage}.0", f"{stage}.1"):
            _conv_norm(layers, f"{block}.conv1", f"{block}.bn1", (channels, width), 3, sides)
            _conv_norm(layers, f"{block}.conv2", f"{block}.bn2", (width, width), 3, sides)
            if channels != width:
                _conv_norm(layers, f"{block}.downsample.0", f"{block}.downsample.1", (channels, width), 1, sides)
            channels = width
    layers.dense("fc", channels, data.classes)
    return ModelSpec(
        name="resnet18",
        parameters=tuple(layers.parameters),
        input_shape=data.input_shape,
        classes=data.classes,
        multiply_adds=layers.multiply_adds,
        buffers=tuple(layers.buffers),
    )


def _conv_norm(layers: LayerSpecs, conv: str, norm: str, channels: tuple[int, int], kernel: int, sides: list[int]) -> None:
    """Add a convolution without a bias, whose output has the given sides, and the normalisation after it."""
    layers.conv_fan_out(conv, channels, kernel, sides[0] * sides[1])
    layers.batch_norm(norm, channels[1])
