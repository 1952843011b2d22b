"""Translates sentences with a trained state on this machine, without a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...engine.protocol.translation_messages import hypotheses_of, translate_message
from ...models.decoding.search import Hypothesis
from ...models.decoding.settings import Decoding
from .task import StandaloneTask

__all__ = ["MOST_ANSWER_BYTES", "translated"]

MOST_ANSWER_BYTES = 8 << 20
"""Of the numbers of one answer, a quarter of what a message may have: each piece is one of 8 bytes, and so are a hypothesis' figures."""

_NUMBER_BYTES = 8

_FIGURES = 4
"""Of a hypothesis, beside its pieces: how many they are, score, log-probability, and whether it ended."""


def translated(task: StandaloneTask, sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> list[list[Hypothesis]]:
    """Return the best hypotheses of each sentence, which ends with END. Errors as of `StandaloneTask`."""
    found: list[list[Hypothesis]] = []
    for part in _parts(sources, decoding, n_best):
        message = task.ask(translate_message(part, decoding, n_best))
        try:
            found += hypotheses_of(message, len(part))
        except ValueError as error:
            task.refuse(str(error))
    return found


def _parts(sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> Iterator[Sequence[Sequence[int]]]:
    """Yield as many sentences that follow each other as one answer has room for, were all as long as they may become; at least one."""
    begin = taken_bytes = 0
    for number, source in enumerate(sources):
        needed_bytes = _NUMBER_BYTES * (1 + n_best * (len(source) + decoding.extra_length + _FIGURES))
        if number > begin and taken_bytes + needed_bytes > MOST_ANSWER_BYTES:
            yield sources[begin:number]
            begin, taken_bytes = number, 0
        taken_bytes += needed_bytes
    yield sources[begin:]
