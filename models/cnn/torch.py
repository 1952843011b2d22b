"""The small convolutional network on torch."""

from ..layers.protocol import forward_of
from ..layers.torch import Layers
from . import network

forward = forward_of(Layers, network)
