"""What the scripts that decode have in common: which sentences, and how many pieces each translation gets.

Weights are the initial ones: what is decoded is nonsense, and takes as long as sense. No translation may end before its time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from workload import Workload

from crosstrain.data.text import BEGIN, END, PADDING

__all__ = ["LENGTH", "NEVER", "SENTENCES", "chosen", "sentences"]

LENGTH = 50
"""Pieces of each translation."""

SENTENCES = 32
"""Of a batch."""

NEVER = (PADDING, BEGIN, END)
"""Pieces that no translation has."""


def sentences(work: Workload) -> list[list[NDArray[np.int64]]]:
    """Return a batch to warm up, and one for each step: sentences of like length."""
    source = work.data.column("train", "source")
    order = np.argsort(source.lengths, kind="stable")
    middle = order[len(order) // 2 :][: (work.steps + 1) * SENTENCES].reshape(-1, SENTENCES)
    return [[source.example(int(index)).astype(np.int64) for index in batch] for batch in middle]


def chosen(scores_nv: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the most probable piece of each row that a translation may have."""
    scores_nv[:, NEVER] = -np.inf
    return scores_nv.argmax(1)
