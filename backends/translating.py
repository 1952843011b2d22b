"""Translates with the parameters of a session: this task's share of a dataset's sentences, scored, or sentences that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import split_evenly
from ..data.base import Dataset, Split
from ..data.text import END
from ..models.decoding.batches import decode
from ..models.decoding.search import Hypothesis, Stepper
from ..models.decoding.settings import GREEDY, Decoding
from ..models.decoding.translation import Scored, TranslationScorer
from ..models.objectives import Objective

__all__ = ["Translating"]

FIRST_TEXT_PIECE = 4


class Translating:
    """What a leading task decodes with. `task` of `tasks` leading tasks takes its share of the sentences of a dataset.

    Raises RuntimeError where the objective is of no model that translates.
    """

    def __init__(self, data: Dataset, objective: Objective, stepper: Stepper, task: int, tasks: int) -> None:
        if objective.translation is None:
            raise RuntimeError(f"the objective {objective.name!r} translates nothing")
        self._stepper = stepper
        self._scorer = TranslationScorer(data, objective.translation)
        self._task, self._tasks = task, tasks

    def scored(self, split: Split, start: int, stop: int, decoding: Decoding, tell: Callable[[], None]) -> Scored:
        """Translate this task's share of the sentences start … stop − 1, and return what they add to the quality's sums.

        `tell` is called before each step of the search, however many there are.
        """
        first, last = split_evenly(stop - start, self._tasks)[self._task]
        stepper = _TellingStepper(self._stepper, tell)
        return self._scorer.scored(stepper, split, start + first, start + last, decoding)

    def translate(self, sources: Sequence[NDArray[np.integer]], decoding: Decoding, n_best: int) -> list[list[Hypothesis]]:
        """Return the best hypotheses of sentences that end with END, in their order; see `models.decoding.search`."""
        return decode(self._stepper, sources, decoding, n_best)

    def warm_up(self) -> None:
        """Run every function once: of two sentences, of which hypotheses are taken and left out."""
        source = np.array([FIRST_TEXT_PIECE, END])
        for decoding in (GREEDY, Decoding(beam=2, extra_length=2)):
            decode(self._stepper, [source, source[1:]], decoding)


class _TellingStepper:
    """Another stepper that calls `tell` before it does anything."""

    def __init__(self, stepper: Stepper, tell: Callable[[], None]) -> None:
        self._stepper, self._tell = stepper, tell

    def begin(self, sources: Sequence[NDArray[np.integer]]) -> None:
        """See `Stepper.begin`."""
        self._tell()
        self._stepper.begin(sources)

    def advance(self, tokens_n: NDArray[np.int64], rows_n: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Stepper.advance`."""
        self._tell()
        return self._stepper.advance(tokens_n, rows_n)
