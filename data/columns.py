"""Examples as named columns of a fixed shape or with one varying dimension.

A varying column is Arrow's list array: the values of all examples, and `offsets` where each begins. So a batch is a gather, and files are
mapped, not parsed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOKENS = "_tokens"  # suffix of a column's name: the sum of its examples' lengths
LENGTHS = "_lengths"  # suffix of a column's name: the length of each padded example
Indices = NDArray[np.int32] | NDArray[np.int64]
DTYPES = ("uint8", "uint16", "int32", "int64", "float32")  # supported by stores and every framework


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Column name, numpy type and example shape: () for a number, None first for varying length.

    Raises ValueError.
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
    """Examples as one array.

    `values` [n, *shape], or ``values[offsets[i]:offsets[i + 1]]`` with `offsets`, int64 [n + 1].
    """

    values: NDArray[np.generic]
    offsets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def example(self, index: int) -> NDArray[np.generic]:
        """Return a view of one example. Raises IndexError for an invalid number."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        values: NDArray[np.generic] = (
            self.values[index] if self.offsets is None else self.values[self.offsets[index] : self.offsets[index + 1]]
        )
        return values

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each example, int64 [n]. Raises ValueError for a column of fixed shape."""
        if self.offsets is None:
            raise ValueError("the examples of this column all have one shape")
        return np.diff(self.offsets)

    def take(self, indices: Indices) -> Column:
        """Return a copy of the examples at `indices`."""
        if self.offsets is None:
            return Column(self.values[indices])
        begins = self.offsets[:-1][indices]
        lengths = self.offsets[1:][indices] - begins  # of these alone: a corpus has millions
        offsets = np.zeros(len(indices) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
        return Column(self.values[places], offsets)

    def padded(self, length: int | None = None) -> NDArray[np.generic]:
        """Return [n, length, …], padded with zeros to `length` or the longest example.

        Raises ValueError for a longer one.
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
        """Return why this does not match `spec` in type, shape or offsets, or None."""
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
