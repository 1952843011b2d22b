"""Sentences of the decoding rows, equal for all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from workload import Workload

SENTENCES, LENGTH, SOURCE_LENGTH = 32, 50, 25
"""Sentences of a step, pieces of a translation and of a sentence."""


def sentences(work: Workload) -> list[NDArray[np.integer]]:
    """Return sentences of one length, as many as all steps need, repeated if necessary."""
    column = work.data.column("train", "source")
    positions = np.flatnonzero(column.lengths == SOURCE_LENGTH)
    return [column.example(int(index)) for index in np.resize(positions, work.updates * SENTENCES)]
