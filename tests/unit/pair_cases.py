"""Convolutions that take two columns at once, for both frameworks; imports neither."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PairCase(NamedTuple):
    """Images [batch, inputs, height, width], a kernel [outputs, inputs, rows, columns], and whether there is a bias."""

    batch: int
    inputs: int
    height: int
    width: int
    outputs: int
    rows: int
    columns: int
    biased: bool

    def arrays(self):
        """Return images, weight, bias and the gradient of the result, float64."""
        rng = np.random.default_rng(6)
        shapes = (
            (self.batch, self.inputs, self.height, self.width),
            (self.outputs, self.inputs, self.rows, self.columns),
            (self.outputs,),
            (self.batch, self.outputs, self.height - self.rows + 1, self.width - self.columns + 1),
        )
        return tuple(rng.standard_normal(shape) for shape in shapes)


PAIR_CASES = {
    "cnn": PairCase(4, 3, 32, 32, 6, 5, 5, biased=True),
    "grey": PairCase(2, 1, 7, 10, 8, 2, 3, biased=False),
    "wide kernel": PairCase(1, 4, 9, 8, 1, 9, 7, biased=True),
    "one row": PairCase(3, 2, 1, 6, 3, 1, 5, biased=True),
    "empty": PairCase(0, 3, 8, 8, 6, 5, 5, biased=True),
}
