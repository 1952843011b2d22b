"""Which inputs does a dropout layer keep? The masks of ``--deterministic`` runs, the same for every backend and number of workers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["keep_mask"]


def keep_mask(seed: int, step: int, layer: int, indices_b: NDArray[np.integer], width: int, rate: float) -> NDArray[np.bool_]:
    """Return what is kept, bool [batch, width]: each element with probability 1 − `rate`, independently.

    `step` counts updates from 0, `layer` numbers the model's dropout layers, `indices_b` are the examples' positions in the training split.
    An example's mask depends on nothing but these numbers, so it is the same in whatever batch or worker the example is.
    The generator is Philox 4×64 (Salmon et al. 2011) with key (seed, step) and counter (0, 0, layer, example): 2⁶⁴ blocks a stream.
    """
    words = -(-width // 2)
    random_bw = np.empty((len(indices_b), words), np.dtype("<u8"))
    for row, index in enumerate(indices_b):
        random_bw[row] = np.random.Philox(key=[seed, step], counter=[0, 0, layer, int(index)]).random_raw(words)
    kept: NDArray[np.bool_] = random_bw.view("<u4")[:, :width] >= np.uint32(round(rate * 2**32))
    return kept
