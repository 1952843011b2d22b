"""Cuts sentences into batches to decode: sorted by length, so that neighbours share one, and never more than memory and time allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .search import Hypothesis, Pieces, Stepper, search
from .settings import Decoding

__all__ = ["MOST_SENTENCES", "batches", "decode"]

MOST_SENTENCES = 128
"""Of a batch. The log-probabilities of a step are (sentences · beam) × vocabulary: 64 MiB for 32,768 pieces and a beam of 4."""

MOST_POSITIONS = 1 << 14
"""Of a batch, hypotheses times the longest that each may become: `big` keeps 49 kB of keys and values at each, 800 MB in all."""

MOST_SOURCE_POSITIONS = 48 * MOST_SENTENCES
"""Of a batch's sources, each padded to the longest. A batch begins with all of them, in one piece: with `big`, at 0.18 GFLOP a position and
20 GFLOP a second, for no longer than a minute, during which a task gives no sign of life."""


def batches(lengths: Sequence[int], decoding: Decoding) -> Iterator[NDArray[np.int64]]:
    """Yield the numbers of the sentences of each batch, the longest first; at least one sentence each, equal lengths in their order."""
    lengths_n = np.asarray(lengths, dtype=np.int64)
    order_n = np.argsort(-lengths_n, kind="stable")
    begin = 0
    while begin < len(order_n):
        length = max(1, int(lengths_n[order_n[begin]]))
        hypotheses = MOST_POSITIONS // (decoding.beam * (length + decoding.extra_length))
        count = max(1, min(MOST_SENTENCES, hypotheses, MOST_SOURCE_POSITIONS // length))
        yield order_n[begin : begin + count]
        begin += count


def decode(stepper: Stepper, sources: Sequence[Pieces], decoding: Decoding, n_best: int = 1) -> list[list[Hypothesis]]:
    """Return the hypotheses of any number of sentences, in their order; see `search`."""
    found: list[list[Hypothesis]] = [[] for _ in sources]
    for chosen in batches([len(source) for source in sources], decoding):
        for number, hypotheses in zip(
            chosen.tolist(), search(stepper, [sources[i] for i in chosen.tolist()], decoding, n_best), strict=True
        ):
            found[number] = hypotheses
    return found
