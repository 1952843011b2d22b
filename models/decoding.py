"""Greedy and beam search for translations, many sentences together, and their scoring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.errors import RunFailedError, TrainerError, UsageError
from ..data.base import Dataset, Split
from ..data.sources.translation.pairs import SCORING_FILES, TEST_REFERENCES, reference_lines, scoring_problem
from ..data.sources.translation.tokenizer import VOCABULARY, Vocabulary
from ..data.text import BEGIN, END, PADDING
from ..metrics import Metric
from ..metrics import base as language

__path__: list[str] = []  # `core/plugins.py` finds former modules below this one

Pieces = NDArray[np.integer]
Indices = NDArray[np.int64]
LogProbabilities = NDArray[np.float32]


class Stepper(Protocol):
    """A model that predicts one piece after another: a backend's encoder and decoder."""

    def begin(self, sources: Sequence[Pieces]) -> None:
        """Replace all sentences by these, each ending with END and taking one row."""

    def advance(self, tokens_n: Indices, rows_n: Indices) -> LogProbabilities:
        """Return log-probabilities of the next pieces, float32 [n, vocabulary].

        The array may be overwritten. Row i continues the former row ``rows_n[i]`` by the piece ``tokens_n[i]`` (BEGIN the first time). n
        may differ between calls, and rows may be continued several times or not at all.
        """


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A translation without END.

    `log_probability` includes END's, `score` is that divided by the length penalty.
    """

    pieces: tuple[int, ...]
    score: float
    log_probability: float
    ended: bool


class _Continuations(NamedTuple):
    """Rows, next pieces and total log-probabilities, [m], sorted like the rows of `_Beams`."""

    row_m: Indices
    piece_m: Indices
    total_m: NDArray[np.float64]

    def where(self, chosen: NDArray[np.bool_] | slice) -> _Continuations:
        return _Continuations(self.row_m[chosen], self.piece_m[chosen], self.total_m[chosen])

    def rows(self) -> Iterator[tuple[int, int, float]]:
        return zip(self.row_m.tolist(), self.piece_m.tolist(), self.total_m.tolist(), strict=True)


class _Beams:
    """Active hypotheses of a batch, sorted by sentence and then by descending probability."""

    def __init__(self, sentences: int, longest: int) -> None:
        self.sentence_n = np.arange(sentences, dtype=np.int64)
        self.total_n = np.zeros(sentences)
        self.rows_n = np.arange(sentences, dtype=np.int64)
        self.last_n = np.full(sentences, BEGIN, np.int64)
        self.pieces_nt = np.zeros((sentences, longest), np.int32)

    def pieces(self, row: int, count: int) -> tuple[int, ...]:
        return tuple(self.pieces_nt[row, :count].tolist())

    def keep(self, continuations: _Continuations, place: int) -> None:
        self.sentence_n = self.sentence_n[continuations.row_m]
        self.rows_n, self.last_n, self.total_n = continuations
        self.pieces_nt = self.pieces_nt[continuations.row_m]
        self.pieces_nt[:, place] = continuations.piece_m


def search(stepper: Stepper, sources: Sequence[Pieces], decoding: Decoding, n_best: int = 1) -> list[list[Hypothesis]]:
    """Return the `n_best` (at most the beam) best hypotheses of each source.

    A sentence is done at its longest allowed length, or earlier by a bound that changes no result: log-probabilities only fall as pieces
    are added, and the penalty is largest at the longest length, so no hypothesis can finish above (its log-probability now) /
    penalty(longest length). Sums are float64 per sentence, and ties go to the better hypothesis, then to the lower piece number, so a
    sentence's result depends only on its log-probabilities.

    Those that ended come first, by score, then the most probable ones cut off at the longest allowed length. There are fewer if all others
    have probability 0, and none for non-finite output: NaN or +inf for any piece, or −inf for all. PADDING and BEGIN are never chosen.
    Raises ValueError for a source without pieces, and for `n_best` beyond the beam.
    """
    if not 1 <= n_best <= decoding.beam:
        raise ValueError(f"{n_best} best hypotheses of a beam of {decoding.beam}")
    if not sources:
        return []
    if min(map(len, sources)) == 0:
        raise ValueError("a source without pieces: it has to end with END")
    limits = [len(source) + decoding.extra_length for source in sources]
    state = _Search(decoding, n_best, limits, [[] for _ in sources], _Beams(len(sources), max(limits)))
    stepper.begin(sources)
    for place in range(max(limits)):
        continuations, broken = _continuations(state.beams, stepper.advance(state.beams.last_n, state.beams.rows_n), decoding.beam)
        for sentence in broken:
            state.finished[sentence].clear()
        ends_m = continuations.piece_m == END
        state.add_ended(continuations.where(ends_m), place)
        remaining = continuations.where(~ends_m)
        active_m = state.active(remaining, place)
        if not active_m.any():
            break
        state.beams.keep(remaining.where(active_m), place)
    return state.finished


@dataclass(frozen=True, slots=True)
class _Search:
    """State of a batch's search; `limits` are the sentences' longest allowed lengths."""

    decoding: Decoding
    n_best: int
    limits: list[int]
    finished: list[list[Hypothesis]]
    beams: _Beams

    def add_ended(self, ended: _Continuations, place: int) -> None:
        """Rank hypotheses ending at `place` among the finished ones, behind those of equal score."""
        for row, _, total in ended.rows():
            hypotheses = self.finished[self.beams.sentence_n[row]]
            score = total / self.decoding.penalty(place + 1)
            hypotheses.append(Hypothesis(self.beams.pieces(row, place), score, total, ended=True))
            hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
            del hypotheses[self.n_best :]

    def active(self, continuations: _Continuations, place: int) -> NDArray[np.bool_]:
        """Return which continuations stay active, bool [m]; at the longest length they are finished."""
        active_m = np.ones(len(continuations.row_m), np.bool_)
        searched_s = np.unique(self.beams.sentence_n)
        bounds_s2 = np.searchsorted(self.beams.sentence_n[continuations.row_m], np.stack((searched_s, searched_s + 1), 1))
        for sentence, (first, last) in zip(searched_s.tolist(), bounds_s2.tolist(), strict=True):
            if place + 1 == self.limits[sentence]:
                self._cut_off(sentence, continuations.where(slice(first, last)), place)
                active_m[first:last] = False
            elif first < last and self._is_decided(sentence, continuations.total_m[first]):
                active_m[first:last] = False
        return active_m

    def _cut_off(self, sentence: int, continuations: _Continuations, place: int) -> None:
        hypotheses = self.finished[sentence]
        for row, piece, total in continuations.rows():
            if len(hypotheses) == self.n_best:
                break
            pieces = (*self.beams.pieces(row, place), piece)
            hypotheses.append(Hypothesis(pieces, total / self.decoding.penalty(len(pieces)), total, ended=False))

    def _is_decided(self, sentence: int, best_total: np.float64) -> bool:
        """Return whether no continuation can beat the finished hypotheses."""
        hypotheses = self.finished[sentence]
        return len(hypotheses) == self.n_best and bool(hypotheses[-1].score >= best_total / self.decoding.penalty(self.limits[sentence]))


def _continuations(beams: _Beams, log_probabilities_nv: LogProbabilities, beam: int) -> tuple[_Continuations, list[int]]:
    """Return each sentence's `beam` best possible continuations, and the non-finite sentences.

    Overwrites its input.
    """
    log_probabilities_nv[:, [PADDING, BEGIN]] = -np.inf
    count, vocabulary = log_probabilities_nv.shape
    every_row_n = np.arange(count)
    most = min(beam, vocabulary)
    piece_nk, value_nk = np.empty((count, most), np.int64), np.empty((count, most))
    for rank in range(most):  # repeated argmax is faster than sorting, and takes the first of equals
        piece_nk[:, rank] = log_probabilities_nv.argmax(axis=1)
        value_nk[:, rank] = log_probabilities_nv[every_row_n, piece_nk[:, rank]]
        log_probabilities_nv[every_row_n, piece_nk[:, rank]] = -np.inf
    broken: list[int] = np.unique(beams.sentence_n[~np.isfinite(value_nk[:, 0])]).tolist()  # argmax takes NaN for the largest
    if broken:
        value_nk[np.isin(beams.sentence_n, broken)] = -np.inf
    total_m = (beams.total_n[:, None] + value_nk).ravel()
    row_m = np.repeat(every_row_n, most)
    sentence_m = beams.sentence_n[row_m]
    order_m = np.lexsort((np.arange(len(total_m)), -total_m, sentence_m))
    ordered_m = sentence_m[order_m]
    rank_m = np.arange(len(order_m)) - np.searchsorted(ordered_m, ordered_m)
    chosen_m = order_m[(rank_m < beam) & (total_m[order_m] > -np.inf)]
    return _Continuations(row_m[chosen_m], piece_nk.ravel()[chosen_m], total_m[chosen_m]), broken


MAX_SENTENCES = 128  # per batch: 64 MiB of log-probabilities for 32,768 pieces and a beam of 4
MAX_POSITIONS = 1 << 14  # per batch: beam × longest length; `big` caches 49 kB each, 800 MB in all
MAX_SOURCE_POSITIONS = 48 * MAX_SENTENCES
"""A batch's padded sources are encoded in one call without heartbeat: with `big` (0.18 GFLOP a position, 20 GFLOP/s) within a minute."""


