"""Translates sentences with a trained state on this machine, without a run."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.protocol.translation_messages import hypotheses_of, translate_message
from ...models.decoding.search import Hypothesis
from ...models.decoding.settings import Decoding
from .task import StandaloneTask

__all__ = ["translated"]


def translated(task: StandaloneTask, sources: Sequence[Sequence[int]], decoding: Decoding, n_best: int) -> list[list[Hypothesis]]:
    """Return the best hypotheses of each sentence, which ends with END. Errors as of `StandaloneTask`."""
    message = task.ask(translate_message(sources, decoding, n_best))
    try:
        return hypotheses_of(message, len(sources))
    except ValueError as error:
        task.refuse(str(error))
