"""The idx file format of MNIST: a big-endian header (type, dimensions, sizes), then the bytes.

Layout: two zero bytes, a type code (0x08: unsigned byte), the number of dimensions, a 32-bit size for each, the elements in row-major
order (Y. LeCun, C. Cortes, C. Burges: "The MNIST database of handwritten digits").
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError

__all__ = ["read_idx"]

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, gzip-compressed where its name ends in ``.gz``.

    Raises UsageError, naming the file, where it has another type or number of dimensions, or is torn or too long.
    """
    content = _content(path)
    header = 4 + 4 * dimensions
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if content[:4] != expected:
        raise _wrong(
            path,
            f"it begins with 0x{content[:4].hex()}; unsigned bytes in {dimensions} dimensions begin with 0x{expected.hex()}",
        )
    if len(content) < header:
        raise _wrong(path, f"it ends after {len(content)} bytes, within the header")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - header != math.prod(shape):
        raise _wrong(
            path, f"its header promises {' × '.join(map(str, shape))} = {math.prod(shape)} bytes, but {len(content) - header} follow"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _wrong(path, f"it is not a whole gzip file ({error})") from error
    except OSError as error:
        raise _wrong(path, f"it cannot be read ({error.strerror})") from error


def _wrong(path: Path, why: str) -> UsageError:
    return UsageError(f"data_dir: {str(path)!r} is not a usable idx file: {why}. Get the original file again.")
