"""AlexNet on TensorFlow."""

from ..layers.formulas import convolutions as storage_layouts  # no dense layers: reordering their large weights would stall training
from ..layers.protocol import forward_of
from ..layers.tf import Layers
from . import network

__all__ = ["forward", "storage_layouts"]
forward = forward_of(Layers, network)
