"""How the evaluations of a job decode: greedily and of some sentences while it trains, with its beam and of all of them at the end."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import UsageError
from ...core.job import Job
from ...models.decoding.quality import TranslationQuality
from ...models.decoding.settings import GREEDY, Decoding
from ...models.objectives import Objective

__all__ = ["Decoded", "at_the_end", "described", "refuse_idle", "while_training"]


@dataclass(frozen=True, slots=True)
class Decoded:
    """So many sentences, the first of a split, by one decoding."""

    sentences: int
    decoding: Decoding

    def signature(self, quality: TranslationQuality) -> str:
        """Return what scores of this have to have in common with others to be comparable."""
        return quality.signature(self.decoding, self.sentences)


def while_training(job: Job, size: int) -> Decoded:
    """Return what an evaluation of a split of `size` sentences decodes while a job trains."""
    return Decoded(min(size, job.eval_sentences), GREEDY)


def at_the_end(job: Job, size: int) -> Decoded:
    """Return what is decoded of a split of `size` sentences when the training is over."""
    return Decoded(size, Decoding(job.beam, job.length_penalty))


def described(job: Job, objective: Objective, size: int) -> dict[str, str] | None:
    """Return the signatures of a job's evaluations as ``job.json`` has them, None where nothing is translated.

    Raises MissingPackageError where sacrebleu is not installed, and UsageError for a tokenizer that is none.
    """
    quality = objective.translation
    if quality is None:
        return None
    return {"training": while_training(job, size).signature(quality), "end": at_the_end(job, size).signature(quality)}


def refuse_idle(job: Job, objective: Objective) -> None:
    """Raise UsageError for a setting of decoding that does nothing, as the job's model translates nothing."""
    if objective.translation is not None:
        return
    for name in ("eval_sentences", "beam", "length_penalty"):
        if getattr(job, name) != Job.model_fields[name].default:
            raise UsageError(f"{name}: does nothing here, as evaluations of model {job.model!r} with data {job.data!r} translate nothing.")
