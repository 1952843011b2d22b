"""The error about an answer that cannot be, whichever room of the engine notices it."""

from __future__ import annotations

__all__ = ["ImpossibleAnswerError"]


class ImpossibleAnswerError(Exception):
    """A leading task has answered what cannot be; whoever knows its node turns this into the run's failure."""
