"""Answers of `trainer translate` fit into messages, for any sentences and hypotheses."""

from __future__ import annotations

import numpy as np
import pytest

from crosstrain.data.text import END
from crosstrain.engine.protocol.messages import ProtocolError, encoded, parse_header
from crosstrain.engine.protocol.task_messages import Translated
from crosstrain.launch.standalone_evaluation import MAX_ANSWER_BYTES, translated
from crosstrain.models.decoding import Decoding, Hypothesis


class Task:
    """A task that returns the requested number of hypotheses, each of the maximum length."""

    def __init__(self):
        self.sizes_bytes = []

    def ask(self, order):
        every = []
        for source in order.sources():
            longest = Hypothesis((7,) * (len(source) + order.decoding.extra_length), -float(source[0]), -2.0, ended=False)
            every.append([longest] * order.n_best)
        answer = Translated.from_hypotheses(every, 1)
        self.sizes_bytes.append(parse_header(encoded(answer)[0]).array_bytes)  # raises if it is too large
        return answer


@pytest.mark.parametrize("lengths", [[30] * 1024, [1024] * 40, [3]])
def test_answers_are_split_to_fit_messages(lengths):
    sources = [[4 + number, *[5] * (length - 2), END] for number, length in enumerate(lengths)]
    task = Task()
    hypotheses_by_sentence = translated(task, sources, Decoding(beam=64), 64)
    assert [(-hypotheses[0].score, len(hypotheses), len(hypotheses[0].pieces)) for hypotheses in hypotheses_by_sentence] == [
        (4 + number, 64, length + 50) for number, length in enumerate(lengths)
    ]
    assert max(task.sizes_bytes) <= MAX_ANSWER_BYTES
    assert len(task.sizes_bytes) <= 1 + 2 * sum(task.sizes_bytes) / MAX_ANSWER_BYTES  # and not more than necessary


def test_single_answer_is_too_large():
    every = [[Hypothesis((7,) * 80, -1.0, -2.0, ended=False)] * 64] * 1024
    with pytest.raises(ProtocolError, match="more bytes"):
        parse_header(encoded(Translated.from_hypotheses(every, 1))[0])


def test_few_translations_are_one_answer():
    task = Task()
    translated(task, [np.array([4, 5, END])] * 1024, Decoding(), 1)
    assert len(task.sizes_bytes) == 1
