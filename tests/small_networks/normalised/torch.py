"""The forward function on torch."""

from crosstrain.models.layers.torch import Layers

from . import network


def forward(parameters, x_bchw, context):
    return network(Layers(parameters, context), x_bchw)
