"""What the scripts that decode have in common: the sentences, the length of translations, and the product's decoder to compare with.

Weights are the initial ones: what is decoded is nonsense, and takes as long as sense. No translation may end before its time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from workload import Workload

from crosstrain.backends.torch.model import Model
from crosstrain.core.job import Job
from crosstrain.data.text import BEGIN, END, PADDING

__all__ = ["LENGTH", "NEVER", "SENTENCES", "Cached", "Tokens", "chosen", "sentences"]

Tokens = NDArray[np.int64]

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


class Cached:
    """The product's decoder."""

    def __init__(self, work: Workload) -> None:
        job = Job(backend="torch", model=work.model, data=work.data.info.name, seed=work.seed)
        self._stepper = Model.initial(job, work.spec, 0, torch.device("cpu")).stepper()

    def translate(self, sources: list[Tokens]) -> Tokens:
        """Return the pieces, [batch, LENGTH]."""
        self._stepper.begin(sources)
        rows, pieces = np.arange(len(sources)), [np.full(len(sources), BEGIN)]
        for _ in range(LENGTH):
            pieces.append(chosen(self._stepper.advance(pieces[-1], rows)))
        return np.stack(pieces[1:], 1)
