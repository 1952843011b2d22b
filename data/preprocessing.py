"""Normalisation of pixels, and random augmentation.

Normalisation is (pixel / 255 − mean) / std in float64, rounded once to float32, by a table of the 256 values or a faster line, pixel ·
factor + summand, which exists only if its rounded result cannot depend on how it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from .base import DataInfo, PreparedArrays, Split


def statistics_problem(mean: Sequence[float], std: Sequence[float], channels: int) -> str | None:
    """Return why these cannot normalise pixels to finite float32, or None."""
    if not len(mean) == len(std) == channels:
        return f"mean and std: have {len(mean)} and {len(std)} numbers, and have to have {channels}, one a channel"
    most = float(np.finfo(np.float32).max)
    for m, s in zip(mean, std, strict=True):
        if not (s > 0 and max(abs(m), abs(1 - m)) <= most * s):
            return f"mean and std: pixels cannot be normalised by the mean {m} and the std {s}, which has to be greater than 0"
    return None


def normal_table(mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return the normalised value of each pixel value by channel, float32 [channels, 256]."""
    pixels = np.arange(256, dtype=np.float64) / 255.0
    table: NDArray[np.float32] = ((pixels - np.array(mean)[:, None]) / np.array(std)[:, None]).astype(np.float32)
    return table


def normal_line(mean: Sequence[float], std: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return factor and summand [channels] of the float64 line that equals the table, or None.

    It must hold whether product and sum are rounded separately or once (fused multiply-add, a compiler's choice): both are within 2⁻⁵²
    times the larger of product and sum of numpy's result.
    """
    factor_c, summand_c = 1.0 / (255.0 * np.array(std)), -np.array(mean) / np.array(std)
    products = np.arange(256.0) * factor_c[:, None]
    sums = products + summand_c[:, None]
    slack = 2.0**-52 * np.maximum(np.abs(products), np.abs(sums))
    table = normal_table(mean, std)
    exact = all(np.array_equal((sums + error).astype(np.float32), table) for error in (-slack, slack))
    return (factor_c, summand_c) if exact else None


_CHUNK = 4096  # images per count: numpy's int64 copy has eight times their size


class PixelCounts:
    """A histogram of the 256 values per channel, counted block by block."""

    def __init__(self, channels: int) -> None:
        self._counts = np.zeros((channels, 256), dtype=np.int64)

    def add(self, images_nchw: NDArray[np.uint8]) -> None:
        """Count the pixels of some images."""
        for channel, counts in enumerate(self._counts):
            for start in range(0, len(images_nchw), _CHUNK):
                counts += np.bincount(images_nchw[start : start + _CHUNK, channel].ravel(), minlength=256)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (mean, std) as `channel_statistics` does. Raises ZeroDivisionError without pixels."""
        means: list[float] = []
        deviations: list[float] = []
        for counts in self._counts:
            histogram = [int(count) for count in counts]
            number = sum(histogram)
            total = sum(value * count for value, count in enumerate(histogram))
            squares = sum(value * value * count for value, count in enumerate(histogram))
            means.append(total / (255 * number))
            deviations.append(math.sqrt((number * squares - total * total) / (255 * number) ** 2))
        return tuple(means), tuple(deviations)


def channel_statistics(images_nchw: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) per channel of pixels in 0…1.

    Rounded once from a histogram of integers, so order is irrelevant.
    """
    counts = PixelCounts(images_nchw.shape[1])
    counts.add(images_nchw)
    return counts.statistics()


def digit_arrays(images: Mapping[Split, NDArray[np.uint8]], labels: Mapping[Split, NDArray[np.int64]]) -> PreparedArrays:
    """Return images of the ten digits as a source's result."""
    mean, std = channel_statistics(images["train"])
    return PreparedArrays(images, labels, classes=10, mean=mean, std=std, flippable=False)


# A change is drawn from (seed, epoch, example) alone and made on stored bytes, so it is the same on every backend and after a resume.
# Shapes: n training examples, k examples of a batch, c channels, h height, w width.

Changes = NDArray[np.int32]  # [k, 3]: dy, dx (pixels to move down and right), then flip (1: mirror left to right)
_MAX_SHARE = 8  # images move by at most an eighth: 4 pixels of 32, as is usual for CIFAR-10
_STREAM = 1  # separates these random numbers from the data order's, which share (seed, epoch)
_BITS = np.uint64(24)  # of each 64-bit number: 24 for dy, 24 for dx, 1 for flip


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Allowed moves in pixels, in either direction, and mirroring."""

    max_dy: int
    max_dx: int
    flip: bool

    def draws(self, seed: int, epoch: int, size: int) -> Changes:
        """Return one epoch's changes of all `size` training examples, int32 [n, 3] in dataset order."""
        bits = np.random.Philox(np.random.SeedSequence([seed, epoch], spawn_key=(_STREAM,))).random_raw(size)
        changes = np.zeros((size, 3), dtype=np.int32)
        for column, most in enumerate((self.max_dy, self.max_dx)):
            part = (bits >> (np.uint64(column) * _BITS)) & np.uint64(2**24 - 1)
            changes[:, column] = (part * np.uint64(2 * most + 1) >> _BITS).astype(np.int32) - most
        if self.flip:
            changes[:, 2] = (bits >> np.uint64(63)).astype(np.int32)
        return changes


def augmentation(kind: str, info: DataInfo) -> Augmentation | None:
    """Return the changes for ``--augment``.

    Raises UsageError for mirroring images such as digits.
    """
    if kind == "none":
        return None
    parts = kind.split("+")
    if "flip" in parts and not info.images.flippable:
        raise UsageError(
            f"augment: got {kind!r}, but images of {info.name!r} must not be mirrored: their mirror images mean something else. "
            "Allowed: none, crop."
        )
    _, height, width = info.input_shape
    crop = "crop" in parts
    return Augmentation(height // _MAX_SHARE if crop else 0, width // _MAX_SHARE if crop else 0, "flip" in parts)


def apply_changes(images_kchw: NDArray[np.uint8], changes: Changes) -> NDArray[np.uint8]:
    """Return changed copies: moved down by dy and right by dx over zeros, then mirrored if flip.

    The reference for all backends.
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
