"""The forward function on torch."""

from crosstrain.models.layers.torch.image import Layers

from . import network

__all__ = ["forward"]


def forward(parameters, x_bchw, context):
    return network(Layers(parameters, context), x_bchw)
