"""The small convolutional network on TensorFlow."""

from ..base import ModelSpec
from ..layers.formulas import StorageLayout, after_flatten, convolutions
from ..layers.protocol import forward_of
from ..layers.tf import Layers
from . import network

forward = forward_of(Layers, network)


def storage_layouts(spec: ModelSpec) -> dict[str, StorageLayout]:
    """Return the weights' layouts in TensorFlow's kernels."""
    return {**convolutions(spec), **after_flatten(spec, "fc1", channels=16)}
