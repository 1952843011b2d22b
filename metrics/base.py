"""Metrics: functions of sums over the examples of a split.

A metric is computed once, from the total float64 sums alone, so it does not depend on how workers share the examples, unlike a mean of the
workers' means.
"""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..core.errors import MissingPackageError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Improvements:
    """Count of evaluations since a metric's best value.

    `best` and `best_step` are None before the first.
    """

    def __init__(self, info: MetricInfo, earlier: Iterable[tuple[int, float]] = ()) -> None:
        """`earlier`: (updates, value) of each previous evaluation."""
        self.info = info
        self.best: float | None = None
        self.best_step: int | None = None
        self.since = 0
        for step, value in earlier:
            self.add(step, value)

    def add(self, step: int, value: float) -> None:
        """Count an evaluation after `step` updates; an equal value or NaN is no improvement."""
        if self.info.improves(value, self.best):
            self.best, self.best_step, self.since = value, step, 0
        else:
            self.since += 1


class BestFew:
    """Keeps the `count` best values of a metric. Of equal values the earlier is better."""

    def __init__(self, info: MetricInfo, count: int, earlier: Iterable[float] = ()) -> None:
        self._sign = -1.0 if info.better == "higher" else 1.0
        self._count = count
        self._ranked: list[float] = []  # best first
        for value in earlier:
            self.add(value)

    def add(self, value: float) -> bool:
        """Add a value; return whether it is now among the best. NaN never is."""
        ranked = self._sign * value
        if math.isnan(ranked) or bisect_right(self._ranked, ranked) >= self._count:
            return False
        insort(self._ranked, ranked)
        del self._ranked[self._count :]
        return True


# BLEU and chrF come from sums of whole numbers (n-grams, lengths), so a score does not depend on how workers share the sentences.

SENTENCES = "translated_sentences"  # shows whether each sentence was counted exactly once
EXACT = "exact_matches"
BLEU_SUMS = (
    "bleu_hypothesis_length",
    "bleu_reference_length",
    *(f"bleu_matching_{order}grams" for order in range(1, 5)),
    *(f"bleu_hypothesis_{order}grams" for order in range(1, 5)),
)
CHRF_SUMS = tuple(f"chrf_{what}_{order}grams" for order in range(1, 7) for what in ("hypothesis", "reference", "matching"))
"""Both are in the order of sacrebleu's statistics."""

PARTS = (
    (EXACT, SENTENCES),
    *((f"bleu_matching_{order}grams", f"bleu_hypothesis_{order}grams") for order in range(1, 5)),
    *((f"chrf_matching_{order}grams", f"chrf_{what}_{order}grams") for order in range(1, 7) for what in ("hypothesis", "reference")),
)
"""The first counts a part of the second."""

SUMS = (SENTENCES, EXACT, *BLEU_SUMS, *CHRF_SUMS)  # in the order of `sentence_sums`
NAMES = ("bleu", "chrf", "exact")  # in the order of `metrics`
TOKENIZERS = ("13a", "intl", "char", "zh", "none")  # those of sacrebleu without dependencies
TOKENIZERS_OF_PACKAGES = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}  # need a dictionary
_DOWNLOADING = ("flores", "spm")


def check_tokenizer(name: str) -> None:
    """Raise UsageError for an unknown BLEU tokenizer, or for one that would download a model."""
    known = (*TOKENIZERS, *TOKENIZERS_OF_PACKAGES)
    if name.startswith(_DOWNLOADING):
        raise UsageError(
            f"BLEU tokenizer: {name!r} has a model that sacrebleu downloads, and a run downloads nothing. Use one of {', '.join(known)}."
        )
    if name not in known:
        raise UsageError.of("BLEU tokenizer", name, ", ".join(known), known)


@functools.cache
def _scorers(tokenizer: str) -> tuple[Any, Any]:
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
    """Return the translations' contribution to `SUMS`.

    Raises ValueError for different numbers of sentences.
    """
    bleu, chrf = _scorers(tokenizer)
    import numpy as np  # agents, which load this file, do without

    sums = np.zeros(len(SUMS), np.int64)
    pairs = list(zip(hypotheses, references, strict=True))
    if pairs:
        exact = sum(hypothesis == reference for hypothesis, reference in pairs)
        parts = [np.array(scorer._extract_corpus_statistics(hypotheses, [references])).sum(axis=0) for scorer in (bleu, chrf)]
        sums[:] = np.concatenate([[len(pairs), exact], *parts])
    return sums.astype(np.float64)


