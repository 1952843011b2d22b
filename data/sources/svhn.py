"""svhn: house numbers from street photographs, 32×32×3, from .mat files ("format 2").

73,257 train and 26,032 test examples; ``svhn:extra`` adds 531,131 easier ones for training (Y. Netzer et al., 2011). A file has the images
X as uint8 [height, width, channel, n] and the labels y as [n, 1], with 10 for the digit 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ..base import Block, PreparedBlocks, Split
from .download import expect_md5, files_of

MD5: Mapping[str, str] = {  # as listed by torchvision
    "train": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test": "eb5a983be6a315427106f1b164d9cef3",
    "extra": "a93ce644f1a588dc4d68dda5feec44a7",
}
_IMAGE = (32, 32, 3)
_BLOCK = 8192  # examples transposed together
_DOWNLOAD_SECONDS = 6 * 3600  # 0.25 GB, with extra 1.6 GB, on a slow connection


@dataclass(frozen=True)
class SvhnSource:
    """Reads the .mat files of `data_dir`, or downloads them with torchvision.

    `md5`: checksums by part.
    """

    extra: bool = False
    md5: Mapping[str, str] = field(default_factory=lambda: MD5)

    description = "house numbers, 32×32×3, svhn or svhn:extra; downloaded through torchvision, or .mat files from --data-dir"
    version = 1

    @property
    def name(self) -> str:
        """``svhn`` or ``svhn:extra``."""
        return "svhn:extra" if self.extra else "svhn"

    def with_arguments(self, text: str) -> SvhnSource:
        """Return the source with or without the extra examples. Raises UsageError."""
        if text not in ("", "extra"):
            raise UsageError.of("data: argument of 'svhn'", text, "extra", ["extra"])
        return SvhnSource(text == "extra", self.md5)

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Return the files of all parts. Raises UsageError for the first missing one."""
        return [self._file(data_dir, part) for part in self._parts]

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedBlocks:
        """Return blocks of verified files.

        Files are downloaded into `work` if there is no `data_dir`. Blocks are decoded while the store is written.
        """
        folder = files_of("svhn", data_dir, work, _DOWNLOAD_SECONDS, self._hint, self._parts)
        for part in self._parts:
            expect_md5(self._file(folder, part), self.md5[part])
        parts: Mapping[Split, list[str]] = {"train": [part for part in self._parts if part != "test"], "test": ["test"]}
        blocks = {split: partial(_blocks, [self._file(folder, part) for part in names]) for split, names in parts.items()}
        return PreparedBlocks((3, 32, 32), 10, blocks, flippable=False)

    def _file(self, folder: Path, part: str) -> Path:
        path = folder / f"{part}_32x32.mat"
        if not path.is_file():
            raise UsageError(f"data_dir: {str(folder)!r} has no file {path.name!r}; {self._hint}.")
        return path

    @property
    def _parts(self) -> tuple[str, ...]:
        return ("train", "extra", "test") if self.extra else ("train", "test")

    @property
    def _hint(self) -> str:
        return f"give --data-dir with the folder of {', '.join(f'{part}_32x32.mat' for part in self._parts)}"


def _blocks(paths: Sequence[Path]) -> Iterator[Block]:
    for path in paths:
        images_hwcn, labels_n1 = (_read_variable(path, name) for name in ("X", "y"))
        count = images_hwcn.shape[-1]
        if images_hwcn.dtype != np.uint8 or images_hwcn.shape != (*_IMAGE, count) or labels_n1.shape != (count, 1):
            shapes = f"X is {images_hwcn.dtype} {list(images_hwcn.shape)} and y has the shape {list(labels_n1.shape)}"
            raise _unusable(path, f"{shapes}; expected are uint8 [32, 32, 3, n] and [n, 1]")
        labels = labels_n1[:, 0].astype(np.int64)
        if count and not 1 <= labels.min() <= labels.max() <= 10:
            raise _unusable(path, f"its labels lie in {labels.min()}…{labels.max()}, not in 1…10")
        labels[labels == 10] = 0
        for start in range(0, count, _BLOCK):
            part = slice(start, start + _BLOCK)
            yield images_hwcn[..., part].transpose(3, 2, 0, 1), labels[part]


def _read_variable(path: Path, name: str) -> np.ndarray[Any, Any]:
    from scipy.io import loadmat  # needed once, when the store is made

    try:
        array: np.ndarray[Any, Any] = loadmat(str(path), variable_names=[name])[name]
    except MemoryError:
        raise
    except Exception as error:  # a binary reader may raise anything for another format
        raise _unusable(path, f"{name} cannot be read from it ({type(error).__name__}: {error})") from error
    return array


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"data_dir: {str(path)!r} is no usable file of SVHN's format 2: {why}. Get the original file again.")


DATASET = SvhnSource()
