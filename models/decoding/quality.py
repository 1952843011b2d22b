"""How good the translations of a dataset are: which columns are translated, and the sums that its sentences add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...metrics import Metric, language
from .settings import Decoding

__all__ = ["TranslationQuality"]


@dataclass(frozen=True, slots=True)
class TranslationQuality:
    """Of an objective whose evaluations translate: `source` is the column that is decoded, `target` the one that it is compared with.

    `tokenizer` is BLEU's. Its metrics are functions of `metrics.language.SUMS`, which stand beside the objective's own sums.
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
        if set(sums) != set(self.sums):
            return f"sums {', '.join(sorted(sums))}, instead of {', '.join(sorted(self.sums))}"
        for name, value in sums.items():
            if not (0 <= value <= 2**53 and float(value).is_integer()):
                return f"{value:g} {name}"
        if sums[language.SENTENCES] != sentences:
            return f"{sums[language.SENTENCES]:g} sentences, where {sentences} were to be translated"
        for matching, among in language.PARTS:
            if sums[matching] > sums[among]:
                return f"{sums[matching]:g} {matching} of {sums[among]:g} {among}"
        return None
