"""Tries the metrics of an objective on made-up sums, before a run begins: what cannot be computed then could not be after the training."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ..core.errors import RunFailedError, UsageError
from ..metrics import Metric
from .decoding.quality import checked_sums
from .objectives import Objective

__all__ = ["refuse_uncomputable"]

TRIALS = 20
"""Of each metric, before it is refused. Made-up sums may be some that no evaluation has, of which a metric rightly has no value."""

LARGEST = 1000


def _made_up_sums(objective: Objective) -> Iterator[dict[str, float]]:
    """Yield sums of whole numbers above 0: all the same, then rising and falling in the objective's order, then at random."""
    names = objective.every_sum
    yield dict.fromkeys(names, 1.0)
    yield {name: float(place) for place, name in enumerate(names, 1)}
    yield {name: float(len(names) - place) for place, name in enumerate(names)}
    draw = random.Random(0)
    for _ in range(TRIALS - 3):
        yield {name: float(draw.randint(1, LARGEST)) for name in names}


def refuse_uncomputable(objective: Objective) -> None:
    """Raise UsageError, naming it, for a metric that fails on all made-up sums, and for a quality whose sentences add up to others."""
    try:
        if objective.translation is not None:
            checked_sums(objective.translation, ["a made-up sentence"], ["a made-up Sentence, as it should be"])
        for metric in objective.every_metric:
            _try(objective, metric)
    except RunFailedError as error:
        raise UsageError(f"model: {error}") from error


def _try(objective: Objective, metric: Metric) -> None:
    failed: RunFailedError | None = None
    for sums in _made_up_sums(objective):
        try:
            objective.value(metric, sums)
            return
        except RunFailedError as error:
            failed = failed or error
    if failed is not None:
        raise failed
