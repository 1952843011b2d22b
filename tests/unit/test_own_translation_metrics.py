"""Custom metrics over translations: computed like built-in ones, or refused early."""

import math
import random

import numpy as np
import pytest

from crosstrain.backends.base import EvalResult
from crosstrain.core.cluster import split_evenly
from crosstrain.core.errors import RunFailedError, UsageError
from crosstrain.core.job import Job
from crosstrain.core.units import Target
from crosstrain.engine.protocol.messages import ImpossibleAnswerError
from crosstrain.engine.protocol.task_messages import Decoded
from crosstrain.engine.translation import EvaluationInProgress
from crosstrain.metrics import Metric
from crosstrain.metrics.base import SENTENCES
from crosstrain.models.decoding import TranslationQuality, checked_sums
from crosstrain.models.objectives import CLASSIFICATION, Objective, refuse_uncomputable
from crosstrain.models.transformer import TRANSLATION

WORDS = ["The", "cat", "Sat", "on", "a", "mat"]


class Caseless(TranslationQuality):
    """Adds the share of translations that are right except for case, and their error in length."""

    @property
    def sums(self):
        return (*super().sums, "right_but_for_case", "length_error")

    @property
    def metrics(self):
        right = Metric("caseless", "right but for case", "higher", lambda sums: sums["right_but_for_case"] / sums[SENTENCES], (0.0, 1.0))
        return (*super().metrics, right)

    def sentence_sums(self, hypotheses, references):
        pairs = list(zip(hypotheses, references, strict=True))
        right = sum(hypothesis.lower() == reference.lower() for hypothesis, reference in pairs)
        error = sum(abs(len(hypothesis) - len(reference)) / 2 for hypothesis, reference in pairs)
        return {**super().sentence_sums(hypotheses, references), "right_but_for_case": right, "length_error": error}


class WithoutBleu(TranslationQuality):
    """Has only a custom metric."""

    sums = (SENTENCES, "right")
    metrics = (Metric("right", "right", "higher", lambda sums: sums["right"] / sums[SENTENCES], (0.0, 1.0)),)

    def sentence_sums(self, hypotheses, references):
        return {SENTENCES: len(hypotheses), "right": sum(map(str.__eq__, hypotheses, references))}

    def signature(self, decoding, sentences):
        return f"right|{decoding.signature}|sentences:{sentences}"


RATIO = Metric(
    "length_ratio", "length ratio", "higher", lambda sums: sums["bleu_hypothesis_length"] / sums["bleu_reference_length"], (0.0, math.inf)
)
MIXED = Metric("mixed", "mixed", "lower", lambda sums: sums["length_error"] + sums["loss_sum"] / sums["target_tokens"])


def objective(*metrics, quality=None):
    quality = quality or Caseless("source", "target", "13a")
    return Objective("translation", "loss", TRANSLATION.sums, (*TRANSLATION.metrics, *metrics), "target_tokens", quality)


def sentences(count):
    draw = random.Random(count)
    references = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(count)]
    return [draw.choice([line, line.swapcase(), line[:-1], ""]) for line in references], references


def evaluated(goal, count, leaders, change=None):
    """Return the metrics of an evaluation whose sentences are shared among several tasks."""
    hypotheses, references = sentences(count)
    evaluation = EvaluationInProgress(Job(eval_sentences=count), goal, {"train": 9, "test": count}, leaders)
    _, *orders = evaluation.begin("test")
    sums = {"loss_sum": 7.0, "nll_sum": 6.0, "correct_tokens": 3.0, "target_tokens": 9.0, "examples": float(count)}
    assert evaluation.on_evaluated(EvalResult("test", sums, 1.0, 5), 5) is None
    for order in orders:
        for leader in range(leaders):
            first, last = (order.start + place for place in split_evenly(order.stop - order.start, leaders)[leader])
            sums_of_sentences = checked_sums(goal.translation, hypotheses[first:last], references[first:last])
            whole = evaluation.on_decoded(leader, Decoded(order.start, {**sums_of_sentences, **(change or {})}, 0, 0.5, complete=True))
    return goal.figures(whole.result.sums)