def _score(names: Sequence[str], which: int, tokenizer: str, sums: Mapping[str, float]) -> float:
    """Return a corpus score from 0 to 100; sacrebleu's rounding can exceed 100."""
    score = _scorers(tokenizer)[which]._compute_score_from_stats([int(sums[name]) for name in names]).score
    return min(100.0, float(score))


def metrics(tokenizer: str) -> tuple[Metric, ...]:
    """Return BLEU (the headline), chrF and exact matches.

    Raises UsageError for an unknown tokenizer.
    """
    check_tokenizer(tokenizer)
    bleu, chrf, exact = NAMES
    return (
        Metric(bleu, "BLEU", "higher", functools.partial(_score, BLEU_SUMS, 0, tokenizer), bounds=(0.0, 100.0)),
        Metric(chrf, "chrF", "higher", functools.partial(_score, CHRF_SUMS, 1, tokenizer), bounds=(0.0, 100.0)),
        Metric(exact, "exact matches", "higher", lambda sums: sums[EXACT] / sums[SENTENCES], bounds=(0.0, 1.0)),
    )


def signature(tokenizer: str) -> str:
    """Return sacrebleu's signature of BLEU, such as ``nrefs:1|case:mixed|…|version:2.6.0``."""
    bleu, _ = _scorers(tokenizer)
    bleu.corpus_score(["a"], [["a"]])  # sets the number of references
    return str(bleu.get_signature())


Better = Literal["higher", "lower"]
MAX_SUMS, MAX_METRICS = 1000, 64  # per model
PERCENTAGES = frozenset(("bleu", "chrf"))  # metrics from 0 to 100, shown with two decimals
SHARES_OF_EXAMPLES = frozenset(("accuracy",))  # a value p has the standard error √(p (1 − p) / n)
RESERVED_NAMES = frozenset(
    ("split", "step", "epoch", "time_seconds", "seconds", "examples", "loss", "updates_applied", "schema", "metrics")
)  # fields of an evaluation's record


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """A metric's `name` in files and options, its `label` for people, and its direction."""

    name: str
    label: str
    better: Better

    def improves(self, new: float, old: float | None) -> bool:
        """Return whether `new` is better than `old`.

        NaN is never better; any number beats NaN or None.
        """
        if math.isnan(new):
            return False
        if old is None or math.isnan(old):
            return True
        return new > old if self.better == "higher" else new < old

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best value, or None if there is none but NaN."""
        best: float | None = None
        for value in values:
            if self.improves(value, best):
                best = value
        return best


@dataclass(frozen=True, slots=True)
class Metric(MetricInfo):
    """A metric computed by `value` from named sums, within `bounds`.

    Raises ValueError for invalid names or bounds.
    """

    value: Callable[[Mapping[str, float]], float]
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name) or self.name in RESERVED_NAMES:
            reserved = ", ".join(sorted(RESERVED_NAMES))
            raise ValueError(f"metric name: got {self.name!r}; allowed: a snake_case word of at most 64 characters, none of {reserved}")
        if self.better not in get_args(Better):
            raise ValueError(f"metric {self.name!r}: better is {self.better!r}; allowed: {', '.join(get_args(Better))}")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(
                f"metric {self.name!r}: its bounds are {self.bounds[0]:g} and {self.bounds[1]:g}; the first has to be the smaller"
            )

    @property
    def info(self) -> MetricInfo:
        """The part that files record."""
        return MetricInfo(self.name, self.label, self.better)


def _accuracy(sums: Mapping[str, float]) -> float:
    return sums["correct"] / sums["examples"] if math.isfinite(sums["loss_sum"]) else math.nan


ACCURACY = Metric("accuracy", "accuracy", "higher", _accuracy, bounds=(0.0, 1.0))  # NaN if a logit is not finite
LOSS = MetricInfo("loss", "loss", "lower")  # every model has it in addition to its metrics


def described_metrics(infos: Sequence[MetricInfo]) -> list[dict[str, str]]:
    """Return metrics as ``job.json`` lists them, the headline first, without the loss."""
    return [{"name": info.name, "label": info.label, "better": info.better} for info in infos if info != LOSS]


def read_metrics(job: Mapping[str, Any]) -> tuple[MetricInfo, ...]:
    """Return a run's metrics, the headline first and the loss last.

    Older runs have only the accuracy.
    """
    listed = job.get("metrics")
    if listed is None:
        return ACCURACY.info, LOSS
    return (*(MetricInfo(metric["name"], metric["label"], metric["better"]) for metric in listed), LOSS)


def read_translation_metrics(job: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a run's translation metrics.

    ``job.json`` of older runs does not list them.
    """
    listed = job.get("translation_metrics")
    if listed is None and job.get("translation_signatures"):
        listed = NAMES
    return frozenset(listed or ()) & {info.name for info in read_metrics(job)}
