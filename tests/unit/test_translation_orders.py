"""The engine's part of evaluations with translation: orders, answers and messages."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from crosstrain.backends.base import EvalResult
from crosstrain.core.cluster import split_evenly
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.engine.protocol import task_messages as messages
from crosstrain.engine.protocol.messages import ImpossibleAnswerError
from crosstrain.engine.translation import (
    AllTranslated,
    Decoded,
    EvaluationInProgress,
    TranslationOrders,
    WholeEvaluation,
    at_the_end,
    described,
    refuse_idle,
    while_training,
)
from crosstrain.metrics import Metric
from crosstrain.metrics.base import SUMS, sentence_sums
from crosstrain.models.decoding import BEAM, GREEDY, Hypothesis, TranslationQuality
from crosstrain.models.objectives import CLASSIFICATION, Objective

QUALITY = TranslationQuality("source", "target", "13a")
TOKENS = Metric("token_accuracy", "token accuracy", "higher", lambda sums: sums["correct"] / sums["target_tokens"], bounds=(0.0, 1.0))
OBJECTIVE = Objective(
    "translation", "loss", ("loss_sum", "correct", "target_tokens", "examples"), (TOKENS,), weight="target_tokens", translation=QUALITY
)
LINES = [f"the cat number {number} sat on the mat ." for number in range(700)]
TRANSLATIONS = [line.replace("cat", "dog") if number % 3 else line for number, line in enumerate(LINES)]


def answer(message, leader, leaders):
    """Return the answer of a leading task, whose share is that of `Translating`."""
    start, stop = message.start, message.stop
    first, last = split_evenly(stop - start, leaders)[leader]
    sums = sentence_sums(TRANSLATIONS[start + first : start + last], LINES[start + first : start + last], "13a")
    without_numbers = last - first if leader == 0 else 0
    return messages.Decoded(start, dict(zip(SUMS, sums.tolist(), strict=True)), without_numbers, 0.5, complete=True)


@pytest.mark.parametrize("leaders", [1, 2, 3])
@pytest.mark.parametrize("decoded", [Decoded(500, GREEDY), Decoded(700, BEAM), Decoded(1, BEAM)])
def test_sentences_count_once_on_any_number_of_tasks(leaders, decoded):
    orders = TranslationOrders(QUALITY, "test", decoded, leaders)
    for message in reversed(orders.messages):  # tasks answer in any order
        for leader in range(leaders):
            assert not orders.complete
            orders.add(leader, answer(message, leader, leaders))
    assert orders.complete
    expected = sentence_sums(TRANSLATIONS[: decoded.sentences], LINES[: decoded.sentences], "13a")
    assert orders.sums == dict(zip(SUMS, expected.tolist(), strict=True))
    assert orders.seconds == 0.5 * len(orders.messages)
    shares = [split_evenly(message.stop - message.start, leaders)[0] for message in orders.messages]
    assert orders.without_numbers == sum(last - first for first, last in shares)
    assert orders.signature.endswith(f"|{decoded.decoding.signature}|sentences:{decoded.sentences}")


def wrong(message, **changes):
    return structs.replace(message, sums={**message.sums, **changes})


@pytest.mark.parametrize(
    ("changes", "message_text"),
    [
        ({"translated_sentences": 4.0}, "4 sentences, where 3 were"),
        ({"bleu_matching_1grams": 0.5}, "0.5 bleu_matching_1grams"),
        ({"bleu_matching_1grams": 1e6}, "1e\\+06 bleu_matching_1grams of"),
        ({"exact_matches": 4.0}, "4 exact_matches of 3"),
        ({"chrf_hypothesis_1grams": -1.0}, "-1 chrf_hypothesis_1grams"),
        ({"more": 1.0}, "sums .*more"),
    ],
)
def test_invalid_sums_are_refused(changes, message_text):
    orders = TranslationOrders(QUALITY, "test", Decoded(3, GREEDY), 1)
    with pytest.raises(ImpossibleAnswerError, match=message_text):
        orders.add(0, wrong(answer(orders.messages[0], 0, 1), **changes))


def test_too_many_sentences_without_numbers_are_refused():
    orders = TranslationOrders(QUALITY, "test", Decoded(3, GREEDY), 1)
    decoded = answer(orders.messages[0], 0, 1)
    with pytest.raises(ImpossibleAnswerError, match="3 sentences, 4 of them without numbers"):
        orders.add(0, structs.replace(decoded, without_numbers=4))


def test_unrequested_answers_are_refused():
    orders = TranslationOrders(QUALITY, "test", Decoded(3, GREEDY), 2)
    message = orders.messages[0]
    orders.add(0, answer(message, 0, 2))
    for leader, again in ((0, answer(message, 0, 2)), (1, structs.replace(answer(message, 1, 2), start=7))):
        with pytest.raises(ImpossibleAnswerError, match="nobody asked for"):
            orders.add(leader, again)


def progress(leaders=1, **job):
    return EvaluationInProgress(Job(**job), OBJECTIVE, {"train": 9, "test": 700}, leaders)


RESULT = EvalResult("test", {"loss_sum": 7.0, "correct": 3.0, "target_tokens": 9.0, "examples": 700.0}, 1.0, 5)


def test_evaluation_is_complete_with_its_translations():
    evaluation = progress(eval_sentences=40)
    first, *orders = evaluation.begin("test")
    assert (first.kind, [(order.start, order.stop, order.decoding.beam) for order in orders]) == ("evaluate", [(0, 40, 1)])
    assert evaluation.on_evaluated(RESULT, 5) is None
    assert evaluation.translating
    whole = evaluation.on_decoded(0, answer(orders[0], 0, 1))
    assert (whole.step, whole.result.seconds, evaluation.translating) == (5, 1.5, False)
    figures = OBJECTIVE.figures(whole.result.sums)
    assert (figures["exact"], figures["token_accuracy"]) == (14 / 40, 3 / 9)


def test_final_translation_uses_the_job_s_beam():
    evaluation = progress(beam=2)
    orders = evaluation.begin_last("test")
    assert {order.decoding.beam for order in orders} == {2}
    parts = [evaluation.on_decoded(0, answer(order, 0, 1)) for order in orders]
    assert isinstance(parts[-1], AllTranslated)
    assert not any(parts[:-1])
    assert (parts[-1].sentences, parts[-1].figures["exact"]) == (700, 234 / 700)


def test_evaluation_without_translations_has_one_part():
    evaluation = EvaluationInProgress(Job(), CLASSIFICATION, {"train": 9, "test": 7}, 1)
    assert [message.kind for message in evaluation.begin("test")] == ["evaluate"]
    result = EvalResult("test", {"loss_sum": 7.0, "correct": 3.0, "examples": 7.0}, 1.0, 5)
    assert evaluation.on_evaluated(result, 5) == WholeEvaluation(result, 5)
    assert evaluation.begin_last("test") == []
    with pytest.raises(ImpossibleAnswerError, match="nobody asked for"):
        evaluation.on_decoded(0, messages.Decoded(0, {}, 0, 0.0, complete=True))


def test_job_decodes_with_its_signatures():
    assert (while_training(Job(), 700), at_the_end(Job(beam=1), 700)) == (Decoded(500, GREEDY), Decoded(700, GREEDY))
    signatures = described(Job(), OBJECTIVE, 20)
    searches = [signatures[when].split("|version:")[1].split("|", 1)[1] for when in ("training", "end")]
    assert searches == ["greedy,+50|sentences:20", "beam4,penalty0.6,+50|sentences:20"]
    assert described(Job(), CLASSIFICATION, 20) is None


@pytest.mark.parametrize("setting", [{"eval_sentences": 5}, {"beam": 1}, {"length_penalty": 1.0}])
def test_setting_without_effect_is_refused(setting):
    refuse_idle(Job(**setting), OBJECTIVE)
    refuse_idle(Job(), CLASSIFICATION)
    with pytest.raises(UsageError, match="translate nothing"):
        refuse_idle(Job(**setting), CLASSIFICATION)


def test_sentences_and_hypotheses_round_trip():
    sources = [[4, 5, 2], [2], [6, 2]]
    message = messages.Translate.from_sentences(sources, BEAM, 2)
    assert [source.tolist() for source in message.sources()] == sources
    assert (message.decoding, message.n_best) == (BEAM, 2)
    hypotheses = [
        [Hypothesis((4, 5), -1.5, -2.0, ended=True), Hypothesis((), -3.0, -3.0, ended=True)],
        [Hypothesis((9,) * 7, -9.0, -12.0, ended=False)],
        [],
    ]
    sent = messages.Translated.from_hypotheses(hypotheses, 3)
    assert sent.hypotheses(3) == hypotheses
    with pytest.raises(ValueError, match="of 3 sentences that do not fit the 2"):
        sent.hypotheses(2)
    for name, value in (
        ("lengths", np.array([1, 1, 1, 1])),
        ("counts", np.array([4, 0, 0])),
        ("counts", np.array([4, 0, -1])),
        ("ended", np.array([1])),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            structs.replace(sent, arrays={**sent.arrays, name: value}).hypotheses(3)