@pytest.mark.parametrize(("count", "leaders"), [(1, 1), (40, 2), (601, 3)])
def test_custom_metrics_score_text_and_sums(count, leaders):
    figures = evaluated(objective(RATIO, MIXED), count, leaders)
    hypotheses, references = sentences(count)
    assert figures["caseless"] == np.mean(
        [hypothesis.lower() == reference.lower() for hypothesis, reference in zip(hypotheses, references, strict=True)]
    )
    assert (
        figures["mixed"]
        == sum(abs(len(hypothesis) - len(reference)) for hypothesis, reference in zip(hypotheses, references, strict=True)) / 2 + 7 / 9
    )
    words = [sum(len(line.split()) for line in lines) for lines in (hypotheses, references)]
    assert figures["length_ratio"] == words[0] / words[1]
    assert list(figures) == ["loss", "bleu", "chrf", "exact", "caseless", "perplexity", "token_accuracy", "length_ratio", "mixed"]


def test_custom_metrics_need_no_bleu():
    goal = objective(quality=WithoutBleu("source", "target", "13a"))
    refuse_uncomputable(goal)
    hypotheses, references = sentences(30)
    assert evaluated(goal, 30, 2)["right"] == np.mean(np.array(hypotheses) == np.array(references))
    assert [info.name for info in goal.infos] == ["right", "perplexity", "token_accuracy", "loss"]


def test_custom_metric_can_stop_a_run_and_keep_the_best():
    goal = objective(RATIO)
    goal.check(Target.parse("caseless>=0.9"), "length_ratio")
    with pytest.raises(UsageError, match="caseless from 0 to 1"):
        goal.check(Target.parse("caseless>=1.5"), None)


def test_figure_out_of_bounds_is_refused():
    with pytest.raises(ImpossibleAnswerError, match="right but for case 2, which lies between 0 and 1"):
        evaluated(objective(), 5, 1, {"right_but_for_case": 10.0})


def test_computable_metrics_pass():
    needs_an_error = Metric("x", "x", "lower", lambda sums: math.log(sums["loss_sum"] - sums["correct"]))  # fails for some synthetic sums
    for goal in (CLASSIFICATION, TRANSLATION, objective(RATIO, MIXED)):
        refuse_uncomputable(goal)
    refuse_uncomputable(Objective("x", "cross_entropy", CLASSIFICATION.sums, (needs_an_error,)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda sums: sums["bleu_hypothesis_lenght"], "KeyError: 'bleu_hypothesis_lenght'"),
        (lambda sums: None, "TypeError"),
        (lambda sums: math.sqrt(-sums["examples"]), "ValueError"),
        (lambda sums: 1 / 0 * sums["examples"], "ZeroDivisionError"),
    ],
)
def test_incomputable_metric_is_refused_by_name(value, message):
    with pytest.raises(UsageError, match=rf"model: metric 'broken' cannot be computed from .*{message}"):
        refuse_uncomputable(objective(Metric("broken", "broken", "higher", value)))


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ({SENTENCES: 1.0}, f"returned no right: sums {SENTENCES}, instead of right, {SENTENCES}"),
        ({}, f"returned no {SENTENCES} and no right: sums of no name, instead of right, {SENTENCES}"),
        ({SENTENCES: 1.0, "right": 1.0, "wrong": 0.0}, f"returned the sums wrong in addition to right, {SENTENCES}"),
        ({SENTENCES: 1.0, "right": math.nan}, "returned nan right"),
        ({SENTENCES: 2.0, "right": 1.0}, "returned 2 sentences, where 1 were"),
        (np.zeros(2), "fails: AttributeError"),
        ({SENTENCES: 1.0, "right": "all"}, "fails: ValueError"),
    ],
)
def test_invalid_sentence_sums_are_refused(sums, message):
    class Broken(WithoutBleu):
        def sentence_sums(self, hypotheses, references):
            return sums

    broken = Broken("source", "target", "13a")
    with pytest.raises(RunFailedError, match=rf"the model's Broken\.sentence_sums {message}"):
        checked_sums(broken, ["a"], ["b"])
    with pytest.raises(UsageError, match=message):
        refuse_uncomputable(objective(quality=broken))


def test_uncounted_sentences_are_refused():
    class Uncounted(WithoutBleu):
        sums = ("right",)

    with pytest.raises(ValueError, match=f"lack {SENTENCES}"):
        objective(quality=Uncounted("source", "target", "13a"))
