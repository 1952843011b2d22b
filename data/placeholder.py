"""One made-up example a split, in the place of text that is not at hand: whoever translates lines with a trained model needs none of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UsageError
from .base import DataInfo, Split
from .columns import TOKENS, Column
from .text import END

__all__ = ["PlaceholderText"]


@dataclass(frozen=True, slots=True)
class PlaceholderText:
    """A `Dataset` of text with the columns of another, and one example in each split: of END alone, or of zeros. It has no attachments.

    `of` makes it from the shape of the other one. Raises UsageError for what is no text.
    """

    info: DataInfo

    @classmethod
    def of(cls, info: DataInfo) -> PlaceholderText:
        """Return the placeholder of a dataset of this shape."""
        _ = info.text
        return cls(replace(info, sizes={"train": 1, "test": 1}))

    def column(self, split: Split, name: str) -> Column:
        """Return the one example of a column; see `Dataset.column`."""
        spec = self.info.column(name)
        if spec.varies:
            return Column(np.full((1, *spec.fixed_shape), END, spec.dtype), np.array([0, 1], np.int64))
        return Column(np.zeros((1, *spec.fixed_shape), spec.dtype))

    def weights(self, split: Split, name: str) -> NDArray[np.int64]:
        """Return the number 1: the example, or its one token; see `Dataset.weights`."""
        if name not in ("examples", *(column.name + TOKENS for column in self.info.columns if column.varies)):
            raise UsageError(f"data: {self.info.name!r} has no weights called {name!r}.")
        return np.ones(1, np.int64)

    @property
    def attachments(self) -> tuple[str, ...]:
        """None."""
        return ()

    def attachment(self, name: str) -> bytes:
        """Raise UsageError: there are none."""
        raise UsageError(f"data: {self.info.name!r} is not at hand, and so is not its {name!r}.")

    def images(self, split: Split) -> NDArray[np.uint8]:
        """Raise UsageError: text has none."""
        raise UsageError(f"data: {self.info.name!r} is text, and has no images.")

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Raise UsageError: text has none."""
        raise UsageError(f"data: {self.info.name!r} is text, and has no labels.")

    def inputs(self, split: Split) -> NDArray[np.float32]:
        """Raise UsageError: text has none."""
        raise UsageError(f"data: {self.info.name!r} is text, and has no images.")
