"""BLEU and chrF from sums equal sacrebleu's scores of the corpus, however it is split."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.metrics.base import SENTENCES, SUMS, TOKENIZERS, metrics, sentence_sums, signature

WORDS = ["the", "cat", "sat,", "on", "a", "mat.", "Mat", "42", "käse", "", "  ", "。", "<&amp;>", "e\u0301"]
LINES = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(LINES, LINES, st.booleans()), min_size=1, max_size=12), st.sampled_from(TOKENIZERS), st.integers(0, 12))
def test_sums_of_parts_equal_the_corpus_score(pairs, tokenizer, cut):
    references = [reference for _, reference, _ in pairs]
    hypotheses = [reference if same else hypothesis for hypothesis, reference, same in pairs]
    parts = [sentence_sums(hypotheses[part], references[part], tokenizer) for part in (slice(cut), slice(cut, None))]
    sums = dict(zip(SUMS, sum(parts).tolist(), strict=True))
    bleu, chrf, exact = (metric.value(sums) for metric in metrics(tokenizer))
    assert bleu == min(100.0, sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenizer, force=True).score)
    assert chrf == min(100.0, sacrebleu.corpus_chrf(hypotheses, [references]).score)
    assert exact == np.mean([hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True)])
    assert sums[SENTENCES] == len(pairs)


def test_perfect_corpus_of_single_words_needs_characters():
    lines = ["zweitausend", "siebenundzwanzig"]

    def bleu(tokenizer):
        return metrics(tokenizer)[0].value(dict(zip(SUMS, sentence_sums(lines, lines, tokenizer).tolist(), strict=True)))

    assert (bleu("char"), bleu("13a")) == (100.0, 0.0)  # there are no four words in a row


@pytest.mark.parametrize("name", ["flores101", "flores200", "spm"])
def test_tokenizers_with_downloads_are_refused(name):
    with pytest.raises(UsageError, match="downloads"):
        metrics(name)


def test_unknown_tokenizer_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"'13b'; allowed: 13a, intl, char, zh, none, ja-mecab, ko-mecab\. Did you mean '13a'"):
        metrics("13b")


def test_signature_is_that_of_sacrebleu():
    assert signature("char") == f"nrefs:1|case:mixed|eff:no|tok:char|smooth:exp|version:{sacrebleu.__version__}"


def test_missing_sacrebleu_names_the_package():
    code = """
import sys
sys.modules["sacrebleu"] = None
from crosstrain.core.errors import MissingPackageError
from crosstrain.metrics.base import metrics, sentence_sums
metrics("13a")
try:
    sentence_sums(["a"], ["a"], "13a")
except MissingPackageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'crosstrain[text]'" in done.stdout
