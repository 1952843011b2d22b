"""How does the time of a step relate to the use of the network, over the course of the run?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...records.text.numbers import bytes_text, seconds_text
from ..catalog.run import Run
from ..diagnosis.verdict import Explanation
from ..series.arrays import Floats, NodeSeries, StepSeries
from ..series.throughput import pauses, training_clock
from .answer import Answer, digits3, percent
from .common_grid import LEAST_POINTS, correlation, grid_of, on_grid

__all__ = ["step_time_and_network"]

FLAT = 0.05
"""A step time whose standard deviation is less than this part of its mean has no course to speak of."""

ALIKE = 0.1
"""Two rates or amounts that differ by less than this are the same."""

LEAST_GROUPS = 5
"""Async: groups of updates in an interval, at least; of those at its ends a part is outside."""

MOST_NODES = 64
"""Nodes whose traffic is added up, the first ones; of more the sum is of these."""


def step_time_and_network(run: Run, explanation: Explanation, series: StepSeries, nodes: Sequence[NodeSeries]) -> Answer | None:
    """Return how step time and traffic (sent by all nodes) go together; None where nothing is exchanged or nothing was sampled."""
    if explanation.evidence.summary["workers"] == 1 and explanation.evidence.summary["mode"] == "sync":
        return None
    found = _course(run, explanation, series, nodes[:MOST_NODES])
    if found is None:
        return None
    sync = explanation.evidence.summary["mode"] == "sync"
    figures = _figures(*found)
    return Answer("step_time_and_network", "step time", _text(figures, sync=sync), figures)


def _course(run: Run, explanation: Explanation, series: StepSeries, nodes: Sequence[NodeSeries]) -> tuple[Floats, Floats, Floats] | None:
    """Return (updates, seconds of training, bytes sent by all nodes) in intervals of training time, where all are known [k].

    Where a group's updates are reported at its end, those of an interval are off by a part of a group. That changes the bytes of an update,
    which in sync mode are always the same; in async mode an interval has several groups.
    """
    began = explanation.evidence.part_began_seconds or 0.0
    if not len(series.count) or not nodes:
        return None
    groups = float(np.median(series.seconds)) if len(series.seconds) else 0.0
    least = groups if explanation.evidence.summary["mode"] == "sync" else LEAST_GROUPS * groups
    grid = grid_of(nodes, began, float(run.summary["run_seconds"]), least)
    if grid is None:
        return None
    ends = np.concatenate([[0.0], np.maximum.accumulate(series.group_time_seconds)])
    done = np.interp(grid.edges, ends, np.concatenate([[0], np.cumsum(series.count * ~series.profiled_groups)]).astype(np.float64))
    stops = sorted([*pauses(run.evals, run.events), *series.profile_pauses()])
    steps, trained = np.diff(done), np.diff(training_clock(grid.edges, stops))
    rates = np.sum([on_grid(grid, node.time_seconds, node.sent_bytes_per_second) for node in nodes], axis=0)
    known = (steps > 0) & (trained > 0.5 * grid.seconds) & np.isfinite(rates)
    if not known.any():
        return None
    return steps[known], trained[known], rates[known] * grid.seconds


def _figures(steps: Floats, trained: Floats, amounts: Floats) -> dict[str, Any]:
    count, step_seconds, sent = len(steps), trained / steps, amounts / trained
    spread = float(np.std(step_seconds) / np.mean(step_seconds))
    figures: dict[str, Any] = {
        "intervals": count,
        "step_seconds": float(trained.sum() / steps.sum()),
        "step_seconds_spread": spread,
        "sent_bytes_per_second": float(amounts.sum() / trained.sum()),
        "correlation": None,
        "fastest_tenth": None,
        "slowest_tenth": None,
    }
    if count >= LEAST_POINTS and spread >= FLAT:
        order, tenth = np.argsort(step_seconds, kind="stable"), max(1, count // 10)
        figures["correlation"] = correlation(step_seconds, sent)[0]
        for name, chosen in (("fastest_tenth", order[:tenth]), ("slowest_tenth", order[-tenth:])):
            made, seconds, amount = (float(values[chosen].sum()) for values in (steps, trained, amounts))
            figures[name] = {
                "step_seconds": seconds / made,
                "sent_bytes_per_second": amount / seconds,
                "bytes_per_step": amount / made,
            }
    return figures


def _text(figures: dict[str, Any], *, sync: bool) -> str:
    sent = bytes_text(figures["sent_bytes_per_second"], per_second=True)
    count, of = figures["intervals"], "" if sync else " per update of all workers"
    mean = f"{seconds_text(figures['step_seconds'])}{of}, mean of {count} sampled intervals, at {sent} sent by all nodes while training"
    if count < LEAST_POINTS:
        return f"{mean}; correlation of step time and sent rate not computed: {count} intervals of at least {LEAST_POINTS}"
    fast, slow = figures["fastest_tenth"], figures["slowest_tenth"]
    if fast is None:
        spread = percent(figures["step_seconds_spread"])
        return (
            f"{mean}; correlation of step time and sent rate not computed: the step time is flat (standard deviation {spread} of the mean)"
        )
    r = "" if figures["correlation"] is None else f" (correlation {digits3(figures['correlation'])})"
    rates = " and ".join(
        f"{seconds_text(part['step_seconds'])} at {bytes_text(part['sent_bytes_per_second'], per_second=True)}" for part in (fast, slow)
    )
    told = f"fastest and slowest tenth of {count} sampled intervals: {rates} sent by all nodes while training{r}{of and f', seconds{of}'}"
    return told if sync else f"{told}; {_meaning(fast, slow)}"


def _meaning(fast: dict[str, float], slow: dict[str, float]) -> str:
    """What the two tenths of an async run say: the traffic of an update is mostly the same, so that its rate falls with the pace."""
    if not fast["sent_bytes_per_second"]:
        return "nothing was sent"
    per_step = slow["bytes_per_step"] / fast["bytes_per_step"]
    if abs(slow["sent_bytes_per_second"] / fast["sent_bytes_per_second"] - 1) < ALIKE:
        return "the sent rate is the same in slow steps, so they move more bytes"
    if abs(per_step - 1) < ALIKE:
        return f"a step moves {bytes_text(fast['bytes_per_step'])} in both, so the sent rate follows the speed"
    return f"a slow step moves {digits3(per_step)} times the bytes of a fast one"
