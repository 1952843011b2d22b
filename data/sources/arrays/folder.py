"""Arrays of .npy files in a folder, as `NpzFile` has those of one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .npz import BLOCK_BYTES, Header


class NpyFolder:
    """Files that this package wrote; `path` is where their content comes from, for messages."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.path = path
        self._mapped = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in sorted(folder.glob("*.npy"))}
        self.arrays = {name: Header(array.shape, array.dtype, transposed=False) for name, array in self._mapped.items()}

    def blocks(self, name: str, most_rows: int = 1 << 16) -> Iterator[NDArray[Any]]:
        """Yield an array [n, …] in parts of at most so many rows."""
        array = self._mapped[name]
        most = min(most_rows, max(1, BLOCK_BYTES // max(array[:1].nbytes, 1)))
        for first in range(0, len(array), most):
            yield np.array(array[first : first + most])

    def whole(self, name: str) -> NDArray[Any]:
        """Return an array, which has to fit into memory."""
        return np.array(self._mapped[name])
