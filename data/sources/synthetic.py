"""synthetic-images: random pixels and labels of any size and number, to measure throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...core.errors import UsageError
from ..base import MAX_CLASSES, Block, PreparedBlocks, Split
from .arguments import read_arguments, whole_number, write_arguments

_NAME = "synthetic-images"
_DEFAULTS = {"size": "224", "classes": "1000", "train": "512", "test": "128", "channels": "3"}
_LIMITS = {"size": (1, 4096), "classes": (2, MAX_CLASSES), "train": (1, 2**31 - 1), "test": (1, 2**31 - 1), "channels": (1, 64)}
_STREAMS: Mapping[Split, int] = {"train": 0, "test": 1}
_BLOCK_BYTES = 16 << 20  # per block: enough for numpy, little memory


@dataclass(frozen=True)
class _SyntheticImages:
    """Random images of `size` × `size` pixels.

    An example depends only on its number, split and shape.
    """

    size: int = 224
    classes: int = 1000
    train: int = 512
    test: int = 128
    channels: int = 3

    description = "random images for throughput only: synthetic-images:SIZE or :size=224,classes=1000,train=512,test=128,channels=3"
    version = 1

    @property
    def name(self) -> str:
        values = {key: str(getattr(self, key)) for key in _DEFAULTS}
        arguments = write_arguments(values, _DEFAULTS)
        return f"{_NAME}:{arguments}" if arguments else _NAME

    def with_arguments(self, text: str) -> _SyntheticImages:
        values = read_arguments(_NAME, text, _DEFAULTS, first="size")
        return _SyntheticImages(**{key: whole_number(_NAME, key, value, *_LIMITS[key]) for key, value in values.items()})

    def originals(self, data_dir: Path) -> Sequence[Path]:
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but {_NAME!r} are made up and read no files. Leave --data-dir out.")

    def load(self, data_dir: Path | None) -> PreparedBlocks:
        counts: Mapping[Split, int] = {"train": self.train, "test": self.test}
        blocks = {split: partial(self._blocks, split, count) for split, count in counts.items()}
        return PreparedBlocks((self.channels, self.size, self.size), self.classes, blocks, synthetic=True)

    def _blocks(self, split: Split, count: int) -> Iterator[Block]:
        pixels, classes = (np.random.Philox(np.random.SeedSequence([_STREAMS[split], kind])) for kind in (0, 1))
        words = -(-self.channels * self.size * self.size // 8)  # 64-bit numbers per image, so that no example depends on the block size
        length = max(1, _BLOCK_BYTES // (8 * words))
        for start in range(0, count, length):
            k = min(length, count - start)
            octets = pixels.random_raw(k * words).astype("<u8").view(np.uint8).reshape(k, 8 * words)
            images = octets[:, : self.channels * self.size * self.size].reshape(k, self.channels, self.size, self.size)
            labels = ((classes.random_raw(k) >> np.uint64(32)) * np.uint64(self.classes) >> np.uint64(32)).astype(np.int64)
            yield images, labels


DATASET = _SyntheticImages()
