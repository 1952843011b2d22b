"""Which arrays a checkpoint holds, and in which file each lies under which name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["OPTIMIZER", "PARAMETERS", "ArrayEntry"]

PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"

_FILES = {"parameters": PARAMETERS, "buffers": PARAMETERS, "slots": OPTIMIZER}


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """One array: `key` is ``parameters/NAME``, ``buffers/NAME`` or ``slots/SLOT/NAME``; `dtype` is numpy's type string, such as ``<f4``."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the array's values in C order."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def file(self) -> str:
        """Name of the checkpoint's file that holds the array. Raises ValueError for a key of no known kind."""
        kind, _, name = self.key.partition("/")
        if kind not in _FILES or not name:
            raise ValueError(f"{self.key!r} is no key of a checkpoint's array")
        return _FILES[kind]

    @property
    def name(self) -> str:
        """The array's name within its file: the canonical name, or ``SLOT/NAME``."""
        return self.key.partition("/")[2]
