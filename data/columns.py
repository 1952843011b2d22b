"""An example as named columns: numbers, images and sequences, each with a fixed shape or with one dimension that varies.

A column of a fixed shape is one array [n, …]. One that varies is what Arrow calls a list array: the values of all examples one after
another, and `offsets` that say where each example begins. So a batch is a gather either way, and files are mapped, not parsed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LENGTHS", "TOKENS", "Column", "ColumnSpec"]

TOKENS = "_tokens"
"""Behind a column's name: the sum of how many elements its examples have."""

LENGTHS = "_lengths"
"""Behind a column's name: how long each example is, for a forward function that is given them padded."""

Indices = NDArray[np.int32] | NDArray[np.int64]
DTYPES = ("uint8", "uint16", "int32", "int64", "float32")
"""What a column may hold: what a store writes and every framework reads."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column's name, numpy type and the shape of one example in it: () for a number, None first for a length that varies.

    Raises ValueError for a name that is no identifier, an unknown type, or None anywhere but first.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a column is called {self.name!r}, which is no identifier")
        if self.dtype not in DTYPES:
            raise ValueError(f"column {self.name!r} has the type {self.dtype!r}, not one of {', '.join(DTYPES)}")
        if None in self.shape[1:]:
            raise ValueError(f"column {self.name!r} has the shape {self.shape}: only the first dimension of an example may vary")

    @property
    def varies(self) -> bool:
        """Whether examples differ in length."""
        return self.shape[:1] == (None,)

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The dimensions that do not vary."""
        return tuple(size for size in self.shape if size is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The examples of one column.

    Without `offsets`, `values` is [n, *shape]. With `offsets`, int64 [n + 1], example i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: NDArray[np.generic]
    offsets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def example(self, index: int) -> NDArray[np.generic]:
        """Return one example: a view. Raises IndexError where there is none of that number."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        values: NDArray[np.generic] = (
            self.values[index] if self.offsets is None else self.values[self.offsets[index] : self.offsets[index + 1]]
        )
        return values

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How long each example is, int64 [n]. Raises ValueError for a column of a fixed shape."""
        if self.offsets is None:
            raise ValueError("the examples of this column all have one shape")
        return np.diff(self.offsets)

    def take(self, indices: Indices) -> Column:
        """Return the examples at `indices` as a column of their own, copied."""
        if self.offsets is None:
            return Column(self.values[indices])
        begins = self.offsets[:-1][indices]
        lengths = self.offsets[1:][indices] - begins  # of these alone: a corpus has millions
        offsets = np.zeros(len(indices) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
        return Column(self.values[places], offsets)

    def padded(self, length: int | None = None) -> NDArray[np.generic]:
        """Return a matrix [n, length, …] with zeros behind each example; `length` is that of the longest one where it is not given.

        Raises ValueError where an example is longer.
        """
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        if length is None:
            length = longest
        if longest > length:
            raise ValueError(f"an example has {longest} elements, more than {length}")
        result = np.zeros((len(self), length, *self.values.shape[1:]), dtype=self.values.dtype)
        result[np.arange(length) < lengths[:, None]] = self.values
        return result

    def wrong_with(self, spec: ColumnSpec) -> str | None:
        """Return in what these are not `spec`'s examples, or None: type, shape, or offsets that do not run from 0 to the end."""
        values, offsets = self.values, self.offsets
        if values.dtype != np.dtype(spec.dtype) or values.shape[1:] != spec.fixed_shape or values.ndim == 0:
            return f"{spec.name} is {values.dtype} {list(values.shape)}, not {spec.dtype} {['n', *spec.fixed_shape]}"
        if (offsets is None) == spec.varies:
            return f"{spec.name} has {'no offsets, though its length varies' if spec.varies else 'offsets, though its length is fixed'}"
        if offsets is None:
            return None
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) == 0:
            return f"{spec.name} has offsets {offsets.dtype} {list(offsets.shape)}, not int64 [n + 1]"
        if offsets[0] != 0 or offsets[-1] != len(values) or np.any(offsets[1:] < offsets[:-1]):
            return f"{spec.name} has offsets that do not rise from 0 to {len(values)}"
        return None
