"""How finely a time to a target is known: it is looked for at evaluations alone."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from ..catalog.run import Run
from ..catalog.summary_rows import number
from .set_ups import SetUp

__all__ = ["coarse_gaps"]

FINE = 0.1
"""A time to a target that is known to this fraction of itself is fine enough to be compared."""


def coarse_gaps(set_ups: Iterable[SetUp]) -> list[float]:
    """Return for each run the seconds of the run clock between the evaluation that reached the target and the one before, or the start.

    Empty where that is at most a tenth of the time to the target, in half of the runs at least.
    """
    gaps = [found for one in set_ups for run in one.runs if (found := _gap(run)) is not None]
    if not gaps or median(gap / seconds for gap, seconds in gaps) <= FINE:
        return []
    return sorted(gap for gap, _ in gaps)


def _gap(run: Run) -> tuple[float, float] | None:
    """Return that of a run, and its time to the target; None for a run that has no such time, or recorded no evaluation."""
    seconds = number(run.summary.get("time_to_target_seconds"))
    times = [record.time_seconds for record in run.tests]
    if not seconds or not times:
        return None
    return seconds - max((time for time in times if time < seconds), default=0.0), seconds
