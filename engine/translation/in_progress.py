"""The evaluation that is under way: its sums of forward passes, until its translations have come as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...backends.base import EvalResult
from ...core.job import Job
from ...data.base import Split
from ...models.objectives import Objective
from ..protocol.impossible_answers import ImpossibleAnswerError
from ..protocol.messages import Message
from .decodings import Decoded, at_the_end, while_training
from .orders import TranslationOrders

__all__ = ["AllTranslated", "EvaluationInProgress", "WholeEvaluation"]


@dataclass(frozen=True, slots=True)
class WholeEvaluation:
    """An evaluation of which nothing is missing, after `step` updates.

    `without_numbers` says of how many of its sentences the model's output was not finite, so that their translations are empty.
    """

    result: EvalResult
    step: int
    without_numbers: int = 0


@dataclass(frozen=True, slots=True)
class AllTranslated:
    """What came of the translations at the end of a run. `without_numbers`: as of `WholeEvaluation`."""

    sentences: int
    signature: str
    seconds: float
    figures: Mapping[str, float]
    without_numbers: int


class EvaluationInProgress:
    """Collects the parts of one evaluation at a time; without translations it has one part. Raises ImpossibleAnswerError for others."""

    def __init__(self, job: Job, objective: Objective, sizes: Mapping[Split, int], leaders: int) -> None:
        self._job, self._objective, self._sizes, self._leaders = job, objective, sizes, leaders
        self._orders: TranslationOrders | None = None
        self._evaluated: tuple[EvalResult, int] | None = None

    @property
    def translating(self) -> bool:
        """Whether translations are awaited."""
        return self._orders is not None

    @property
    def said(self) -> str | None:
        """How far the translations are that are awaited, in words; None where none are."""
        orders = self._orders
        if orders is None:
            return None
        every = "all " if orders.sentences == self._sizes[orders.split] else ""
        beam = orders.decoding.beam
        search = "greedy" if beam == 1 else f"beam {beam}"
        return f"translating {every}{orders.sentences:,} {orders.split} sentences ({search}): {orders.done:,} done"

    def begin(self, split: Split) -> list[Message]:
        """Return the commands of an evaluation while the job trains."""
        return [Message("evaluate", {"split": split}), *self._order(split, while_training(self._job, self._sizes[split]))]

    def begin_last(self, split: Split) -> list[Message]:
        """Return the commands that translate the whole split at the end; none where the objective translates nothing."""
        return self._order(split, at_the_end(self._job, self._sizes[split]))

    def _order(self, split: Split, decoded: Decoded) -> list[Message]:
        if self._objective.translation is None:
            return []
        self._orders = TranslationOrders(self._objective.translation, split, decoded, self._leaders)
        return self._orders.messages

    def on_evaluated(self, result: EvalResult, step: int) -> WholeEvaluation | None:
        """Take the sums of forward passes after so many updates; return the evaluation if that is all of it."""
        if (wrong := self._objective.wrong_with(result.sums)) is not None:
            raise ImpossibleAnswerError(f"an evaluation with {wrong}")
        if self._orders is None:
            return WholeEvaluation(result, step)
        self._evaluated = result, step
        return None

    def on_decoded(self, leader: int, message: Message) -> WholeEvaluation | AllTranslated | None:
        """Take translations of a leading task; return the evaluation, or what came of the end's translations, when nothing is missing."""
        orders = self._orders
        if orders is None:
            raise ImpossibleAnswerError("translations that nobody asked for")
        orders.add(leader, message)
        if not orders.complete:
            return None
        self._orders = None
        if self._evaluated is None:
            figures = self._objective.translation_figures(orders.sums)
            return AllTranslated(orders.sentences, orders.signature, orders.seconds, figures, orders.without_numbers)
        (result, step), self._evaluated = self._evaluated, None
        sums = {**result.sums, **orders.sums}
        if (wrong := self._objective.out_of_bounds(sums)) is not None:
            raise ImpossibleAnswerError(f"an evaluation with {wrong}")
        return WholeEvaluation(replace(result, sums=sums, seconds=result.seconds + orders.seconds), step, orders.without_numbers)
