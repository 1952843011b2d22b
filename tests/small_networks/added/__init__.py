"""A linear function with shared gradients: three parameters make its weight, two its bias.

One of the three is flat.
"""

import math

from crosstrain.models.base import ModelSpec, ParameterSpec
from crosstrain.models.layers import LayerSpecs


def build(data):
    layers, features = LayerSpecs(), math.prod(data.input_shape)
    layers.dense("first", features, data.classes)
    layers.dense("second", features, data.classes)
    layers.parameters.append(ParameterSpec("flat", (features * data.classes,), bound=1.0 / math.sqrt(features)))
    return ModelSpec("added", tuple(layers.parameters), data.input_shape, data.classes, layers.multiply_adds)
