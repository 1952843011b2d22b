"""Which run is fastest, in a sentence: by examples/s and by time to target, among runs that can be compared; never by steps/s.

Jobs are ranked, not single runs: runs of one job, with the same seed or others, count as one, by their mean, however a table shows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.untrusted.console import one_line
from ...records.text.numbers import duration_text, rate_text
from .comparability import Comparability
from .factors import SPEED, TARGET
from .rows import Row

__all__ = ["JUDGED", "USUAL_SCATTER", "verdicts"]

JUDGED = ("examples_per_second", "time_to_target_seconds")
"""The figures that verdicts are on, in the order of the verdicts."""

USUAL_SCATTER = 0.05
"""By about so much the speed of one and the same job differs from run to run on a machine that does nothing else."""


def verdicts(entries: Sequence[Row], comparability: Comparability) -> list[str]:
    """Return a sentence on the speed of some jobs, and one on the time to target where there is one; none for a single run."""
    if len(entries) == 1:
        return [_one_job(entries[0])] if len(entries[0].runs) > 1 else []
    targets = [_target(entries, comparability)] if sum(entry.converged is not None for entry in entries) > 1 else []
    return [_speed(entries, comparability), *targets]


def _one_job(entry: Row) -> str:
    mean, sigma = entry.figures["examples_per_second"], entry.sigmas.get("examples_per_second")
    spread = "" if sigma is None else f" ({rate_text(mean)} ± {rate_text(sigma)})"
    return f"Fastest by examples/s: no verdict: they are {len(entry.runs)} runs of one job, which differ by chance{spread}."


def _speed(entries: Sequence[Row], comparability: Comparability) -> str:
    known = [index for index, entry in enumerate(entries) if entry.figures["examples_per_second"]]  # one that trained nothing has 0
    fair = comparability.comparable(SPEED, known)
    if len(fair) < 2:
        return "Fastest by examples/s: no verdict: no two of them can be compared."
    ordered = sorted(fair, key=lambda index: -entries[index].figures["examples_per_second"])
    first, second = (entries[index] for index in ordered[:2])
    ratio = first.figures["examples_per_second"] / second.figures["examples_per_second"]
    by = f"{rate_text(first.figures['examples_per_second'])}, {ratio:.2f}x {second.label}"
    caveat = _caveat(first, second, "examples_per_second")
    return f"Fastest by examples/s: {first.label} ({by}){caveat}.{_left_out(entries, ordered)}"


def _target(entries: Sequence[Row], comparability: Comparability) -> str:
    aimed = [index for index, entry in enumerate(entries) if entry.converged is not None]
    fair = comparability.comparable(TARGET, aimed)
    if len(fair) < 2:
        return "Fastest to the target: no verdict: no two of them can be compared."
    goal = one_line(str(entries[fair[0]].figures["target"]))
    there = sorted((index for index in fair if entries[index].all_converged), key=lambda index: _time(entries[index]))
    missed = [entries[index].label for index in fair if not entries[index].all_converged]
    failed = f" Not reached, or not by every run, of: {'; '.join(missed)}." if missed else ""
    if not there:
        return f"Fastest to {goal}: none reached it in every run.{_left_out(entries, fair)}"
    first = entries[there[0]]
    if len(there) == 1:
        return f"Fastest to {goal}: {first.label} ({duration_text(_time(first))}).{failed}{_left_out(entries, fair)}"
    second = entries[there[1]]
    by = f"{duration_text(_time(first))}, {_time(second) / _time(first):.2f}x as fast as {second.label}"
    caveat = _caveat(first, second, "time_to_target_seconds")
    return f"Fastest to {goal}: {first.label} ({by}){caveat}.{failed}{_left_out(entries, fair)}"


def _time(entry: Row) -> float:
    return float(entry.figures["time_to_target_seconds"])


def _caveat(one: Row, other: Row, key: str) -> str:
    """Return what is to be known of a difference: nothing where repeats of both show that it is larger than their scatter.

    Repeats scatter where two means are nearer than their standard deviations together. What a single run would scatter by is not known.
    """
    sigmas = [entry.sigmas.get(key) for entry in (one, other)]
    if None not in sigmas:
        together = math.hypot(*(sigma for sigma in sigmas if sigma is not None))
        near = abs(one.figures[key] - other.figures[key]) <= together
        return "; the difference is within the scatter of the repeats" if near else ""
    if abs(one.figures[key] / other.figures[key] - 1) < USUAL_SCATTER:
        return f"; runs of one job differ by as much as that ({USUAL_SCATTER:.0%}), which repeats would show"
    single = [entry.label for entry, sigma in zip((one, other), sigmas, strict=True) if sigma is None]
    runs = "one run each" if len(single) == 2 else f"{single[0]} is one run"
    return f"; {runs}: repeats (--repeats) tell whether that is more than scatter"


def _left_out(entries: Sequence[Row], fair: Sequence[int]) -> str:
    left = [entry.label for index, entry in enumerate(entries) if index not in fair]
    return f" Not comparable, and left out: {'; '.join(left)}." if left else ""
