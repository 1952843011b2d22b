"""mnist: handwritten digits, 28×28, from the user's files or downloaded by torchvision.

60,000 train and 10,000 test examples. torchvision runs in a separate process.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.bounded_json import UnreadableError, open_regular
from ...core.errors import UsageError
from ..base import PreparedArrays, Split
from ..preprocessing import digit_arrays
from .download import files_of

_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_FOLDERS = ("", "raw", "MNIST/raw")  # torchvision keeps its files in MNIST/raw
_DOWNLOAD_SECONDS = 900  # 11 MB on a slow connection
_FILES_HINT = (
    "give --data-dir with the folder of the four idx files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…, plain or .gz)"
)


_UNSIGNED_BYTE = 0x08
_GZIP = b"\x1f\x8b"
_MAX_BYTES = 1 << 30  # unpacked size of a file: twenty times the original


class _Mnist:
    """Reads the four idx files of `data_dir`, or downloads them with torchvision."""

    name = "mnist"
    description = "handwritten digits, 28×28; downloaded through torchvision, or idx files from --data-dir"
    version = 2

    def originals(self, data_dir: Path) -> Sequence[Path]:
        return [_find(data_dir, name) for name in _NAMES]

    def load_in(self, work: Path, data_dir: Path | None) -> PreparedArrays:
        folder = files_of("mnist", data_dir, work, _DOWNLOAD_SECONDS, _FILES_HINT)
        train_images, train_labels, test_images, test_labels = self.originals(folder)
        images: dict[Split, NDArray[np.uint8]] = {"train": _read_images(train_images), "test": _read_images(test_images)}
        labels: dict[Split, NDArray[np.int64]] = {
            "train": _read_labels(train_labels, len(images["train"])),
            "test": _read_labels(test_labels, len(images["test"])),
        }
        return digit_arrays(images, labels)


def _find(folder: Path, name: str) -> Path:
    """Some copies have a dot before ``idx``."""
    for place, spelling, suffix in product(_FOLDERS, (name, name.replace("-idx", ".idx")), ("", ".gz")):
        path = folder / place / f"{spelling}{suffix}"
        try:
            open_regular(path).close()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except UnreadableError as error:
            raise _wrong(path, f"it {error}") from error
        return path
    raise UsageError(f"data_dir: {str(folder)!r} has no file {name!r} or {name + '.gz'!r}; {_FILES_HINT}.")


def _read_images(path: Path) -> NDArray[np.uint8]:
    images = read_idx(path, 3)
    if images.shape[1:] != (28, 28) or not len(images):
        raise UsageError(
            f"data_dir: {str(path)!r} holds {len(images)} images of {images.shape[1]}×{images.shape[2]}; mnist has images of 28×28."
        )
    return images[:, None]


def _read_labels(path: Path, images: int) -> NDArray[np.int64]:
    labels = read_idx(path, 1).astype(np.int64)
    if len(labels) != images:
        raise UsageError(f"data_dir: {str(path)!r} has {len(labels)} labels for {images} images; the files do not belong together.")
    if labels.max() > 9:
        raise UsageError(f"data_dir: {str(path)!r} has the label {labels.max()}; mnist has 0 to 9.")
    return labels


DATASET = _Mnist()


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, plain or gzip under any name.

    Raises UsageError for any other content.
    """
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    header = 4 + 4 * dimensions
    try:
        with open_regular(path) as raw:
            file = gzip.GzipFile(fileobj=raw) if raw.peek(len(_GZIP))[: len(_GZIP)] == _GZIP else raw
            head = file.read(header)
            if head[:4] != expected:
                began = f"it begins with 0x{head[:4].hex()}"
                raise _wrong(path, f"{began}; unsigned bytes in {dimensions} dimensions begin with 0x{expected.hex()}")
            if len(head) < header:
                raise _wrong(path, f"it ends after {len(head)} bytes, within the header")
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(shape)
            content = file.read(min(size, _MAX_BYTES) + 1)  # a small gzip file can unpack to terabytes
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _wrong(path, f"it is not a whole gzip file ({error})") from error
    except (OSError, UnreadableError) as error:
        raise _wrong(path, f"it {error}" if isinstance(error, UnreadableError) else f"it cannot be read ({error.strerror})") from error
    if len(content) > _MAX_BYTES:
        raise _wrong(path, f"it holds more than {_MAX_BYTES >> 20} MiB")
    if len(content) != size:
        follow = "more" if len(content) > size else len(content)
        raise _wrong(path, f"its header promises {' × '.join(map(str, shape))} = {size} bytes, but {follow} follow")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _wrong(path: Path, why: str) -> UsageError:
    return UsageError(f"data_dir: {str(path)!r} is not a usable idx file: {why}. Get the original file again.")
