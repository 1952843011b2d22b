"""Arrays by name in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..core.errors import writing

Arrays = dict[str, NDArray[Any]]


def read(path: str) -> Arrays:
    """Read arrays by name."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def write_arrays(path: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by name. Raises DiskError."""
    with writing(Path(path)):
        np.savez(path, **cast(dict[str, Any], dict(arrays)))
