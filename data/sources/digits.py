"""digits: the 1,797 handwritten digits of 8×8 pixels that scikit-learn ships.

They are from UCI's "Optical Recognition of Handwritten Digits".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from ..base import PreparedArrays
from ..preprocessing import digit_arrays

_LEVELS = 16  # scikit-learn's pixels are whole numbers from 0 to 16
_TEST_EVERY = 5
_SPLIT_SEED = 1797  # fixed, so that the split belongs to the dataset and not to a job


class _Digits:
    """Pixels 0…16 become 0…255 by rounding 255/16 · value; 1,437 train and 360 test examples."""

    name = "digits"
    description = "handwritten digits, 8×8, real data that ships with scikit-learn"
    version = 2

    def originals(self, data_dir: Path) -> Sequence[Path]:
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but 'digits' comes with scikit-learn and reads no files. Leave --data-dir out.")

    def load(self, data_dir: Path | None) -> PreparedArrays:
        from sklearn.datasets import load_digits  # slow to import

        values_nhw, targets = load_digits().images, load_digits().target.astype(np.int64)
        images = np.rint(values_nhw * (255 / _LEVELS)).astype(np.uint8)[:, None]
        test = stratified_every(targets, _TEST_EVERY, _SPLIT_SEED)
        return digit_arrays({"train": images[~test], "test": images[test]}, {"train": targets[~test], "test": targets[test]})


def stratified_every(labels: NDArray[np.int64], every: int, seed: int) -> NDArray[np.bool_]:
    """Return a mask [n] of ⌈n / every⌉ examples, drawn evenly from the classes, at random."""
    keys = np.random.Philox(np.random.SeedSequence(seed)).random_raw(len(labels))
    picked = np.zeros(len(labels), dtype=np.bool_)
    picked[np.lexsort((keys, labels))[::every]] = True
    return picked


DATASET = _Digits()
