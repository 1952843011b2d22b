"""Orders to translate the first sentences of a split, a part at a time, and the sums that the answers of all leading tasks add up to."""

from __future__ import annotations

from ...data.base import Split
from ...models.decoding.quality import TranslationQuality
from ..protocol.impossible_answers import ImpossibleAnswerError
from ..protocol.messages import Message
from ..protocol.translation_messages import decode_message
from .decodings import Decoded

__all__ = ["ROWS_OF_A_TASK", "TranslationOrders"]

ROWS_OF_A_TASK = 256
"""Hypotheses that a leading task follows for one order, at most. How long that takes depends on the model, the sentences and the machine,
from a second to many minutes; a task that is at it says so once a second, between two steps, and that is what a stall time-out waits for.
"""


class TranslationOrders:
    """The orders for one evaluation, each of sentences that follow each other in the split, of whatever lengths.

    `signature` says what the scores are comparable with, `without_numbers` of how many sentences the model's output was not finite.
    A sign of life is an answer that is not complete, and says nothing of the sentences.
    """

    def __init__(self, quality: TranslationQuality, split: Split, decoded: Decoded, leaders: int) -> None:
        self._quality, self._decoded, self._leaders = quality, decoded, leaders
        self.split, self.decoding = split, decoded.decoding
        self._at_once = leaders * max(1, ROWS_OF_A_TASK // decoded.decoding.beam)
        self._awaited = {start: set(range(leaders)) for start in range(0, decoded.sentences, self._at_once)}
        self._counted = dict.fromkeys(self._awaited, 0.0)
        self._sums = dict.fromkeys(quality.sums, 0.0)
        self._seconds = [0.0] * leaders
        self.without_numbers = 0
        self.signature = decoded.signature(quality)

    @property
    def messages(self) -> list[Message]:
        """What every leading task is to be sent, in this order."""
        return [decode_message(self.split, start, self._stop(start), self.decoding) for start in self._awaited]

    def _stop(self, start: int) -> int:
        return min(start + self._at_once, self._decoded.sentences)

    def add(self, leader: int, message: Message) -> None:
        """Add what a leading task answers. Raises ImpossibleAnswerError where the answer cannot be."""
        start, sums, sentences = message["start"], message["sums"], self._quality.count(message["sums"])
        if leader not in self._awaited.get(start, ()):
            raise ImpossibleAnswerError(f"translations of the sentences from {start} on, which nobody asked for")
        if not message["complete"]:
            return
        if (wrong := self._quality.wrong_with(sums, sentences)) is not None:
            raise ImpossibleAnswerError(f"translations with {wrong}")
        if message["without_numbers"] > sentences:
            raise ImpossibleAnswerError(f"translations of {sentences:g} sentences, {message['without_numbers']} of them without numbers")
        self._awaited[start].discard(leader)
        self._counted[start] += sentences
        size = self._stop(start) - start
        if self._counted[start] > size or (not self._awaited[start] and self._counted[start] != size):
            raise ImpossibleAnswerError(f"translations of {self._counted[start]:g} sentences, where {size} were asked for")
        self._sums = {name: value + sums[name] for name, value in self._sums.items()}
        self.without_numbers += message["without_numbers"]
        self._seconds[leader] += message["seconds"]

    @property
    def complete(self) -> bool:
        """Whether every leading task has answered every order."""
        return not any(self._awaited.values())

    @property
    def done(self) -> int:
        """How many sentences have been translated by now."""
        return int(sum(self._counted.values()))

    @property
    def sums(self) -> dict[str, float]:
        """What all sentences add up to, by name."""
        return dict(self._sums)

    @property
    def sentences(self) -> int:
        """How many sentences are translated."""
        return self._decoded.sentences

    @property
    def seconds(self) -> float:
        """How long the slowest leading task was at it."""
        return max(self._seconds)
