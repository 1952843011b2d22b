"""Greedy and beam search over log-probabilities, in numpy, many sentences at once.

A step extends every hypothesis of a sentence by every piece, and takes the `beam` most probable of all these continuations. Those that
end with END are finished; the others go on. (So a beam of 1 is greedy search.) A finished hypothesis is ranked by its score
(`Decoding`), which rewards length a little. A sentence is done when it has no hypothesis left, when its longest allowed length is
reached, or earlier by a bound that changes no result: a log-probability only falls as pieces are added, and the penalty is largest
at the longest length, so that no hypothesis can finish with a score above (its log-probability now) / penalty(longest length). Once the
finished ones that are asked for are at least as good as that, none that comes later can take a place, since of equal scores the
one that was found first stands first.

Log-probabilities that are no numbers, of a model that has diverged, say nothing: a sentence in whose search they come up has no hypothesis.

Sums are taken in float64 for each sentence by itself, and of equal continuations that of the better hypothesis is taken, then that by the
lower piece number: a sentence's result depends on nothing but its own log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...data.text import BEGIN, END, PADDING
from .settings import Decoding

__all__ = ["Hypothesis", "Stepper", "search"]

Pieces = NDArray[np.integer]
Indices = NDArray[np.int64]
LogProbabilities = NDArray[np.float32]


class Stepper(Protocol):
    """A model that says one piece after another: what a backend makes of its encoder and decoder."""

    def begin(self, sources: Sequence[Pieces]) -> None:
        """Take over some sentences, each ending with END, and forget those before. There is one row for each, in this order."""
        ...

    def advance(self, tokens_n: Indices, rows_n: Indices) -> LogProbabilities:
        """Return the log-probabilities of the next piece, float32 [n, vocabulary], none above 0; the array may be written to.

        There are n rows from now on: row i continues what was row ``rows_n[i]`` before this call by the piece ``tokens_n[i]`` (BEGIN
        the first time). n may differ from call to call, and rows may be continued more than once or not at all.
        """
        ...


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A translation: its `pieces` without END, whether it `ended` by END (else it was cut off), and what the model makes of it.

    `log_probability` is the sum over its pieces, END among them; `score` that sum divided by the length penalty.
    """

    pieces: tuple[int, ...]
    score: float
    log_probability: float
    ended: bool


class _Beams:
    """The hypotheses of a batch that go on, as rows sorted by sentence and then from the most probable to the least."""

    def __init__(self, sentences: int, longest: int) -> None:
        self.sentence_n = np.arange(sentences, dtype=np.int64)
        self.total_n = np.zeros(sentences)
        self.rows_n = np.arange(sentences, dtype=np.int64)
        self.last_n = np.full(sentences, BEGIN, np.int64)
        self.pieces_nt = np.zeros((sentences, longest), np.int32)

    def pieces(self, row: int, count: int) -> tuple[int, ...]:
        """Return the pieces of a row so far."""
        return tuple(self.pieces_nt[row, :count].tolist())

    def keep(self, chosen_n: Indices, tokens_n: Indices, total_n: NDArray[np.float64], place: int) -> None:
        """Go on with a continuation of each of the rows `chosen_n`, by the piece at `place`."""
        self.sentence_n = self.sentence_n[chosen_n]
        self.total_n, self.rows_n, self.last_n = total_n, chosen_n, tokens_n
        self.pieces_nt = self.pieces_nt[chosen_n]
        self.pieces_nt[:, place] = tokens_n


