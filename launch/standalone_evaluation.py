"""Evaluation and translation of a trained state on this machine, without a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..backends.base import EvalResult, State
from ..core.job import Job
from ..data.base import Split
from ..data.store.stored_dataset import StoredDataset
from ..engine.protocol.messages import ImpossibleAnswerError
from ..engine.protocol.task_messages import Evaluate, Predict, Translate
from ..engine.translation import TranslationOrders, at_the_end
from ..metrics import LOSS
from ..models.base import Array, ModelSpec
from ..models.decoding import Decoding, Hypothesis
from .standalone_task import StandaloneTask

PREDICTION_BLOCK = 1024  # maximum number of examples per message of logits; interrupts are noticed between messages
PREDICTION_BYTES = 16 * 2**20  # maximum bytes of logits per message


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Sums, metrics by name, the precision used, and logits float32 [n, classes] if requested.

    Translation scores are comparable for equal `signature`. `without_numbers` counts non-finite outputs.
    """

    result: EvalResult
    figures: Mapping[str, float]
    precision_used: str
    logits: Array | None
    signature: str | None = None
    without_numbers: int = 0


class Evaluator:
    """Evaluates a state in one task (`StandaloneTask`)."""

    def __init__(self, job: Job, model: ModelSpec, data: StoredDataset, warn: Callable[[str], None]) -> None:
        self._job, self._model, self._data = job, model, data
        self._task = StandaloneTask(job, model, warn, normalisation=data.info.normalisation)

    def evaluate(self, state: State, split: Split, *, logits: bool) -> Evaluated:
        """Evaluate on a split, and end every process. Raises as `StandaloneTask`."""
        with self._task as task:
            task.start(state)
            result = task.ask(Evaluate(split)).result()
            signature, without_numbers = None, 0
            if self._model.objective.translation is not None:
                decoded = at_the_end(self._job, self._data.info.sizes[split])
                orders = TranslationOrders(self._model.objective.translation, split, decoded, leaders=1)
                self._translate(orders)
                signature, without_numbers = orders.signature, orders.without_numbers
                result = replace(result, sums={**result.sums, **orders.sums}, seconds=result.seconds + orders.seconds)
            figures = self._model.objective.figures(result.sums)
            predicted = self._predict(split) if logits else None
            if self._model.classes and not math.isfinite(figures[LOSS.name]):
                blocks = self._blocks(split) if predicted is None else [(0, predicted)]
                without_numbers = sum(int((~np.isfinite(logits_bk).all(1)).sum()) for _, logits_bk in blocks)
            return Evaluated(result, figures, task.precision_used, predicted, signature, without_numbers)

    def _translate(self, orders: TranslationOrders) -> None:
        for message in orders.messages:
            try:
                orders.add(0, self._task.ask(message))
            except ImpossibleAnswerError as error:
                self._task.refuse(str(error))

    def _predict(self, split: Split) -> Array:
        logits_nk: Array = np.empty((self._data.info.sizes[split], self._model.classes), np.float32)
        for start, logits_bk in self._blocks(split):
            logits_nk[start : start + len(logits_bk)] = logits_bk
        return logits_nk

    def _blocks(self, split: Split) -> Iterator[tuple[int, Array]]:
        """Yield the first index and the logits [b, classes] of each block of a split."""
        size = self._data.info.sizes[split]
        block = max(1, min(PREDICTION_BLOCK, PREDICTION_BYTES // (np.dtype(np.float32).itemsize * self._model.classes)))
        for start in range(0, size, block):
            stop = min(start + block, size)
            logits_bk = self._task.ask(Predict(split, start, stop)).array("logits")
            if logits_bk.shape != (stop - start, self._model.classes):
                self._task.refuse(f"logits of shape {logits_bk.shape} for {stop - start} examples of {self._model.classes} classes")
            yield start, logits_bk


MAX_ANSWER_BYTES = 8 << 20  # maximum bytes of the numbers in one answer, a quarter of a message's limit
_NUMBER_BYTES = 8
_FIGURES = 4  # numbers of a hypothesis without its pieces: their count, score, log-probability, and whether it ended


def translated(task: StandaloneTask, sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> list[list[Hypothesis]]:
    """Return the best hypotheses of each sentence, which ends with END."""
    hypotheses: list[list[Hypothesis]] = []
    for part in _parts(sources, decoding, n_best):
        message = task.ask(Translate.from_sentences(part, decoding, n_best))
        try:
            hypotheses += message.hypotheses(len(part))
        except ValueError as error:
            task.refuse(str(error))
    return hypotheses


def _parts(sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> Iterator[Sequence[Sequence[int]]]:
    """Yield groups of sentences whose longest possible translations fit into one answer."""
    begin = taken_bytes = 0
    for number, source in enumerate(sources):
        needed_bytes = _NUMBER_BYTES * (1 + n_best * (len(source) + decoding.extra_length + _FIGURES))
        if number > begin and taken_bytes + needed_bytes > MAX_ANSWER_BYTES:
            yield sources[begin:number]
            begin, taken_bytes = number, 0
        taken_bytes += needed_bytes
    yield sources[begin:]
