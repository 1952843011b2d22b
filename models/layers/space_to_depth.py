"""Convolving two neighbouring columns at once where there are few channels, on a CPU: the same sums in two thirds of the time.

A processor computes the output channels of a pixel side by side, 8 or 16 at a time; with 6 output channels most of it idles. Channels
last, two neighbouring pixels of an image [b, h, w, c] are one pixel of an image [b, h, w/2, 2c] in the same memory. On that a kernel
[h, k, in, out] with an odd k becomes one of [h, (k+1)/2, 2 in, 2 out]: for the left column of a pair with a column of zeros behind it,
for the right one with a column of zeros before it. The zeros cost a (k+1)/k of the products.

Where the images have few channels, so has the gradient with respect to them, which is a convolution too (with the kernel turned by half
a turn, inputs and outputs exchanged).
"""

from __future__ import annotations

__all__ = ["gradient_uses_space_to_depth", "uses_space_to_depth"]

MOST_INPUTS, MOST_OUTPUTS = 4, 8
"""Channels with which two columns at once were faster, on TensorFlow and torch alike (docs/benchmarks.md).

A convolution with more inputs than an image has colours is not the first one of its network: then the gradient with respect to the
images, of twice as many channels each way, would cost more than is gained.
"""


def uses_space_to_depth(width: int, inputs: int, outputs: int, kernel_width: int, stride: int, padding: int) -> bool:
    """Return whether a convolution of images `width` pixels wide is to take two columns at once."""
    return inputs <= MOST_INPUTS and _fits(width, outputs, kernel_width, stride, padding)


def gradient_uses_space_to_depth(width: int, inputs: int, kernel: tuple[int, int], stride: int, padding: int) -> bool:
    """Return whether the gradient with respect to a convolution's images, `width` pixels wide, is to take two columns at once.

    `kernel` is its height and width.
    """
    kernel_height, kernel_width = kernel
    return kernel_height > padding and _fits(
        width + 2 * padding - kernel_width + 1, inputs, kernel_width, stride, kernel_width - 1 - padding
    )


def _fits(width: int, outputs: int, kernel_width: int, stride: int, padding: int) -> bool:
    in_pairs = width % 2 == 0 and kernel_width % 2 == 1 and padding % 2 == 0
    return in_pairs and stride == 1 and outputs <= MOST_OUTPUTS and kernel_width > 1 and padding >= 0 and width + 2 * padding > kernel_width
