"""ResNet-18 as in torchvision: 17 convolutions, batch normalisation and a dense layer.

He et al. 2016, for any image size.
"""

from __future__ import annotations

from typing import Any

from ...data.base import DataInfo
from ..base import ModelSpec
from ..layers import LayerSpecs, convolved
from ..layers.protocol import NetworkLayers

STEM_CHANNELS = 64  # channels of the first convolution
STAGES = (("layer1", 64, 1), ("layer2", 128, 2), ("layer3", 256, 2), ("layer4", 512, 2))
"""Name, channels and first stride of each stage, which has two blocks of two convolutions."""


def build(data: DataInfo) -> ModelSpec:
    """Fit the network to the data's image size, channels and classes."""
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
    """`sides`: of the convolution's output."""
    layers.conv_fan_out(conv, channels, kernel, sides[0] * sides[1])
    layers.batch_norm(norm, channels[1])


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
    """Apply a residual block; a 1×1 convolution adapts x where the shape changes."""
    y = layers.relu(layers.batch_norm(layers.conv(x, f"{name}.conv1", stride, padding=1), f"{name}.bn1"))
    y = layers.batch_norm(layers.conv(y, f"{name}.conv2", padding=1), f"{name}.bn2")
    if downsampled:
        x = layers.batch_norm(layers.conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
    return layers.relu(x + y)
