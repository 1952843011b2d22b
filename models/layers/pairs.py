"""Convolving two neighbouring columns at once, for the first convolution of a small network on a CPU: the same sums in two thirds the time.

A processor computes the output channels of a pixel side by side, 8 or 16 at a time; with 6 output channels most of it idles. Channels
last, two neighbouring pixels of an image [b, h, w, c] are one pixel of an image [b, h, w/2, 2c] in the same memory. On that a kernel
[h, k, in, out] with an odd k becomes one of [h, (k+1)/2, 2 in, 2 out]: for the left column of a pair with a column of zeros behind it,
for the right one with a column of zeros before it.

The zeros cost a (k+1)/k of the products. With many input channels the gradient with respect to the image, which a first convolution
does not need, would cost more than is gained.
"""

from __future__ import annotations

__all__ = ["paired"]

MOST_INPUTS, MOST_OUTPUTS = 4, 8
"""Channels with which two columns at once were faster, on TensorFlow and torch alike (docs/benchmarks.md)."""


def paired(width: int, inputs: int, outputs: int, kernel_width: int, stride: int, padding: int) -> bool:
    """Return whether a convolution of images `width` pixels wide is to take two columns at once."""
    fits = stride == 1 and padding == 0 and width % 2 == 0 and kernel_width % 2 == 1 and width > kernel_width > 1
    return fits and inputs <= MOST_INPUTS and outputs <= MOST_OUTPUTS
