"""What was the learning rate over the updates, and why has it that shape?"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.learning_rate import explained_schedule
from ...core.untrusted.console import one_line
from ...records.summary.summary import read_job
from ..catalog.run import Run
from ..series.arrays import StepSeries
from .answer import Answer, digits3

__all__ = ["learning_rate"]

MOST_POINTS = 50
"""Of the course in ``--json``."""


def learning_rate(run: Run, series: StepSeries) -> Answer | None:
    """Return the learning rates that the updates had, and the schedule's reason from ``job.json``; None where nothing was trained."""
    if series.learning_rate is None:
        raise ValueError("the series was read without its learning rates")
    finite = np.isfinite(series.learning_rate)
    steps, rates = series.step[finite], series.learning_rate[finite]
    if not len(steps):
        return None
    peak, least = int(np.argmax(rates)), int(np.argmin(rates))
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(MOST_POINTS, len(steps))).astype(np.int64))
    why = _why(run)
    figures: dict[str, Any] = {
        "schedule": run.job.get("schedule"),
        "why": why,
        "first": float(rates[0]),
        "last": float(rates[-1]),
        "last_step": int(steps[-1]),
        "peak": float(rates[peak]),
        "peak_step": int(steps[peak]),
        "least": float(rates[least]),
        "least_step": int(steps[least]),
        "course": [[int(steps[index]), float(rates[index])] for index in chosen],
    }
    if rates[peak] == rates[least]:
        course = f"constant {digits3(figures['first'])}"
    else:
        course = (
            f"{digits3(figures['first'])} at first, peak {digits3(figures['peak'])} at update {figures['peak_step'] + 1:,}, "
            f"{digits3(figures['last'])} at update {figures['last_step'] + 1:,}"
        )
    return Answer("learning_rate", "learning rate", one_line(why if why.startswith(course) else f"{course}: {why}"), figures)


def _why(run: Run) -> str:
    total = run.job.get("total_steps")
    try:
        job = read_job(run.job)
    except ValueError:
        return "reason unknown: another version wrote job.json"
    changed = len(run.job.get("segments") or ()) > 1
    text = explained_schedule(job, total)
    return f"{text}; these are the settings since the run was resumed" if changed else text
