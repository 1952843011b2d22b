"""Keras's variables in torch's layout, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .recording import BIAS_SUM, KERAS_ROLES, Array

GATES = {"GRU": (1, 0, 2), "LSTM": (0, 1, 2, 3), "SimpleRNN": (0,)}  # places of torch's gates among Keras's
_CONVOLUTIONS = ("Conv", "Depthwise", "Separable")


def recurrent_kind(layer: Any) -> str:
    """Return the kind of a recurrent layer, "" for another layer."""
    return type(layer.cell).__name__.removesuffix("Cell") if hasattr(layer, "cell") else ""


def parts_of(layer: Any, name: str, values: Array, image: tuple[int, ...] | None) -> list[tuple[str, Array]]:
    """Return the roles and arrays that a variable is in torch.

    `image` has rows, columns and channels of the image whose flattened features a layer is given.
    """
    kind = type(layer).__name__
    if recurrent_kind(layer) in GATES:
        return _of_gates(layer, name, values)
    axes = values.ndim
    if axes > 2 and kind.startswith(_CONVOLUTIONS) and name.endswith("kernel"):
        role = f"{name.removesuffix('_kernel')}.weight" if name != "kernel" else "weight"
        if name == "depthwise_kernel" or kind.startswith("Depthwise"):  # an output for each input and multiplier, of groups of one input
            turned = values.transpose(axes - 2, axes - 1, *range(axes - 2))
            return [(role, turned.reshape(-1, 1, *turned.shape[2:]))]
        return [(role, values.transpose(axes - 1, axes - 2, *range(axes - 2)))]
    if name == "kernel" and axes == 2:
        if image is not None:
            moved = (len(image) - 1, *range(len(image) - 1), len(image))
            values = values.reshape(*image, -1).transpose(moved).reshape(values.shape)
        return [("weight", values.T)]
    return [(KERAS_ROLES.get(name, name), values)]


def _of_gates(layer: Any, name: str, values: Array) -> list[tuple[str, Array]]:
    suffix = "_l0_reverse" if str(layer.name).startswith("backward_") else "_l0"
    order = GATES[recurrent_kind(layer)]

    def turned(part: Array) -> Array:
        gates = part.reshape(*part.shape[:-1], len(order), -1)
        return gates[..., order, :].reshape(part.shape).T

    if name == "bias":
        if values.ndim == 2:  # of the input and of the state, as torch's
            return [(f"bias_ih{suffix}", turned(values[0])), (f"bias_hh{suffix}", turned(values[1]))]
        return [(f"{BIAS_SUM}{suffix}", turned(values))]
    return [({"kernel": "weight_ih", "recurrent_kernel": "weight_hh"}.get(name, name) + suffix, turned(values))]


def variable_of(layer: Any, name: str, shape: tuple[int, ...], image: tuple[int, ...] | None, arrays: list[Array]) -> Array:
    """Return a variable from the arrays that it is in torch."""
    places = parts_of(layer, name, np.arange(math.prod(shape)).reshape(shape), image)
    values = np.zeros(math.prod(shape), np.float32)
    for (_, index), array in zip(places, arrays, strict=True):
        values[index.ravel()] = array.ravel()
    return values.reshape(shape)
