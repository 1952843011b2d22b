"""Orders to translate the first sentences of a split, and sums over the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..backends.base import EvalResult
from ..core.errors import UsageError
from ..core.job import Job
from ..data.base import Split
from ..models.decoding import GREEDY, Decoding, TranslationQuality
from ..models.objectives import Objective
from .protocol import task_messages
from .protocol.messages import ImpossibleAnswerError
from .protocol.task_messages import Command, Decode, Evaluate


@dataclass(frozen=True, slots=True)
class Decoded:
    """First sentences of a split, and their decoding settings."""

    sentences: int
    decoding: Decoding

    def signature(self, quality: TranslationQuality) -> str:
        """Return the signature shared by comparable scores."""
        return quality.signature(self.decoding, self.sentences)


def while_training(job: Job, size: int) -> Decoded:
    """Return the sentences that evaluations during training decode."""
    return Decoded(min(size, job.eval_sentences), GREEDY)


def at_the_end(job: Job, size: int) -> Decoded:
    """Return the sentences that the final evaluation decodes."""
    return Decoded(size, Decoding(job.beam, job.length_penalty))


def described(job: Job, objective: Objective, size: int) -> dict[str, str] | None:
    """Return evaluations' signatures for ``job.json``, or None.

    Raises MissingPackageError (sacrebleu), UsageError (tokenizer).
    """
    quality = objective.translation
    if quality is None:
        return None
    return {"training": while_training(job, size).signature(quality), "end": at_the_end(job, size).signature(quality)}


def refuse_idle(job: Job, objective: Objective) -> None:
    """Raise UsageError for decoding settings of a model that does not translate."""
    if objective.translation is not None:
        return
    for name in ("eval_sentences", "beam", "length_penalty"):
        if getattr(job, name) != Job.model_fields[name].default:
            raise UsageError(f"{name}: does nothing here, as evaluations of model {job.model!r} with data {job.data!r} translate nothing.")


ROWS_OF_A_TASK = 256  # hypotheses of a leading task per order: a second to many minutes, with heartbeats


class TranslationOrders:
    """Orders of one evaluation; incomplete answers are heartbeats.

    `without_numbers` counts sentences with non-finite logits.
    """

    def __init__(self, quality: TranslationQuality, split: Split, decoded: Decoded, leaders: int) -> None:
        self._quality = quality
        self.split, self.decoding, self.sentences = split, decoded.decoding, decoded.sentences
        self._at_once = leaders * max(1, ROWS_OF_A_TASK // decoded.decoding.beam)
        self._pending = {start: set(range(leaders)) for start in range(0, decoded.sentences, self._at_once)}
        self._counted = dict.fromkeys(self._pending, 0.0)
        self.sums = dict.fromkeys(quality.sums, 0.0)
        self._seconds = [0.0] * leaders
        self.without_numbers = 0
        self.signature = decoded.signature(quality)

    @property
    def messages(self) -> list[Decode]:
        """The messages to every leading task, in order."""
        return [Decode(self.split, start, self._stop(start), self.decoding) for start in self._pending]

    def _stop(self, start: int) -> int:
        return min(start + self._at_once, self.sentences)

    def add(self, leader: int, message: task_messages.Decoded) -> None:
        """Add a leading task's answer. Raises ImpossibleAnswerError."""
        start, sums, sentences = message.start, message.sums, self._quality.count(message.sums)
        if leader not in self._pending.get(start, ()):
            raise ImpossibleAnswerError(f"translations of the sentences from {start} on, which nobody asked for")
        if not message.complete:
            return
        if (wrong := self._quality.wrong_with(sums, sentences)) is not None:
            raise ImpossibleAnswerError(f"translations with {wrong}")
        if message.without_numbers > sentences:
            raise ImpossibleAnswerError(f"translations of {sentences:g} sentences, {message.without_numbers} of them without numbers")
        self._pending[start].discard(leader)
        self._counted[start] += sentences
        size = self._stop(start) - start
        if self._counted[start] > size or (not self._pending[start] and self._counted[start] != size):
            raise ImpossibleAnswerError(f"translations of {self._counted[start]:g} sentences, where {size} were asked for")
        self.sums = {name: value + sums[name] for name, value in self.sums.items()}
        self.without_numbers += message.without_numbers
        self._seconds[leader] += message.seconds

    @property
    def complete(self) -> bool:
        """Whether every leading task has answered every order."""
        return not any(self._pending.values())

    @property
    def done(self) -> int:
        """Number of translated sentences."""
        return int(sum(self._counted.values()))

    @property
    def seconds(self) -> float:
        """Time of the slowest leading task."""
        return max(self._seconds)


@dataclass(frozen=True, slots=True)
class WholeEvaluation:
    """Evaluation after `step` updates.

    `without_numbers`: empty translations, from non-finite logits.
    """

    result: EvalResult
    step: int
    without_numbers: int = 0


@dataclass(frozen=True, slots=True)
class AllTranslated:
    """Translations at the end of a run; `without_numbers` as in `WholeEvaluation`."""

    sentences: int
    signature: str
    seconds: float
    figures: Mapping[str, float]
    without_numbers: int


class EvaluationInProgress:
    """Parts of the pending evaluation. Raises ImpossibleAnswerError for any other part."""

    def __init__(self, job: Job, objective: Objective, sizes: Mapping[Split, int], leaders: int) -> None:
        self._job, self._objective, self._sizes, self._leaders = job, objective, sizes, leaders
        self._orders: TranslationOrders | None = None
        self._evaluated: tuple[EvalResult, int] | None = None

    @property
    def translating(self) -> bool:
        """Whether translations are pending."""
        return self._orders is not None

    @property
    def progress_text(self) -> str | None:
        """Progress of the pending translations as text; None without any."""
        orders = self._orders
        if orders is None:
            return None
        every = "all " if orders.sentences == self._sizes[orders.split] else ""
        beam = orders.decoding.beam
        search = "greedy" if beam == 1 else f"beam {beam}"
        return f"translating {every}{orders.sentences:,} {orders.split} sentences ({search}): {orders.done:,} done"

    def begin(self, split: Split) -> list[Command]:
        """Return the commands of an evaluation during training."""
        return [Evaluate(split), *self._order(split, while_training(self._job, self._sizes[split]))]

    def begin_last(self, split: Split) -> list[Decode]:
        """Return the commands that translate the whole split at the end; none without translations."""
        return self._order(split, at_the_end(self._job, self._sizes[split]))

    def _order(self, split: Split, decoded: Decoded) -> list[Decode]:
        if self._objective.translation is None:
            return []
        self._orders = TranslationOrders(self._objective.translation, split, decoded, self._leaders)
        return self._orders.messages

    def on_evaluated(self, result: EvalResult, step: int) -> WholeEvaluation | None:
        """Add the sums of forward passes after `step` updates; return the evaluation if complete."""
        if (wrong := self._objective.wrong_with(result.sums)) is not None:
            raise ImpossibleAnswerError(f"an evaluation with {wrong}")
        if self._orders is None:
            return WholeEvaluation(result, step)
        self._evaluated = result, step
        return None

    def on_decoded(self, leader: int, message: task_messages.Decoded) -> WholeEvaluation | AllTranslated | None:
        """Add a leading task's translations.

        Return the evaluation or the final translations if complete.
        """
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
