"""Convolutions that compute two columns per step, for both frameworks; imports neither."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PairCase(NamedTuple):
    """Shapes of a convolution whose result or image gradient is computed two columns at once.

    Images [batch, inputs, height, width], a kernel [outputs, inputs, rows, columns], zero padding, and whether there is a bias.
    """

    batch: int
    inputs: int
    height: int
    width: int
    outputs: int
    rows: int
    columns: int
    padding: int
    biased: bool

    def arrays(self):
        """Return images, weight, bias and the gradient of the result, float64."""
        rng = np.random.default_rng(6)
        shapes = (
            (self.batch, self.inputs, self.height, self.width),
            (self.outputs, self.inputs, self.rows, self.columns),
            (self.outputs,),
            (self.batch, self.outputs, self.height + 2 * self.padding - self.rows + 1, self.width + 2 * self.padding - self.columns + 1),
        )
        return tuple(rng.standard_normal(shape) for shape in shapes)


PAIR_CASES = {
    "cnn 1": PairCase(4, 3, 32, 32, 6, 5, 5, 0, biased=True),
    "cnn 2": PairCase(64, 6, 14, 14, 16, 5, 5, 2, biased=True),
    "grey": PairCase(2, 1, 7, 10, 8, 2, 3, 0, biased=False),
    "padded": PairCase(1, 4, 9, 8, 1, 9, 7, 2, biased=True),
    "one row": PairCase(3, 2, 1, 6, 3, 1, 5, 0, biased=True),
    "without padding": PairCase(16, 8, 20, 18, 40, 7, 3, 0, biased=False),
    "padded at will": PairCase(8, 5, 21, 20, 48, 7, 5, 4, biased=True),
    "empty": PairCase(0, 3, 8, 8, 6, 5, 5, 0, biased=True),
}


def save_all(path, layers, computed, ours, plain):
    """Save the results of `ours` and `plain` for every case by `computed`, to a file (npz).

    Also how many convolutions `ours` computed in pairs.
    """
    taken = []
    in_pairs = layers._conv_space_to_depth

    def watched(*arguments):
        taken.append(1)
        return in_pairs(*arguments)

    layers._conv_space_to_depth = watched
    results = {}
    for name, case in PAIR_CASES.items():
        taken.clear()
        results |= {f"{name}/ours/{key}": np.asarray(value) for key, value in computed(case, ours)}
        results[f"{name}/taken"] = np.array(len(taken))
        results |= {f"{name}/plain/{key}": np.asarray(value) for key, value in computed(case, plain)}
    np.savez(path, **results)
