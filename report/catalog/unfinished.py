"""A run without ``summary.json``, as it was killed or still works: what its records tell of it so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ...core.errors import UsageError
from ...records.schema import Clock
from ...records.store.run_directory import RunState
from ...records.summary.summary import summarise
from ..series.throughput import checkpoint_pauses, end_translations, pauses, training_clock
from .run import Run

__all__ = ["as_recorded"]


def as_recorded(run: Run) -> Run:
    """Return the run; where it has no summary, with one computed from its records, up to the last of them.

    Of its clock, start-up is what the events before the run clock tell, the end what there is so far; what was never written down
    (calibration, padding, updates counted where they are applied) is None there. Raises UsageError where it has recorded no update.
    """
    if run.has_summary:
        return run
    updates = math.fsum(record.count for record in run.steps())
    if not updates:
        advice = "wait until it trains" if run.state in ("starting", "running") else "there is nothing to explain"
        raise UsageError(f"run: {str(run.path)!r} has no summary.json and no record of an update, for it is {run.state}; {advice}.")
    clock = _clock(run)
    sizes: Mapping[str, Any] = (run.job.get("dataset") or {}).get("sizes") or {}
    summary = summarise(
        run.path,
        clock,
        state=cast("RunState", run.status["state"]),
        updates_scheduled=int(updates),
        updates_applied=None,
        examples_per_epoch=sizes.get("train"),
        nodes_sharing_cores=_nodes_sharing_cores(run),
    )
    return run.with_figures(summary, clock.run_seconds)


def _clock(run: Run) -> Clock:
    """Return the run's times as far as its records go."""
    times = [*(record.time_seconds for record in run.evals), *(event.time_seconds for event in run.events)]
    last = max([*times, *(record.time_seconds for record in run.steps())])
    init = max(0.0, -min(times, default=0.0))
    saving = math.fsum(end - start for start, end in checkpoint_pauses(run.events))
    evaluating = math.fsum(record.seconds for record in run.evals)
    translated = end_translations(run.events)
    translating = math.fsum(end - start for start, end in translated)
    train = float(training_clock(np.array([last]), sorted([*pauses(run.evals, run.events), *translated]))[0])
    return Clock(init, last, max(0.0, train), evaluating, saving, init + last, translate_seconds=translating)


def _nodes_sharing_cores(run: Run) -> int | None:
    """Return how many nodes are on the machine that has most of them; None where that is not known, or each was given its own cores."""
    if not run.nodes or run.job.get("cores_per_node"):
        return None
    return max(Counter(str(node.get("hostname")) for node in run.nodes).values())
