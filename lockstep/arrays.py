"""Arrays by name in files, which are mapped into memory.

A file has NumPy's format of an array again and again, each at a multiple of 64 bytes: first that of the names, then theirs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..core.errors import writing

Arrays = dict[str, NDArray[Any]]
_ALIGNED_BYTES = 64


def read(path: str) -> Arrays:
    """Return arrays by name; changes stay in memory. Raises ValueError for other content."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        names = _next(file, mapped).tolist()
        return {name: _next(file, mapped) for name in names}


def _next(file: IO[bytes], mapped: mmap.mmap) -> NDArray[Any]:
    header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = header(file)
    if dtype.hasobject:
        raise ValueError("arrays of objects are not read")
    array: NDArray[Any] = np.ndarray(shape, dtype, mapped, file.tell(), order="F" if by_columns else "C")
    file.seek(_aligned(file.tell() + array.nbytes))
    return array


def write_arrays(path: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by name; an earlier file that is mapped stays as it is. Raises DiskError."""
    with writing(Path(path)):
        with open(f"{path}.part", "wb") as file:
            for array in (np.array(list(arrays), str), *arrays.values()):
                npy.write_array(file, np.asarray(array), allow_pickle=False)
                file.seek(_aligned(file.tell()))
            file.truncate()
        os.replace(f"{path}.part", path)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNED_BYTES) * _ALIGNED_BYTES
