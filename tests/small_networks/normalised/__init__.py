"""One convolution with batch normalisation, and a dense layer over its channels' means.

'bn1' has the names of ResNet-18's first.
"""

from crosstrain.models.base import ModelSpec
from crosstrain.models.layers import LayerSpecs

CHANNELS = 8


def build(data):
    layers = LayerSpecs()
    channels, height, width = data.input_shape
    layers.conv_fan_out("conv1", (channels, CHANNELS), 3, height * width)
    layers.batch_norm("bn1", CHANNELS)
    layers.dense("fc", CHANNELS, data.classes)
    return ModelSpec(
        "normalised", tuple(layers.parameters), data.input_shape, data.classes, layers.multiply_adds, buffers=tuple(layers.buffers)
    )


def network(layers, x_bchw):
    x = layers.relu(layers.batch_norm(layers.conv(layers.images(x_bchw), "conv1", padding=1), "bn1"))
    return layers.logits(layers.dense(layers.average_pool(x, 1), "fc"))
