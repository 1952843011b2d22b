"""Metrics of translations: BLEU and chrF from sums over sentences, by sacrebleu's own functions, and the share of exact matches.

What a sentence adds is whole numbers (n-grams that match, n-grams that there are, lengths), so that the sums, and with them the score, are
the same however the sentences were shared out; a corpus's score is no mean of its sentences' scores.

sacrebleu is imported where it is first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import MissingPackageError, UsageError
from .base import Metric

__all__ = [
    "NAMES",
    "PARTS",
    "SENTENCES",
    "SUMS",
    "TOKENIZERS",
    "TOKENIZERS_OF_PACKAGES",
    "check_tokenizer",
    "metrics",
    "sentence_sums",
    "signature",
]

SENTENCES = "translated_sentences"
"""The sum that tells whether each sentence was counted exactly once."""

EXACT = "exact_matches"

BLEU_SUMS = (
    "bleu_hypothesis_length",
    "bleu_reference_length",
    *(f"bleu_matching_{order}grams" for order in range(1, 5)),
    *(f"bleu_hypothesis_{order}grams" for order in range(1, 5)),
)
CHRF_SUMS = tuple(f"chrf_{what}_{order}grams" for order in range(1, 7) for what in ("hypothesis", "reference", "matching"))
"""Both in the order in which sacrebleu keeps the statistics of a sentence."""

PARTS = (
    (EXACT, SENTENCES),
    *((f"bleu_matching_{order}grams", f"bleu_hypothesis_{order}grams") for order in range(1, 5)),
    *((f"chrf_matching_{order}grams", f"chrf_{what}_{order}grams") for order in range(1, 7) for what in ("hypothesis", "reference")),
)
"""Sums of which the first counts some of what the second counts."""

SUMS = (SENTENCES, EXACT, *BLEU_SUMS, *CHRF_SUMS)
"""What a sentence adds, in the order of `sentence_sums`."""

NAMES = ("bleu", "chrf", "exact")
"""Of `metrics`, in their order."""

TOKENIZERS = ("13a", "intl", "char", "zh", "none")
"""sacrebleu's tokenizers that need nothing beside it."""

TOKENIZERS_OF_PACKAGES = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}
"""Those that need a dictionary, and what installs it."""

_DOWNLOADING = ("flores", "spm")


def check_tokenizer(name: str) -> None:
    """Raise UsageError for a tokenizer of BLEU that is none, or that sacrebleu would download a model for."""
    known = (*TOKENIZERS, *TOKENIZERS_OF_PACKAGES)
    if name.startswith(_DOWNLOADING):
        raise UsageError(
            f"BLEU tokenizer: {name!r} has a model that sacrebleu downloads, and a run downloads nothing. Use one of {', '.join(known)}."
        )
    if name not in known:
        raise UsageError.of("BLEU tokenizer", name, ", ".join(known), known)


@functools.cache
def _scorers(tokenizer: str) -> tuple[Any, Any]:
    """Return sacrebleu's BLEU and chrF. Raises MissingPackageError where it, or what the tokenizer needs, is not installed."""
    check_tokenizer(tokenizer)
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sacrebleu":
            raise
        raise MissingPackageError(
            "metrics: BLEU needs the package 'sacrebleu', which is not installed. Install it with: pip install 'crosstrain[text]'"
        ) from error
    try:
        return BLEU(tokenize=tokenizer, force=True), CHRF()  # force: no warnings about text that looks tokenized
    except (ImportError, RuntimeError) as error:
        if tokenizer not in TOKENIZERS_OF_PACKAGES:
            raise
        raise MissingPackageError(
            f"metrics: BLEU's tokenizer {tokenizer!r} needs packages that are not installed. "
            f"Install them with: pip install '{TOKENIZERS_OF_PACKAGES[tokenizer]}'"
        ) from error


def sentence_sums(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str) -> NDArray[np.float64]:
    """Return what some translations add to `SUMS`, together. Raises ValueError where there are not as many references as hypotheses."""
    bleu, chrf = _scorers(tokenizer)
    found = np.zeros(len(SUMS), np.int64)
    pairs = list(zip(hypotheses, references, strict=True))
    if pairs:
        exact = sum(hypothesis == reference for hypothesis, reference in pairs)
        parts = [np.array(scorer._extract_corpus_statistics(hypotheses, [references])).sum(axis=0) for scorer in (bleu, chrf)]
        found[:] = np.concatenate([[len(pairs), exact], *parts])
    return found.astype(np.float64)


def _score(names: Sequence[str], which: int, tokenizer: str, sums: Mapping[str, float]) -> float:
    """Return a corpus's score from the sums, 0 to 100; a perfect one comes out of sacrebleu with a rounding error above 100."""
    score = _scorers(tokenizer)[which]._compute_score_from_stats([int(sums[name]) for name in names]).score
    return min(100.0, float(score))


def metrics(tokenizer: str) -> tuple[Metric, ...]:
    """Return BLEU, which is the headline, chrF and the share of exact matches. Raises UsageError for a tokenizer that is none."""
    check_tokenizer(tokenizer)
    bleu, chrf, exact = NAMES
    return (
        Metric(bleu, "BLEU", "higher", functools.partial(_score, BLEU_SUMS, 0, tokenizer), bounds=(0.0, 100.0)),
        Metric(chrf, "chrF", "higher", functools.partial(_score, CHRF_SUMS, 1, tokenizer), bounds=(0.0, 100.0)),
        Metric(exact, "exact matches", "higher", lambda sums: sums[EXACT] / sums[SENTENCES], bounds=(0.0, 1.0)),
    )


def signature(tokenizer: str) -> str:
    """Return what sacrebleu says of how BLEU is computed, such as ``nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0``."""
    bleu, _ = _scorers(tokenizer)
    bleu.corpus_score(["a"], [["a"]])  # the number of references is known only then
    return str(bleu.get_signature())
