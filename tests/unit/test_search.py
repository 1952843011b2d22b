"""Greedy and beam search against an enumeration of all sentences of a small random model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.data.text import BEGIN, END, PADDING
from crosstrain.models.decoding import BEAM, GREEDY, Decoding, Hypothesis, batches, decode, search

SMALL_VOCABULARY = 6


class RandomModel:
    """A language model whose next piece depends unpredictably on all pieces so far."""

    def __init__(self, seed: int, vocabulary: int = SMALL_VOCABULARY, *, steps: int | None = None, ends: float = 0.0) -> None:
        """Round log-probabilities to `steps` values, so that ties are common; `ends` favours END."""
        self._seed, self._vocabulary, self._steps, self._ends = seed, vocabulary, steps, ends
        self._prefixes: list[tuple[int, ...]] = []
        self.rows: list[int] = []

    def begin(self, sources: Sequence[np.ndarray]) -> None:
        self._prefixes = [tuple(np.asarray(source).tolist()) for source in sources]

    def next(self, prefix: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([self._seed, *prefix]).normal(size=self._vocabulary) * 2
        logits[END] += self._ends
        log_probabilities = logits - np.log(np.exp(logits).sum())
        if self._steps is not None:
            log_probabilities = np.minimum(np.round(log_probabilities * self._steps) / self._steps, 0.0)
        return log_probabilities.astype(np.float32)

    def advance(self, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
        self._prefixes = [(*self._prefixes[row], token) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)]
        self.rows.append(len(rows))
        return np.stack([self.next(prefix) for prefix in self._prefixes])


def every_sentence(model: RandomModel, source: tuple[int, ...], decoding: Decoding) -> list[Hypothesis]:
    """Return all hypotheses that end within the maximum length, the best first."""
    hypotheses = []
    open_prefixes: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for length in range(1, len(source) + decoding.extra_length + 1):
        following = []
        for pieces, total in open_prefixes:
            for piece, value in enumerate(model.next((*source, BEGIN, *pieces)).tolist()):
                if piece == END:
                    hypotheses.append(Hypothesis(pieces, (total + value) / decoding.penalty(length), total + value, ended=True))
                elif piece not in (PADDING, BEGIN):
                    following.append(((*pieces, piece), total + value))
        open_prefixes = following
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def source_of(*pieces: int) -> np.ndarray:
    return np.array([*pieces, END], np.int32)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 2), st.integers(0, 2))
def test_wide_beam_finds_the_best_of_all_sentences(seed: int, penalty: float, extra: int) -> None:
    decoding = Decoding(beam=64, length_penalty=penalty, extra_length=extra)  # 3 pieces continue: at most 27 hypotheses
    source = source_of(4)
    expected = every_sentence(RandomModel(seed), tuple(source.tolist()), decoding)
    (hypotheses,) = search(RandomModel(seed), [source], decoding, n_best=5)
    ended = [hypothesis for hypothesis in hypotheses if hypothesis.ended]
    assert len(hypotheses) == 5
    assert hypotheses[: len(ended)] == ended
    assert [hypothesis.pieces for hypothesis in ended] == [hypothesis.pieces for hypothesis in expected[:5]]
    assert [hypothesis.score for hypothesis in ended] == pytest.approx([hypothesis.score for hypothesis in expected[:5]], rel=1e-12)


def plain_beam(model: RandomModel, source: tuple[int, ...], decoding: Decoding, n_best: int) -> list[Hypothesis]:
    """Search without early end, one hypothesis at a time: an independent version of the rule."""
    finished, beam = [], [((), 0.0)]
    limit = len(source) + decoding.extra_length
    for length in range(1, limit + 1):
        every = [
            (total + value, pieces, piece)
            for pieces, total in beam
            for piece, value in enumerate(model.next((*source, BEGIN, *pieces)).tolist())
            if piece not in (PADDING, BEGIN)
        ]
        every = sorted(every, key=lambda candidate: -candidate[0])[: decoding.beam]  # sorted() is stable
        finished += [
            Hypothesis(pieces, total / decoding.penalty(length), total, ended=True) for total, pieces, piece in every if piece == END
        ]
        beam = [((*pieces, piece), total) for total, pieces, piece in every if piece != END]
        if not beam:
            break
    cut_off = [Hypothesis(pieces, total / decoding.penalty(limit), total, ended=False) for pieces, total in beam]
    return [*sorted(finished, key=lambda candidate: -candidate.score), *cut_off][:n_best]


MODELS = st.tuples(st.integers(0, 2**31), st.sampled_from([None, 1, 2]), st.sampled_from([-3.0, 0.0, 2.0]))


@settings(max_examples=40, deadline=None)
@given(MODELS, st.integers(1, 4), st.sampled_from([0.0, 0.6, 3.0]), st.data())
def test_early_end_and_batching_change_nothing(
    model: tuple[int, int | None, float], beam: int, penalty: float, data: st.DataObject
) -> None:
    seed, steps, ends = model
    decoding = Decoding(beam=beam, length_penalty=penalty, extra_length=data.draw(st.integers(0, 5)))
    n_best = data.draw(st.integers(1, beam))
    sources = [source_of(*pieces) for pieces in data.draw(st.lists(st.lists(st.integers(4, 9), max_size=4), min_size=1, max_size=4))]
    made = lambda: RandomModel(seed, steps=steps, ends=ends)  # noqa: E731
    expected = [plain_beam(made(), tuple(source.tolist()), decoding, n_best) for source in sources]
    assert search(made(), sources, decoding, n_best) == expected
    assert [search(made(), [source], decoding, n_best)[0] for source in sources] == expected


@settings(max_examples=25, deadline=None)
@given(MODELS)
def test_greedy_takes_the_most_probable_piece(model: tuple[int, int | None, float]) -> None:
    seed, steps, ends = model
    language, source = RandomModel(seed, steps=steps, ends=ends), source_of(4, 5)
    pieces: list[int] = []
    while len(pieces) < len(source) + GREEDY.extra_length:
        values = language.next((*source.tolist(), BEGIN, *pieces))
        values[[PADDING, BEGIN]] = -np.inf
        pieces.append(int(values.argmax()))
        if pieces[-1] == END:
            break
    (best,) = search(language, [source], GREEDY)[0]
    assert list(best.pieces) == [piece for piece in pieces if piece != END]
    assert best.ended == (pieces[-1] == END)


def test_early_end_saves_steps() -> None:
    sure = RandomModel(1, ends=9.0)
    search(sure, [source_of(4)] * 3, BEAM)
    assert len(sure.rows) < 10  # of 52


def test_equal_pieces_prefer_the_lower_number() -> None:
    class Even:
        def begin(self, sources: Sequence[np.ndarray]) -> None:
            pass

        def advance(self, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return np.full((len(rows), 9), np.log(1 / 9), np.float32)

    hypotheses = search(Even(), [source_of(4)], Decoding(beam=4, length_penalty=0.0, extra_length=1), n_best=4)[0]
    # END is 2, text begins at 3: step 1 takes END, 3, 4 and 5; step 2 only what continues 3
    assert [(hypothesis.pieces, hypothesis.ended) for hypothesis in hypotheses] == [
        ((), True),
        ((3,), True),
        ((3, 3), True),
        ((3, 3, 3), False),
    ]
    assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx([-np.log(9), -2 * np.log(9), -3 * np.log(9), -3 * np.log(9)])


class Diverging(RandomModel):
    """A model with a non-finite row after some pieces of the sentences that begin with `wrong`."""

    def __init__(self, seed: int, wrong: int, place: int, values: Sequence[float], whole: bool) -> None:
        super().__init__(seed, ends=-3.0)
        self._wrong, self._place, self._values, self._whole = wrong, place, list(values), whole

    def next(self, prefix: tuple[int, ...]) -> np.ndarray:
        log_probabilities = super().next(prefix)
        if prefix[0] == self._wrong and len(prefix) - prefix.index(BEGIN) > self._place:
            draw = np.random.default_rng([self._seed, len(prefix)])
            log_probabilities[slice(2, None) if self._whole else draw.integers(2, len(log_probabilities))] = draw.choice(self._values)
        return log_probabilities


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.sampled_from([([np.nan], False), ([np.inf], False), ([np.nan, np.inf], False), ([np.nan], True), ([-np.inf], True)]),
    st.integers(1, 4),
    st.lists(st.integers(4, 6), min_size=1, max_size=6),
)
def test_non_finite_sentence_has_no_hypothesis(seed: int, place: int, how: tuple[list[float], bool], beam: int, begins: list[int]) -> None:
    """Others in its batch are translated as if it were not there."""
    decoding = Decoding(beam=beam, extra_length=5)
    sources = [source_of(begin, 5) for begin in begins]
    translations = search(Diverging(seed, 4, place, *how), sources, decoding, beam)
    sound = search(RandomModel(seed, ends=-3.0), sources, decoding, beam)
    for begin, ours, theirs in zip(begins, translations, sound, strict=True):
        longest = max(len(hypothesis.pieces) + hypothesis.ended for hypothesis in theirs)
        if begin != 4 or longest <= place:  # the search may also run a little longer than its best hypotheses
            assert ours in (theirs, []) if begin == 4 else ours == theirs
        else:
            assert ours == []


def test_impossible_piece_is_not_taken() -> None:
    class Narrow(RandomModel):
        def next(self, prefix: tuple[int, ...]) -> np.ndarray:
            scored = super().next(prefix)
            scored[[3, 4]] = -np.inf
            return scored

    (scored,) = search(Narrow(1, ends=-9.0), [source_of(4)], Decoding(beam=4, extra_length=1), n_best=4)
    assert [(hypothesis.pieces, hypothesis.ended) for hypothesis in scored[-1:]] == [((5, 5, 5), False)]
    assert len(scored) == 4
    (scored,) = search(Narrow(1), [source_of(4)], Decoding(beam=4, extra_length=0), n_best=4)
    assert [hypothesis.pieces for hypothesis in scored if not hypothesis.ended] == [(5, 5)]
    assert len(scored) == 3  # there is no fourth


def test_batches_have_each_sentence_once_by_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 1000).tolist()
    all_batches = list(batches(lengths, BEAM))
    assert sorted(np.concatenate(all_batches).tolist()) == list(range(1000))
    assert all(len(batch) * BEAM.beam * (max(lengths[i] for i in batch) + 50) <= 1 << 14 for batch in all_batches)
    assert next(iter(batches([10**6], BEAM))).tolist() == [0]
    long = list(batches([200] * 100, GREEDY))  # few hypotheses with long sources
    assert all(len(batch) * 200 <= 6144 for batch in long)
    assert len(long) == 4
    sources = [source_of(*[4] * (length % 7)) for length in lengths[:50]]
    decoding = Decoding(beam=2, extra_length=3)
    assert decode(RandomModel(3), sources, decoding) == [search(RandomModel(3), [source], decoding)[0] for source in sources]


@pytest.mark.parametrize(
    "wrong", [{"beam": 0}, {"beam": 65}, {"length_penalty": -0.1}, {"length_penalty": float("nan")}, {"extra_length": -1}]
)
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Decoding(**wrong)  # type: ignore[arg-type]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="beam"):
        search(RandomModel(0), [source_of(4)], GREEDY, n_best=2)
    with pytest.raises(ValueError, match="without pieces"):
        search(RandomModel(0), [np.zeros(0, np.int32)], GREEDY)
    assert search(RandomModel(0), [], GREEDY) == []


def test_signature_names_the_settings() -> None:
    assert (GREEDY.signature, BEAM.signature) == ("greedy,+50", "beam4,penalty0.6,+50")
