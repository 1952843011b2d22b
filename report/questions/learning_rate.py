"""What was the learning rate over the updates, and why has it that shape?"""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec
import numpy as np

from ...core.learning_rate import explained_schedule
from ...core.untrusted.console import one_line
from ...records.schema import Count, Seconds
from ...records.summary.summary import read_job
from ..catalog.run import Run
from ..series.fast_jsonl import read_pieces
from .answer import Answer, digits3

__all__ = ["learning_rate"]

MOST_POINTS = 50
"""Of the course in ``--json``."""


class _RateLine(msgspec.Struct, gc=False):
    """What the course of the learning rate needs of a line of ``steps.jsonl``."""

    schema: Literal[1]
    step: Count
    count: Count
    learning_rates: list[float | Literal["NaN", "Infinity", "-Infinity"]]
    time_seconds: Seconds


def learning_rate(run: Run) -> Answer | None:
    """Return the learning rates that the updates had, and the schedule's reason from ``job.json``; None where nothing was trained."""
    steps, rates = _recorded(run)
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
        course = f"{digits3(figures['first'])} throughout"
    else:
        course = (
            f"{digits3(figures['first'])} at first, peak {digits3(figures['peak'])} at update {figures['peak_step']:,}, "
            f"{digits3(figures['last'])} at update {figures['last_step']:,}"
        )
    return Answer("learning_rate", "learning rate", one_line(f"{course}: {why}"), figures)


def _recorded(run: Run) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Return updates and the rates that they had, in their order: of a group with one rate its first and last update."""
    numbers, values = array("q"), array("d")
    for lines in read_pieces(run.path / "steps.jsonl", _RateLine, "StepRecord", _sizes_agree):
        for line in lines:
            rates_of = [float(rate) for rate in line.learning_rates]
            if len(rates_of) == 1:
                numbers.extend((line.step, line.step + line.count - 1))
                values.extend(rates_of * 2)
            else:
                numbers.extend(range(line.step, line.step + line.count))
                values.extend(rates_of)
    steps, rates = np.array(numbers, np.int64), np.array(values, np.float64)
    finite = np.isfinite(rates)
    order = np.argsort(steps[finite], kind="stable")
    return steps[finite][order], rates[finite][order]


def _sizes_agree(line: _RateLine) -> None:
    if line.count < 1 or len(line.learning_rates) not in (1, line.count):
        raise ValueError(f"{line.count} updates with {len(line.learning_rates)} learning rates")


def _why(run: Run) -> str:
    total = run.job.get("total_steps")
    try:
        job = read_job(run.job)
    except ValueError:
        return "why is not known: job.json is of another release"
    changed = len(run.job.get("segments") or ()) > 1
    text = explained_schedule(job, total)
    return f"{text}; of the last part, since the run was resumed" if changed else text