def batches(lengths: Sequence[int], decoding: Decoding) -> Iterator[NDArray[np.int64]]:
    """Yield the sentence numbers of each batch, longest sentences first, equal lengths in order."""
    lengths_n = np.asarray(lengths, dtype=np.int64)
    order_n = np.argsort(-lengths_n, kind="stable")
    begin = 0
    while begin < len(order_n):
        length = max(1, int(lengths_n[order_n[begin]]))
        hypotheses = MAX_POSITIONS // (decoding.beam * (length + decoding.extra_length))
        count = max(1, min(MAX_SENTENCES, hypotheses, MAX_SOURCE_POSITIONS // length))
        yield order_n[begin : begin + count]
        begin += count


def decode(stepper: Stepper, sources: Sequence[Pieces], decoding: Decoding, n_best: int = 1) -> list[list[Hypothesis]]:
    """Return the hypotheses of any number of sentences, in their order; see `search`."""
    results: list[list[Hypothesis]] = [[] for _ in sources]
    for chosen in batches([len(source) for source in sources], decoding):
        numbers = chosen.tolist()
        for number, hypotheses in zip(numbers, search(stepper, [sources[i] for i in numbers], decoding, n_best), strict=True):
            results[number] = hypotheses
    return results


MAX_BEAM = 64  # larger beams take more memory and give worse translations


@dataclass(frozen=True, slots=True)
class Decoding:
    """Settings of a search.

    `beam` 1 is greedy, `extra_length` bounds the pieces beyond the source's. n pieces, including END, have the score (sum of
    log-probabilities) / ((5 + n) / 6) ** `length_penalty` (Wu et al. 2016, with the constants of the transformer's reference). Raises
    UsageError for invalid numbers.
    """

    beam: int = 4
    length_penalty: float = 0.6
    extra_length: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.beam <= MAX_BEAM:
            raise UsageError(f"beam: got {self.beam}; allowed: 1 (greedy) to {MAX_BEAM}")
        if not (math.isfinite(self.length_penalty) and 0 <= self.length_penalty <= 10):
            raise UsageError(f"length penalty: got {self.length_penalty:g}; allowed: 0 to 10")
        if not 0 <= self.extra_length <= 10_000:
            raise UsageError(f"extra length: got {self.extra_length}; allowed: 0 to 10000")

    def penalty(self, length: int) -> float:
        """Return the length penalty of `length` pieces; it never decreases with length."""
        return float(((5.0 + length) / 6.0) ** self.length_penalty)

    @property
    def signature(self) -> str:
        """The settings in records: ``greedy,+50`` or ``beam4,penalty0.6,+50``."""
        method = "greedy" if self.beam == 1 else f"beam{self.beam},penalty{self.length_penalty:g}"
        return f"{method},+{self.extra_length}"


GREEDY = Decoding(beam=1)  # for evaluations during a run
BEAM = Decoding()  # for the end of a run and ``trainer evaluate``: the reference's settings


_COUNTS = frozenset(language.SUMS)  # integer sums; a model's own may be fractional


@dataclass(frozen=True, slots=True)
class TranslationQuality:
    """Scores translations of the column `source` against `target`; `tokenizer` is BLEU's.

    A subclass with other metrics overrides `sums`, which must include `metrics.base.SENTENCES`, `metrics` and `sentence_sums`, and
    `signature` unless BLEU is among them.
    """

    source: str
    target: str
    tokenizer: str

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums over sentences."""
        return language.SUMS

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """BLEU, chrF and the share of exact matches."""
        return language.metrics(self.tokenizer)

    def sentence_sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> Mapping[str, float]:
        """Return the sums by name.

        They must be additive over sentences, as several processes score parts.
        """
        values = language.sentence_sums(hypotheses, references, self.tokenizer)
        return dict(zip(language.SUMS, values.tolist(), strict=True))

    def signature(self, decoding: Decoding, sentences: int) -> str:
        """Return what makes scores comparable: sacrebleu's signature, decoding, sentences.

        Raises MissingPackageError.
        """
        return f"{language.signature(self.tokenizer)}|{decoding.signature}|sentences:{sentences}"

    def count(self, sums: Mapping[str, float]) -> float:
        """Return the number of sentences in the sums; 0 if it is missing."""
        return sums.get(language.SENTENCES, 0.0)

    def wrong_with(self, sums: Mapping[str, float], sentences: float) -> str | None:
        """Return why these cannot be the sums of this number of sentences, or None."""
        if missing := [name for name in self.sums if name not in sums]:
            names = ", ".join(sorted(sums)) or "of no name"
            return f"no {' and no '.join(missing)}: sums {names}, instead of {', '.join(sorted(self.sums))}"
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
    """Return the translations' sums.

    Raises RunFailedError if `sentence_sums` fails or is invalid.
    """
    what = f"the model's {type(quality).__name__}.sentence_sums"
    try:
        sums = {name: float(value) for name, value in quality.sentence_sums(hypotheses, references).items()}
    except TrainerError:
        raise
    except Exception as error:
        raise RunFailedError(f"{what} fails: {type(error).__name__}: {error}") from error
    if (wrong := quality.wrong_with(sums, len(hypotheses))) is not None:
        raise RunFailedError(f"{what} returned {wrong}")
    return sums


def refuse_unscorable(data: Dataset, quality: TranslationQuality) -> None:
    """Raise UsageError for a dataset whose attachments do not allow scoring its translations."""
    sizes = data.info.text.vocabulary_sizes
    columns = {name: sizes[name] for name in (quality.source, quality.target) if name in sizes}
    files = {name: data.attachment(name) for name in SCORING_FILES if name in data.attachments}
    if (wrong := scoring_problem(files, columns, data.info.sizes["test"])) is not None:
        raise UsageError(
            f"data: translations of {data.info.name!r} cannot be scored: {wrong}. Its source has to be mended, and made again."
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """Sums of scored translations, and the number of sentences with non-finite output."""

    sums: Mapping[str, float]
    without_numbers: int


class TranslationScorer:
    """Scores translations of one dataset; reads vocabulary and references on first use."""

    def __init__(self, data: Dataset, quality: TranslationQuality) -> None:
        self._data, self._quality = data, quality

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Raises UsageError if the dataset has no vocabulary, or sentencepiece is missing."""
        return Vocabulary(self._data.attachment(VOCABULARY))

    @cached_property
    def _test_references(self) -> list[str]:
        lines = reference_lines(self._data.attachment(TEST_REFERENCES))
        if len(lines) != (examples := self._data.info.sizes["test"]):
            problem = f"{TEST_REFERENCES} of {self._data.info.name!r} has {len(lines)} lines, and the test split {examples} examples"
            raise RuntimeError(problem)
        return lines

    def references(self, split: Split, start: int, stop: int) -> list[str]:
        """Return the references of sentences start … stop − 1.

        Raises RuntimeError for missing lines.
        """
        if split != "test":
            column = self._data.column(split, self._quality.target)
            return [self.vocabulary.decode(column.example(number).tolist()) for number in range(start, stop)]
        return self._test_references[start:stop]

    def sources(self, split: Split, start: int, stop: int) -> list[NDArray[np.int64]]:
        """Return the pieces of sentences start … stop − 1, each ending with END."""
        column = self._data.column(split, self._quality.source)
        return [column.example(number).astype(np.int64) for number in range(start, stop)]

    def scored(self, stepper: Stepper, split: Split, start: int, stop: int, decoding: Decoding) -> Scored:
        """Translate and score sentences start … stop − 1.

        Without a hypothesis the translation is empty.
        """
        results = decode(stepper, self.sources(split, start, stop), decoding)
        texts = [self.vocabulary.decode(best[0].pieces) if best else "" for best in results]
        sums = checked_sums(self._quality, texts, self.references(split, start, stop))
        return Scored(sums, sum(not best for best in results))
