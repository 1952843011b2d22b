"""What to mind about a conclusion, in words: what it does not hold for, and what was left out of it."""

from __future__ import annotations

from ..comparison.ratios import Ratio
from ..diagnosis.text import percent
from .conclusion import Conclusion
from .number_words import times_text
from .set_ups import SetUp

__all__ = ["cautions"]

MOST_TOO_FAST = 3


def _too_fast(more: SetUp, fewer: SetUp, times: Ratio) -> str:
    ideal = int(more.values["nodes"]) / int(fewer.values["nodes"])
    return (
        f"{more.label} is {times_text(times.ratio)} as fast as {fewer.label}, more than the ideal {ideal:.3g} ×: one of them was measured "
        "wrong or had another advantage, so that nodes are not judged by the two; measure both again."
    )


def cautions(conclusion: Conclusion) -> list[str]:
    """Return what to mind, a sentence each."""
    found = []
    nodes = max((run.summary.get("nodes_sharing_cores") or 1 for one in conclusion.set_ups.all for run in one.runs), default=1)
    if nodes > 1:
        found.append(f"Up to {nodes} nodes shared the same cores: this holds on these shared cores, not of as many machines.")
    found += [_too_fast(more, fewer, times) for more, fewer, times in conclusion.set_ups.beyond_ideal[:MOST_TOO_FAST]]
    for one in conclusion.set_ups.disturbed:
        taken = percent(one.by.fraction)
        found.append(f"{one.run.name} is left out: other programs took {taken} of the CPU time that its tasks asked for.")
    if any(run.summary.get("synthetic") for one in conclusion.set_ups.all for run in one.runs):
        found.append("The data is synthetic: there is nothing to learn.")
    return found
