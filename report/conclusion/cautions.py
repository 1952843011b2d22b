"""What to mind about a conclusion, in words: what it does not hold for, and what was left out of it."""

from __future__ import annotations

from statistics import fmean

from ...records.text.numbers import duration_text
from ..catalog.cpu_starvation import contention_judged
from ..catalog.summary_rows import number
from ..comparison.names import MOST_NAMED, some_of
from ..comparison.ratios import Ratio, geometric_mean
from ..diagnosis.words import percent
from .conclusion import Conclusion
from .number_words import counted, times_text
from .set_ups import SPEED_FIGURE, SetUp, SetUps
from .set_ups import TARGET_FIGURE as TARGET
from .target_times import coarse_gaps

__all__ = ["cautions"]

MOST_TOO_FAST = 3


def _too_fast(more: SetUp, fewer: SetUp, times: Ratio) -> str:
    ideal = int(more.values["nodes"]) / int(fewer.values["nodes"])
    return (
        f"{more.label} is {times_text(times.ratio)} as fast as {fewer.label}, above the ideal {ideal:.3g} ×: a measurement is wrong or "
        "another advantage helped, so this pair does not count for the effect of nodes; measure both again."
    )


MOST_STARTS = 3

LEAST_START = 0.1
"""Starting that takes this fraction of the time to the target, or more, may change who is first."""


def _target_times(conclusion: Conclusion) -> list[str]:
    """Say what times to a target leave out, and how finely they are known."""
    best = next((one for one in conclusion.best if one.figure is TARGET), None)
    if best is None:
        return []
    found = []
    named = [one for one in (best.set_up, *best.rivals, best.worst) if one is not None]
    starts = [(one, fmean(known)) for one in named if (known := _starts(one))]
    if any(seconds >= LEAST_START * geometric_mean(one.figures(TARGET)) for one, seconds in starts):
        told = ", ".join(f"{duration_text(seconds)} with {one.label}" for one, seconds in starts[:MOST_STARTS])
        found.append(f"Time to target excludes start-up: {told}.")
    measured = [one for one in conclusion.set_ups.all if one.figures(TARGET)]
    if gaps := coarse_gaps(measured):
        apart = duration_text(gaps[0]) if gaps[0] == gaps[-1] else f"{duration_text(gaps[0])} to {duration_text(gaps[-1])}"
        every = {str(run.job.get("eval_every")) for one in measured for run in one.runs}
        now = f" (--eval-every {every.pop()})" if len(every) == 1 else ""
        found.append(f"Time to target has the resolution of evaluations{now}, {apart} here; evaluate more often for a finer one.")
    return found


def _starts(one: SetUp) -> list[float]:
    """Return how long each run took to start, as far as that is known."""
    return [seconds for run in one.runs if (seconds := number(run.summary.get("init_seconds"))) is not None]


def _contention(found: SetUps) -> list[str]:
    """Say what CPU contention from other programs did to figures: which it voids, and where it widens intervals or was not measured."""
    lines = [
        f"CPU contention: other programs took {percent(one.by.fraction)} of the CPU time that {one.run.name} needed; its speed and "
        "times are not used."
        for one in found.disturbed[:MOST_NAMED]
    ]
    if (more := len(found.disturbed) - MOST_NAMED) > 0:
        lines.append(f"CPU contention: the speed and times of {counted(more, 'more run')} are not used either.")
    ranked = [one for one in found.all if found.ranks(one)]
    slowed = [one for one in ranked if len(ranked) > 1 and one.contended]
    if slowed:
        named = some_of([f"{one.label} up to {times_text(one.contention_factor)} as fast" for one in slowed])
        widened = any(one.interval(SPEED_FIGURE) for one in slowed)
        what = "* Widened for CPU contention" if widened else "CPU contention may have reduced throughput"
        lines.append(f"{what}; without it: {named}.")
    unjudged = [run.name for one in found.all for run in one.runs if not contention_judged(run.summary)]
    if unjudged:
        lines.append(f"CPU contention was not measured (run under 2 s, or no samples): {some_of(unjudged)}.")
    if any(one.run.summary["mode"] == "async" for one in found.disturbed):
        lines.append("CPU contention changes the staleness of async updates, and so the quality of async runs.")
    return lines


def cautions(conclusion: Conclusion) -> list[str]:
    """Return what to mind, a sentence each."""
    found = []
    summaries = [run.summary for one in conclusion.set_ups.all for run in one.runs]
    nodes = max((summary.get("nodes_sharing_cores") or 1 for summary in summaries), default=1)
    if nodes > 1:
        found.append("Nodes share cores: results do not predict separate machines.")
    found += _target_times(conclusion)
    found += [_too_fast(more, fewer, times) for more, fewer, times in conclusion.set_ups.beyond_ideal[:MOST_TOO_FAST]]
    found += _contention(conclusion.set_ups)
    if any(run.summary.get("synthetic") for one in conclusion.set_ups.all for run in one.runs):
        found.append("The data is synthetic, so quality has no meaning.")
    return found
