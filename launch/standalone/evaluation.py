"""Evaluates a trained state on this machine, without a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...backends.base import EvalResult, State
from ...core.job import Job
from ...data.base import Split
from ...data.store.stored_dataset import StoredDataset
from ...engine.protocol.codec import eval_from_message
from ...engine.protocol.impossible_answers import ImpossibleAnswerError
from ...engine.protocol.messages import Message
from ...engine.translation.decodings import at_the_end
from ...engine.translation.orders import TranslationOrders
from ...metrics import LOSS
from ...models.base import Array, ModelSpec
from .task import StandaloneTask

__all__ = ["Evaluated", "Evaluator"]

PREDICTION_BLOCK = 1024
"""Examples whose logits travel in one message: few bytes, and an interrupt is noticed between two of them."""

PREDICTION_BYTES = 16 * 2**20
"""Of the logits of one message: fewer examples where there are very many classes."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came out.

    The sums, the figures that they make by name, the precision that was really used, and logits float32 [n, classes] where they were
    asked for. `signature` is what figures of translations are comparable with, None of a model that translates nothing;
    `without_numbers` of how many examples or sentences the model's output was not finite.
    """

    result: EvalResult
    figures: Mapping[str, float]
    precision_used: str
    logits: Array | None
    signature: str | None = None
    without_numbers: int = 0


class Evaluator:
    """Evaluates a state by the one task of a job (`StandaloneTask`); every sentence is translated as the job says."""

    def __init__(self, job: Job, model: ModelSpec, data: StoredDataset, warn: Callable[[str], None]) -> None:
        self._job, self._model, self._data = job, model, data
        self._task = StandaloneTask(job, model, warn, normalisation=data.info.normalisation)

    def evaluate(self, state: State, split: Split, *, logits: bool) -> Evaluated:
        """Evaluate on every example of a split. Every process is ended when this returns or raises, whatever happened.

        Raises RunFailedError where the task dies, InterruptedRunError after SIGINT, SIGTERM, SIGHUP (unless ignored), SIGUSR1 or SIGUSR2.
        """
        with self._task as task:
            task.start(state)
            result = eval_from_message(task.ask(Message("evaluate", {"split": split})))
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
        """Yield the logits of a split's examples block by block, and where each begins."""
        size = self._data.info.sizes[split]
        block = max(1, min(PREDICTION_BLOCK, PREDICTION_BYTES // (np.dtype(np.float32).itemsize * self._model.classes)))
        for start in range(0, size, block):
            stop = min(start + block, size)
            logits_bk = self._task.ask(Message("predict", {"split": split, "start": start, "stop": stop})).array("logits")
            if logits_bk.shape != (stop - start, self._model.classes):
                self._task.refuse(f"logits of shape {logits_bk.shape} for {stop - start} examples of {self._model.classes} classes")
            yield start, logits_bk
