"""How good the translations of a dataset are: which columns are translated, and the sums that its sentences add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.errors import RunFailedError, TrainerError
from ...metrics import Metric, language
from .settings import Decoding

__all__ = ["TranslationQuality", "checked_sums"]

_COUNTS = frozenset(language.SUMS)
"""Sums that are whole numbers; of a model's own ones that is not known."""


@dataclass(frozen=True, slots=True)
class TranslationQuality:
    """Of an objective whose evaluations translate: `source` is the column that is decoded, `target` the one that it is compared with.

    `tokenizer` is BLEU's. Its metrics are functions of `metrics.language.SUMS`, which stand beside the objective's own sums. A subclass may
    have others: then it overrides `sums`, of which `metrics.language.SENTENCES` has to stay one, `metrics` and `sentence_sums`, and
    `signature` where BLEU is none of them.
    """

    source: str
    target: str
    tokenizer: str

    @property
    def sums(self) -> tuple[str, ...]:
        """What each sentence adds to."""
        return language.SUMS

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """BLEU, chrF and the share of exact matches."""
        return language.metrics(self.tokenizer)

    def sentence_sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> Mapping[str, float]:
        """Return by name what some translations, none or more, add to `sums` together; `references` is what each of them should be.

        It has to be a sum over the sentences, as they are scored in parts, by several processes.
        """
        found = language.sentence_sums(hypotheses, references, self.tokenizer)
        return dict(zip(language.SUMS, found.tolist(), strict=True))

    def signature(self, decoding: Decoding, sentences: int) -> str:
        """Return what two scores have to have in common to be comparable: sacrebleu's signature, the decoding, and how many sentences.

        Raises MissingPackageError where sacrebleu is not installed.
        """
        return f"{language.signature(self.tokenizer)}|{decoding.signature}|sentences:{sentences}"

    def count(self, sums: Mapping[str, float]) -> float:
        """Return how many sentences are in some sums; 0 where they do not say."""
        return sums.get(language.SENTENCES, 0.0)

    def wrong_with(self, sums: Mapping[str, float], sentences: float) -> str | None:
        """Return why these cannot be the sums of so many sentences, or None."""
        if missing := [name for name in self.sums if name not in sums]:
            there = ", ".join(sorted(sums)) or "of no name"
            return f"no {' and no '.join(missing)}: sums {there}, instead of {', '.join(sorted(self.sums))}"
        if more := sorted(set(sums) - set(self.sums)):
            return f"the sums {', '.join(more)} in addition to {', '.join(sorted(self.sums))}"
        for name, value in sums.items():
            if not (0 <= value <= 2**53 and float(value).is_integer() if name in _COUNTS else math.isfinite(value)):
                return f"{value:g} {name}"
        if sums[language.SENTENCES] != sentences:
            return f"{sums[language.SENTENCES]:g} sentences, where {sentences} were to be translated"
        for matching, among in language.PARTS:
            if matching in sums and among in sums and sums[matching] > sums[among]:
                return f"{sums[matching]:g} {matching} of {sums[among]:g} {among}"
        return None


def checked_sums(quality: TranslationQuality, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return what some translations add to a quality's sums. Raises RunFailedError where its `sentence_sums` fails or returns others."""
    what = f"the model's {type(quality).__name__}.sentence_sums"
    try:
        found = {name: float(value) for name, value in quality.sentence_sums(hypotheses, references).items()}
    except TrainerError:
        raise
    except Exception as error:
        raise RunFailedError(f"{what} fails: {type(error).__name__}: {error}") from error
    if (wrong := quality.wrong_with(found, len(hypotheses))) is not None:
        raise RunFailedError(f"{what} returned {wrong}")
    return found
