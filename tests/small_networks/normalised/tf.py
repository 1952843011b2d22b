"""The forward function on TensorFlow."""

from crosstrain.models.layers.formulas import convolutions as storage_layouts
from crosstrain.models.layers.tf import Layers

from . import network

__all__ = ["forward", "storage_layouts"]


def forward(parameters, x_bchw, context):
    return network(Layers(parameters, context), x_bchw)
