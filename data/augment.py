"""Random changes of training images: what is done to which example in which epoch, the same on every backend, mode and worker count.

An example's change is drawn from (seed, epoch, example) alone and made on the stored bytes, so that it is exact: whoever trains on
the example, in whatever batch, before or after a resume, sees the same pixels.

Shapes: n training examples, k examples of a batch, c channels, h height, w width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from .base import DataInfo

__all__ = ["Augmentation", "Changes", "apply_changes", "augmentation"]

Changes = NDArray[np.int32]
"""[k, 3]: dy, dx (pixels by which the content moves down and to the right) and flip (1: mirrored left to right after the move)."""

_LARGEST_SHARE = 8  # images move by at most an eighth of their height and width: 4 pixels of 32, as is usual for CIFAR-10
_STREAM = 1  # keeps these random numbers apart from those of the data order, which share (seed, epoch)
_BITS = np.uint64(24)  # of each 64-bit number: 24 for dy, 24 for dx, 1 for flip


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What may happen to an image: moved by at most `most_dy` and `most_dx` pixels in either direction, mirrored or not."""

    most_dy: int
    most_dx: int
    flip: bool

    def draws(self, seed: int, epoch: int, size: int) -> Changes:
        """Return the changes of all `size` training examples in one epoch, int32 [n, 3] in the order of the dataset."""
        bits = np.random.Philox(np.random.SeedSequence([seed, epoch], spawn_key=(_STREAM,))).random_raw(size)
        changes = np.zeros((size, 3), dtype=np.int32)
        for column, most in enumerate((self.most_dy, self.most_dx)):
            part = (bits >> (np.uint64(column) * _BITS)) & np.uint64(2**24 - 1)
            changes[:, column] = (part * np.uint64(2 * most + 1) >> _BITS).astype(np.int32) - most
        if self.flip:
            changes[:, 2] = (bits >> np.uint64(63)).astype(np.int32)
        return changes


def augmentation(kind: str, info: DataInfo) -> Augmentation | None:
    """Return what the job's ``--augment`` (none, crop, flip or crop+flip) means for a dataset, None for none.

    Raises UsageError where images would be mirrored whose mirror images mean something else, such as digits.
    """
    if kind == "none":
        return None
    parts = kind.split("+")
    if "flip" in parts and not info.flippable:
        raise UsageError(
            f"augment: got {kind!r}, but images of {info.name!r} must not be mirrored: their mirror images mean something else. "
            "Allowed: none, crop."
        )
    _, height, width = info.input_shape
    crop = "crop" in parts
    return Augmentation(height // _LARGEST_SHARE if crop else 0, width // _LARGEST_SHARE if crop else 0, "flip" in parts)


def apply_changes(images_kchw: NDArray[np.uint8], changes: Changes) -> NDArray[np.uint8]:
    """Return changed copies of images as stored: the definition that every backend's own operation has to equal, byte for byte.

    The content moves down by dy and right by dx, what it leaves becomes 0, and then the image is mirrored left to right where flip.
    """
    result = np.zeros_like(images_kchw)
    height, width = images_kchw.shape[2:]
    for source, target, (dy, dx, flip) in zip(images_kchw, result, changes.tolist(), strict=True):
        target[:, max(dy, 0) : height + min(dy, 0), max(dx, 0) : width + min(dx, 0)] = source[
            :, max(-dy, 0) : height + min(-dy, 0), max(-dx, 0) : width + min(-dx, 0)
        ]
        if flip:
            target[:] = target[:, :, ::-1].copy()
    return result
