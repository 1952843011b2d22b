"""Encodes orders to translate, and their answers, as messages of the control protocol, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.base import Split
from ...models.decoding.search import Hypothesis
from ...models.decoding.settings import Decoding
from .messages import Message

__all__ = [
    "decode_message",
    "decoded_message",
    "decoding_of",
    "hypotheses_of",
    "sources_of",
    "still_decoding_message",
    "translate_message",
    "translated_message",
]


def _decoding_fields(decoding: Decoding) -> dict[str, Any]:
    return {name: getattr(decoding, name) for name in Decoding.__dataclass_fields__}


def decoding_of(message: Message) -> Decoding:
    """Return how a message wants to have decoded."""
    return Decoding(**{name: message[name] for name in Decoding.__dataclass_fields__})


def decode_message(split: Split, start: int, stop: int, decoding: Decoding) -> Message:
    """Return the order to translate the sentences start … stop − 1 of a split, each leading task its share, and to score them."""
    return Message("decode", {"split": split, "start": start, "stop": stop, **_decoding_fields(decoding)})


def decoded_message(order: Message, sums: Mapping[str, float], without_numbers: int, seconds: float) -> Message:
    """Return the answer to that: what a task's share adds to the sums, and how many of its sentences had no finite log-probabilities."""
    fields = {"start": order["start"], "sums": dict(sums), "without_numbers": without_numbers, "seconds": seconds}
    return Message("decoded", {**fields, "complete": True})


def still_decoding_message(order: Message) -> Message:
    """Return the sign of life of a task that is at such an order; any number of them come before the answer."""
    return Message("decoded", {"start": order["start"], "sums": {}, "without_numbers": 0, "seconds": 0.0, "complete": False})


def translate_message(sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> Message:
    """Return the order to translate some sentences, which end with END."""
    lengths = np.array([len(source) for source in sources], np.int64)
    pieces = np.concatenate([np.zeros(0, np.int64), *(np.asarray(source, np.int64) for source in sources)])
    return Message("translate", {"n_best": n_best, **_decoding_fields(decoding)}, {"pieces": pieces, "lengths": lengths})


def sources_of(message: Message) -> list[NDArray[np.int64]]:
    """Return the sentences of an order to translate."""
    return _cut(message.array("pieces"), message.array("lengths"))


def translated_message(order: Message, translations: Sequence[Sequence[Hypothesis]]) -> Message:
    """Return the answer to that: the hypotheses of each sentence, the best first; see `models.decoding.search`."""
    every = [hypothesis for hypotheses in translations for hypothesis in hypotheses]
    arrays = {
        "counts": np.array([len(hypotheses) for hypotheses in translations], np.int64),
        "lengths": np.array([len(one.pieces) for one in every], np.int64),
        "pieces": np.array([piece for one in every for piece in one.pieces], np.int64),
        "scores": np.array([one.score for one in every], np.float64),
        "log_probabilities": np.array([one.log_probability for one in every], np.float64),
        "ended": np.array([one.ended for one in every], np.int64),
    }
    return Message("translated", {"order": order["sequence"]}, arrays)


def hypotheses_of(message: Message, sentences: int) -> list[list[Hypothesis]]:
    """Return the hypotheses of so many sentences. Raises ValueError where the message has others, or numbers that cannot be."""
    counts, lengths = message.array("counts"), message.array("lengths")
    scores, totals, ended = message.array("scores"), message.array("log_probabilities"), message.array("ended")
    fits = len(counts) == sentences and counts.min(initial=0) >= 0 and lengths.min(initial=0) >= 0 and int(counts.sum()) == len(lengths)
    if not fits or int(lengths.sum()) != len(message.array("pieces")) or not len(lengths) == len(scores) == len(totals) == len(ended):
        raise ValueError(f"translations of {len(counts)} sentences that do not fit the {sentences} that were asked for")
    pieces = _cut(message.array("pieces"), lengths)
    every = [
        Hypothesis(tuple(one.tolist()), score, total, bool(end))
        for one, score, total, end in zip(pieces, scores.tolist(), totals.tolist(), ended.tolist(), strict=True)
    ]
    ends = np.cumsum(counts).tolist()
    return [every[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _cut(values: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
