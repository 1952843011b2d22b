"""How a translation is searched for. What these settings are is part of what makes two figures of translations comparable."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.errors import UsageError

__all__ = ["BEAM", "GREEDY", "LARGEST_BEAM", "Decoding"]

LARGEST_BEAM = 64
"""Beyond it translations get worse and a step takes memory: each hypothesis has a row of log-probabilities and a cache of its own."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """`beam` hypotheses are kept at once (1: greedy search), each at most `extra_length` pieces longer than its source.

    A hypothesis of n pieces, its END among them, has the score (sum of its log-probabilities) / ((5 + n) / 6) ** `length_penalty` (Wu et
    al. 2016, with the constants of the transformer's reference). Raises UsageError for numbers that are none of these.
    """

    beam: int = 4
    length_penalty: float = 0.6
    extra_length: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.beam <= LARGEST_BEAM:
            raise UsageError(f"beam: got {self.beam}; allowed: 1 (greedy) to {LARGEST_BEAM}")
        if not (math.isfinite(self.length_penalty) and 0 <= self.length_penalty <= 10):
            raise UsageError(f"length penalty: got {self.length_penalty:g}; allowed: 0 to 10")
        if not 0 <= self.extra_length <= 10_000:
            raise UsageError(f"extra length: got {self.extra_length}; allowed: 0 to 10000")

    def penalty(self, length: int) -> float:
        """Return what the log-probability of a hypothesis of so many pieces is divided by; it does not fall as the length grows."""
        return float(((5.0 + length) / 6.0) ** self.length_penalty)

    @property
    def signature(self) -> str:
        """The settings as one word, as records have them: ``greedy,+50`` or ``beam4,penalty0.6,+50``."""
        found = "greedy" if self.beam == 1 else f"beam{self.beam},penalty{self.length_penalty:g}"
        return f"{found},+{self.extra_length}"


GREEDY = Decoding(beam=1)
"""What evaluations during a run use."""

BEAM = Decoding()
"""What the end of a run and ``trainer evaluate`` use: the reference's settings."""