def search(stepper: Stepper, sources: Sequence[Pieces], decoding: Decoding, n_best: int = 1) -> list[list[Hypothesis]]:
    """Return for each source its `n_best` (at most the beam) best hypotheses.

    Those that ended stand first, the best of them before the others; behind them, where there are too few, the most probable of those that
    were cut off at the longest allowed length. There are fewer where the model gives all others the probability 0, and none where what it
    gives is not finite: NaN or +inf for any piece, or −inf for every one. PADDING and BEGIN are never taken. Raises ValueError for a source
    without pieces, or where `n_best` is beyond the beam.
    """
    if not 1 <= n_best <= decoding.beam:
        raise ValueError(f"{n_best} best hypotheses of a beam of {decoding.beam}")
    if not sources:
        return []
    if min(map(len, sources)) == 0:
        raise ValueError("a source without pieces: it has to end with END")
    limits = [len(source) + decoding.extra_length for source in sources]
    finished: list[list[Hypothesis]] = [[] for _ in sources]
    beams = _Beams(len(sources), max(limits))
    stepper.begin(sources)
    for place in range(max(limits)):
        row_m, piece_m, total_m, broken = _continuations(beams, stepper.advance(beams.last_n, beams.rows_n), decoding.beam)
        for sentence in broken:
            finished[sentence].clear()
        ends_m = piece_m == END
        for row, total in zip(row_m[ends_m].tolist(), total_m[ends_m].tolist(), strict=True):
            hypothesis = Hypothesis(beams.pieces(row, place), total / decoding.penalty(place + 1), total, ended=True)
            _insert(finished[beams.sentence_n[row]], hypothesis, n_best)
        row_m, piece_m, total_m = row_m[~ends_m], piece_m[~ends_m], total_m[~ends_m]
        goes_on_m = np.ones(len(row_m), np.bool_)
        searched_s = np.unique(beams.sentence_n)
        bounds_s2 = np.searchsorted(beams.sentence_n[row_m], np.stack((searched_s, searched_s + 1), 1))
        for sentence, (first, last) in zip(searched_s.tolist(), bounds_s2.tolist(), strict=True):
            found = finished[sentence]
            if place + 1 == limits[sentence]:
                goes_on_m[first:last] = False
                for row, piece, total in zip(*(of_m[first:last].tolist() for of_m in (row_m, piece_m, total_m)), strict=True):
                    if len(found) == n_best:
                        break
                    pieces = (*beams.pieces(row, place), piece)
                    found.append(Hypothesis(pieces, total / decoding.penalty(len(pieces)), total, ended=False))
            elif first < last and len(found) == n_best and found[-1].score >= total_m[first] / decoding.penalty(limits[sentence]):
                goes_on_m[first:last] = False
        if not goes_on_m.any():
            break
        beams.keep(row_m[goes_on_m], piece_m[goes_on_m], total_m[goes_on_m], place)
    return finished


def _continuations(
    beams: _Beams, log_probabilities_nv: LogProbabilities, beam: int
) -> tuple[Indices, Indices, NDArray[np.float64], list[int]]:
    """Return the `beam` most probable continuations of each sentence: (row, piece, log-probability of the whole), [m], in the rows' order.

    They are sorted by sentence and then from the most probable to the least; impossible ones are left out, and all of the sentences
    that come last, of which a row is not finite. Overwrites its input.
    """
    log_probabilities_nv[:, [PADDING, BEGIN]] = -np.inf
    count, vocabulary = log_probabilities_nv.shape
    every_row_n = np.arange(count)
    most = min(beam, vocabulary)
    piece_nk, value_nk = np.empty((count, most), np.int64), np.empty((count, most))
    for rank in range(most):  # argmax takes the first of equals; a few of them are faster than any sort of so many columns
        piece_nk[:, rank] = log_probabilities_nv.argmax(axis=1)
        value_nk[:, rank] = log_probabilities_nv[every_row_n, piece_nk[:, rank]]
        log_probabilities_nv[every_row_n, piece_nk[:, rank]] = -np.inf
    broken: list[int] = np.unique(beams.sentence_n[~np.isfinite(value_nk[:, 0])]).tolist()  # argmax takes NaN for the largest
    if broken:
        value_nk[np.isin(beams.sentence_n, broken)] = -np.inf
    total_m = (beams.total_n[:, None] + value_nk).ravel()
    row_m = np.repeat(every_row_n, most)
    sentence_m = beams.sentence_n[row_m]
    order_m = np.lexsort((np.arange(len(total_m)), -total_m, sentence_m))
    ordered_m = sentence_m[order_m]
    rank_m = np.arange(len(order_m)) - np.searchsorted(ordered_m, ordered_m)
    chosen_m = order_m[(rank_m < beam) & (total_m[order_m] > -np.inf)]
    return row_m[chosen_m], piece_nk.ravel()[chosen_m], total_m[chosen_m], broken


def _insert(found: list[Hypothesis], hypothesis: Hypothesis, most: int) -> None:
    """Put a hypothesis where its score belongs among the best that were found, behind those that are as good; keep `most` of them."""
    found.append(hypothesis)
    found.sort(key=lambda one: -one.score)
    del found[most:]
