"""Weights in the order in which a framework's kernels read them, so that none is transposed at each step; canonical at the border."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import ModelSpec

__all__ = ["StorageLayout", "after_flatten", "convolutions"]


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """A parameter's layout in memory: the canonical value reshaped to `split_shape`, transposed by `order`, reshaped to `shape`."""

    split_shape: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def to_storage(self, canonical: np.ndarray) -> np.ndarray:
        """Return a canonical value in this layout, as an array of its own."""
        return np.ascontiguousarray(canonical.reshape(self.split_shape).transpose(self.order)).reshape(self.shape)

    def as_canonical(self, held: np.ndarray) -> np.ndarray:
        """Return a held value, contiguous, with the axes of the canonical one (of shape `split_shape`), on the same memory."""
        return held.reshape([self.split_shape[axis] for axis in self.order]).transpose(np.argsort(self.order))

    def make_canonical(self, value: np.ndarray) -> None:
        """Bring the elements of an array, in which they lie as held, into canonical order in place."""
        value.reshape(self.split_shape)[...] = self.as_canonical(value.copy())


def convolutions(spec: ModelSpec) -> dict[str, StorageLayout]:
    """Return the layout of every convolution's weight: [h, w, in, out]."""
    four = [parameter for parameter in spec.parameters if len(parameter.shape) == 4]
    return {one.name: StorageLayout(one.shape, (2, 3, 1, 0), tuple(one.shape[axis] for axis in (2, 3, 1, 0))) for one in four}


def after_flatten(spec: ModelSpec, name: str, channels: int) -> dict[str, StorageLayout]:
    """Return the layout of a dense layer's weight that takes an image: [out, h·w·c], features in the order of the activations.

    Not [h·w·c, out]: the gradient of the activations would take many times as long (620 µs instead of 10 for 16 × 64 × 784).
    """
    weight = f"{name}.weight"
    outputs, features = next(parameter.shape for parameter in spec.parameters if parameter.name == weight)
    return {weight: StorageLayout((outputs, channels, features // channels), (0, 2, 1), (outputs, features))}
