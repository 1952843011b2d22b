"""Weight layouts and formulas that frameworks share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ..base import ModelSpec


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """A weight's layout as kernels read it.

    Reshaped to `split_shape`, transposed by `order`, reshaped to `shape`.
    """

    split_shape: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def to_storage(self, canonical: np.ndarray) -> np.ndarray:
        """Return a canonical value in this layout, as a new array."""
        return np.ascontiguousarray(canonical.reshape(self.split_shape).transpose(self.order)).reshape(self.shape)

    def as_canonical(self, held: np.ndarray) -> np.ndarray:
        """Return a view of a contiguous stored value with canonical axes (of shape `split_shape`)."""
        return held.reshape([self.split_shape[axis] for axis in self.order]).transpose(np.argsort(self.order))

    def make_canonical(self, value: np.ndarray) -> None:
        """Convert an array from this layout to canonical order, in place."""
        value.reshape(self.split_shape)[...] = self.as_canonical(value.copy())


def convolutions(spec: ModelSpec) -> dict[str, StorageLayout]:
    """Return the layout of every convolution's weight: [h, w, in, out]."""
    four = [parameter for parameter in spec.parameters if len(parameter.shape) == 4]
    return {weight.name: StorageLayout(weight.shape, (2, 3, 1, 0), tuple(weight.shape[axis] for axis in (2, 3, 1, 0))) for weight in four}


def after_flatten(spec: ModelSpec, name: str, channels: int) -> dict[str, StorageLayout]:
    """Return the layout [out, h·w·c] of a dense weight after an image.

    [h·w·c, out] would take 620 µs instead of 10 for 16 × 64 × 784.
    """
    weight = f"{name}.weight"
    outputs, features = next(parameter.shape for parameter in spec.parameters if parameter.name == weight)
    return {weight: StorageLayout((outputs, channels, features // channels), (0, 2, 1), (outputs, features))}


# Faster within these limits, on TensorFlow and torch (docs/benchmarks.md). With more inputs than colours a layer is not the first, so the
# gradient with respect to its images would cost more than is gained.
MAX_INPUTS, MAX_OUTPUTS = 4, 8


def uses_space_to_depth(width: int, inputs: int, outputs: int, kernel_width: int, stride: int, padding: int) -> bool:
    """Return whether a convolution of images of this `width` should take two columns at once.

    A CPU computes 8 or 16 output channels of a pixel at a time, so with 6 most of it idles. Channels last, two neighbouring pixels of an
    image [b, h, w, c] are one pixel of [b, h, w/2, 2c] in the same memory (space to depth). A kernel [h, k, in, out] with an odd k becomes
    [h, (k+1)/2, 2 in, 2 out]: with a column of zeros after it for the left pixel, before it for the right one. The gradient with respect to
    the images is a convolution too, with the kernel rotated by 180° and inputs and outputs exchanged.
    """
    return inputs <= MAX_INPUTS and _fits(width, outputs, kernel_width, stride, padding)


def gradient_uses_space_to_depth(width: int, inputs: int, kernel: tuple[int, int], stride: int, padding: int) -> bool:
    """Return whether the images' gradient should take two columns at once.

    `kernel`: height and width.
    """
    kernel_height, kernel_width = kernel
    return kernel_height > padding and _fits(
        width + 2 * padding - kernel_width + 1, inputs, kernel_width, stride, kernel_width - 1 - padding
    )


def _fits(width: int, outputs: int, kernel_width: int, stride: int, padding: int) -> bool:
    in_pairs = width % 2 == 0 and kernel_width % 2 == 1 and padding % 2 == 0
    return in_pairs and stride == 1 and outputs <= MAX_OUTPUTS and kernel_width > 1 and padding >= 0 and width + 2 * padding > kernel_width


def refuse_mask(kind: str, layer: int) -> None:
    """Raise UsageError for a mask of any kind but ``bool``. `layer`: the number of its dropout."""
    if kind != "bool":
        raise UsageError(
            f"model: the attention with the dropout number {layer} was given a mask of {kind}; bool is needed,"
            " [batch, heads, query time, key time] or what broadcasts to it, True where a key is attended to"
        )


MAX_WAVE = 10_000.0  # longest wavelength in positions, divided by 2π


def exponent_step(width: int) -> float:
    """Return the difference of the logarithms of consecutive frequencies."""
    return -math.log(MAX_WAVE) / max(1, width // 2 - 1)


def frequencies(width: int) -> NDArray[np.float64]:
    """Return float64 [width / 2] from 1 to 1/10000, evenly spaced on a logarithmic scale."""
    result: NDArray[np.float64] = np.exp(np.arange(width // 2) * exponent_step(width))
    return result


def position_codes(count: int, width: int) -> NDArray[np.float32]:
    """Return position codes, float32 [count, width]: sines at all frequencies, then cosines."""
    angles = np.arange(count)[:, None] * frequencies(width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
