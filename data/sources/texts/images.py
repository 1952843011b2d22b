"""Images of a dataset that Hugging Face's datasets saved, decoded to squares of one size."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from ....core.errors import UsageError
from ...base import Block, PreparedBlocks, Split
from ..pictures import decode, limits_as_errors, result_or_why, shorter_side
from ..target_classes import wrong

MAX_SIZE = 4096  # pixels
_BLOCK_BYTES = 1 << 26  # decoded before they are written
_SPLITS: tuple[Split, ...] = ("train", "test")
Rows = Callable[[Split], Iterator[tuple[bytes, str]]]


def prepared_images(path: Path, rows: Rows, size: int | None, names: Sequence[str]) -> PreparedBlocks:
    """Return the images of each split in RGB.

    Without a size they get the shorter side of the first one. Raises UsageError for an image that cannot be decoded.
    """
    if size is None:
        first, _ = next(rows("train"))
        with limits_as_errors():
            side = result_or_why(lambda: min(shorter_side(io.BytesIO(first)), MAX_SIZE))
        if isinstance(side, str):
            raise _damaged(path, "train", 1, side)
        size = side
    numbers = {name: number for number, name in enumerate(names)}
    blocks = {split: partial(_blocks, path, rows, split, size, numbers) for split in _SPLITS}
    return PreparedBlocks((3, size, size), len(names), blocks, class_names=tuple(names))


def _damaged(path: Path, split: Split, number: int, why: str) -> UsageError:
    return wrong(path, f"it cannot be decoded: {why}.", f"image {number:,} of the {split} split")


def _blocks(path: Path, rows: Rows, split: Split, size: int, numbers: Mapping[str, int]) -> Iterator[Block]:
    done, left = 0, rows(split)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # Pillow releases the interpreter's lock
        while part := list(itertools.islice(left, max(1, _BLOCK_BYTES // (3 * size**2)))):
            with limits_as_errors():
                pixels = list(threads.map(lambda row: result_or_why(partial(decode, io.BytesIO(row[0]), size)), part))
            for number, image in enumerate(pixels):
                if isinstance(image, str):
                    raise _damaged(path, split, done + number + 1, image)
            yield np.stack(pixels), np.array([numbers[label] for _, label in part], np.int64)
            done += len(part)
