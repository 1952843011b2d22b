"""What set-ups have learnt, where no target says which of them is good enough: the best and the worst by the headline metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from ...core.untrusted.console import one_line
from ...metrics.base import MetricInfo
from ...records.text.numbers import number_text
from ..catalog.run import Run
from ..catalog.summary_rows import number
from ..comparison.factors import METRICS
from .set_ups import SetUp, SetUps

__all__ = ["learnt_told"]


def learnt_told(found: SetUps) -> list[str]:
    """Return a sentence on the best and the worst set-up by their last evaluation; none where there is a target, or nothing to learn.

    Only set-ups that can be compared in what they have learnt are, and only where that is all of them.
    """
    every = found.all
    runs = [run for one in every for run in one.runs]
    if len(every) < 2 or any(run.summary.get("target") is not None or run.summary.get("synthetic") for run in runs):
        return []
    info = _headline(runs)
    if info is None or any(not found.comparable(every[0], one, METRICS) for one in every):
        return []
    means = [(one, fmean(values)) for one in every if len(values := _values(one, info)) == len(one.runs)]
    if len(means) < len(every):
        return []
    ordered = sorted(means, key=lambda pair: pair[1], reverse=info.better == "higher")
    (best, highest), (worst, lowest) = ordered[0], ordered[-1]
    name = one_line(info.label)
    if highest == lowest:
        return [f"All end with the same test {name}, {number_text(highest)}."]
    both = f"{number_text(highest)} with {best.label}, the best, and {number_text(lowest)} with {worst.label}, the worst"
    return [f"Test {name} at the end: {both}. --until '{info.name}{_that_all_reach(info, lowest)}' tells which is there first."]


def _headline(runs: Sequence[Run]) -> MetricInfo | None:
    """Return the metric that all runs have in the first place, None where that is not one."""
    found = {run.metrics[0] for run in runs if run.metrics}
    return found.pop() if len(found) == 1 and all(run.metrics for run in runs) else None


def _values(one: SetUp, info: MetricInfo) -> list[float]:
    known = [number((run.summary.get("eval") or {}).get(info.name)) for run in one.runs]
    return [value for value in known if value is not None and math.isfinite(value)]


def _that_all_reach(info: MetricInfo, worst: float) -> str:
    """Return a target that the worst set-up reached too, in two digits: ``>=0.81``."""
    unit = 10.0 ** (math.floor(math.log10(abs(worst))) - 1) if worst else 1.0
    if info.better == "higher":
        return f">={math.floor(worst / unit) * unit:.6g}"
    return f"<={math.ceil(worst / unit) * unit:.6g}"
