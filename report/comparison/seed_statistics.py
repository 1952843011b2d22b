"""Statistics over several runs of one job with different seeds: mean, standard deviation, time to target."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..catalog.cpu_starvation import TIMED_FIGURES, cpu_starvation
from ..catalog.summary_rows import metrics_at_the_end, metrics_of, number

__all__ = ["FIGURES", "TRIMMED_FROM", "aggregate", "common_name", "common_stem", "drop_fastest_and_slowest", "spread"]

TRIMMED_FROM = 5
"""From this many runs on the fastest and the slowest are left out, as MLPerf training does; not where more than one missed the target."""

FIGURES: Mapping[str, tuple[str, ...]] = {
    "time_to_target_seconds": ("time_to_target_seconds",),
    "loss": ("eval", "loss"),
    "examples_per_second": ("examples_per_second",),
    "epochs": ("epochs",),
    "train_seconds": ("train_seconds",),
    "run_seconds": ("run_seconds",),
    "init_seconds": ("init_seconds",),
}
"""What is averaged of every job, and where a summary has it."""


def aggregate(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation over the runs of one job (their summaries, at least one).

    - ``runs``: how many; ``converged``: how many reached the target, null where there is none
    - ``dropped``: names of the runs left out (see `drop_fastest_and_slowest`); ``contended``: of those with CPU contention
    - ``figures``: for each of `FIGURES` and each metric that was evaluated, also at the end (``end_<metric>``), ``mean``, ``sigma`` (sample
      standard deviation, n − 1; null for a single value) and ``values``, over how many runs; null where none has it. Speeds and times are
      of the runs without CPU contention from other programs, where there are such. So a time to target is
      the mean over those that reached it and stay, and a figure that is not finite in one run has no finite mean and no sigma
    """
    staying, dropped = drop_fastest_and_slowest(summaries)
    timed = [summary for summary in staying if cpu_starvation(summary) is None] or staying
    with_target = summaries[0]["target"] is not None
    evaluated = dict.fromkeys(name for summary in summaries for name in metrics_of(summary.get("eval")))
    metrics = {name: ("eval", name) for name in evaluated if name not in FIGURES}
    at_the_end = dict.fromkeys(name for summary in summaries for name in metrics_at_the_end(summary))
    metrics |= {f"end_{name}": ("translated", name) for name in at_the_end}
    target, *others = FIGURES
    found = {name: {**FIGURES, **metrics}[name] for name in (target, *metrics, *others)}
    return {
        "runs": len(summaries),
        "converged": sum(bool(summary["target_reached"]) for summary in summaries) if with_target else None,
        "dropped": [summary["run"] for summary in dropped],
        "contended": [summary["run"] for summary in summaries if cpu_starvation(summary) is not None],
        "figures": {
            name: spread([_reach(summary, path) for summary in (timed if name in TIMED_FIGURES else staying)])
            for name, path in found.items()
        },
    }


def drop_fastest_and_slowest(summaries: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the runs whose figures count, from the fastest to the slowest, and those left out.

    From `TRIMMED_FROM` runs on the fastest and the slowest are left out: by time to target, without a target by the run clock. A run that
    missed the target is the slowest. Where more than one did none is left out: another would stay, and the fastest be missing. Runs with
    CPU contention, whose times do not count, come last and are neither, where there are others.
    """
    with_target = summaries[0]["target"] is not None
    timed = [summary for summary in summaries if cpu_starvation(summary) is None] or summaries
    contended = [summary for summary in summaries if not any(summary is each for each in timed)]
    ordered = sorted(timed, key=lambda summary: _duration(summary, with_target))
    missed = sum(not summary["target_reached"] for summary in summaries) if with_target else 0
    if len(ordered) < TRIMMED_FROM or missed > 1:
        return [*ordered, *contended], []
    return [*ordered[1:-1], *contended], [ordered[0], ordered[-1]]


def _duration(summary: Mapping[str, Any], with_target: bool) -> float:
    seconds = summary["time_to_target_seconds"] if with_target else summary["run_seconds"]
    return math.inf if seconds is None else float(seconds)


def _reach(summary: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = summary
    for name in path:
        value = None if value is None else value.get(name)
    return number(value)


def spread(found: Sequence[float | None]) -> dict[str, Any] | None:
    """Return ``mean``, ``sigma`` and ``values`` (how many there are) of what was observed; None where nothing was.

    Values that are not finite make the mean so, and then there is no sigma.
    """
    values = [value for value in found if value is not None]
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return {"mean": sum(values), "sigma": None, "values": len(values)}  # the sum is what the mean is, NaN or infinite
    mean = values[0] if min(values) == max(values) else math.fsum(values) / len(values)  # a sum of equal values may be rounded
    squares = math.fsum((value - mean) ** 2 for value in values)
    return {"mean": mean, "sigma": math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None, "values": len(values)}


def common_name(names: Sequence[str]) -> str:
    """Return what to call several runs of one job: what their names begin with, without the end that tells them apart, and how many."""
    return f"{common_stem(names) or names[0]} ×{len(names)}"


def common_stem(names: Sequence[str]) -> str:
    """Return what names begin with that differ by a short number at their end; empty where they have nothing in common."""
    prefix = os.path.commonprefix(names)  # noqa: RUF071 — of names, which are no paths
    numbered = all(len(name) - len(prefix) <= _LONGEST_NUMBER for name in names)
    return re.sub(r"([-_,. ]+(seed|run|r)?)?[-_=,. ]*$", "", prefix) if numbered else ""


_LONGEST_NUMBER = 4  # names that differ by more than a number of a seed are not alike; then the first one stands for all
