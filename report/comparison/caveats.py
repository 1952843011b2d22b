"""What is wrong with single runs, whatever they are compared with: a table of it, with the figures that it makes incomparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.units import Cadence
from ...core.untrusted.console import one_line
from ...records.schema import EventRecord
from ...records.summary.segments import nodes_of_last_segment
from ...records.text.numbers import count_text, duration_text, number_text
from ..catalog.cpu_starvation import cpu_starvation
from ..catalog.divergence import diverged
from ..catalog.run import Run
from .factor_values import ended_by_patience
from .factors import ALL, LEARNING, LEARNT, RESOURCES, RULES, TARGET, TIME, WORK

__all__ = ["CAVEATS", "LEARNT_UNDER_CONTENTION", "Caveat", "changed_on_resume", "changed_text", "restarts_text"]


@dataclass(frozen=True, slots=True)
class Caveat:
    """Something about a single run that makes figures of it not comparable with any other's.

    `found` says what, or None; runs of which it says the same are alike. `told` says more of it, where there is more to say. `repeats`
    says what it makes of repeats: ``alike`` ones alone stand in one row; else runs that it is said of are repeats of those that it is not,
    and their row has it where it is said of ``all`` or of ``any`` of them.
    """

    key: str
    label: str
    found: Callable[[Run], str | None]
    confounds: frozenset[str]
    why: str
    told: Callable[[Run], str | None] | None = None
    repeats: Literal["alike", "all", "any"] = "alike"

    def text(self, repeats: Sequence[Run]) -> str | None:
        """Return what is to be said of the repeats of a row, at least one; None where nothing is wrong with them."""
        those = [run for run in repeats if self.found(run) is not None]
        said = bool(those) and (self.repeats == "any" or len(those) == len(repeats))
        return (self.told or self.found)(those[0]) if said else None


CHANGED = "changed when it was resumed"
CHANGED_MEANS = "the figures add up parts under different settings"
"""What is said of a run with `changed_on_resume`, and what it means."""

_HARMLESS = {"epochs", "steps", "examples", "until"} | {rule.key for rule in RULES if not (rule.confounds or rule.also or rule.independent)}
"""Settings that may be others in each segment of a run: how far it is to go, and those on which no figure depends."""


def changed_on_resume(run: Run) -> list[str]:
    """Return which settings that matter were others in an earlier segment of a run that went on."""
    segments = run.job.get("segments", ())[1:]
    return sorted({field for segment in segments for field in segment.get("changed") or ()} - _HARMLESS)


def changed_text(run: Run, means: str | None = None) -> str | None:
    """Return the sentence about a run that went on with other settings, and what that `means` for the figures; None of any other run."""
    changed = changed_on_resume(run)
    if not changed:
        return None
    shown = "those of the last" if nodes_of_last_segment(run.job) == run.job.get("nodes", 1) else "those that were asked for"
    return f"The run {CHANGED} ({', '.join(changed)}): {means or f'{CHANGED_MEANS}; the settings are {shown}'}."


def _ended(run: Run) -> str | None:
    return None if run.summary["state"] == "succeeded" else str(run.summary["state"])


def _diverged(run: Run) -> str | None:
    return None if diverged(run.summary) is None else "yes"


def _diverged_since(run: Run) -> str | None:
    return diverged(run.summary)


def _synthetic(run: Run) -> str | None:
    return "yes" if run.summary.get("synthetic") else None


def _resumed(run: Run) -> str | None:
    return "yes" if run.summary.get("resumed") and not changed_on_resume(run) else None


def _restarts_of_all(run: Run) -> int:
    """How often all tasks of a run were started anew."""
    return (run.summary.get("restarts") or 0) - (run.summary.get("worker_restarts") or 0)


def _restarted(run: Run) -> str | None:
    return "yes" if _restarts_of_all(run) else None


def _restarted_how(run: Run) -> str | None:
    count = _restarts_of_all(run)
    if not count:
        return None
    lost = run.summary.get("restart_seconds_lost")
    times = "once" if count == 1 else f"{count} times"
    return times if lost is None else f"{times}, {duration_text(lost)} lost"


def _lacked_workers(run: Run) -> str | None:
    return "yes" if run.summary.get("worker_restarts") else None


def _lacked_workers_how(run: Run) -> str | None:
    count = run.summary.get("worker_restarts")
    if not count:
        return None
    times = "once" if count == 1 else f"{count} times"
    absent = run.summary.get("worker_absent_seconds")
    return times if absent is None else f"{times}, {duration_text(absent)} in all"


MAX_NAMED_RESTARTS = 3
"""Restarts that are named one by one; of more the last ones."""


def restarts_text(run: Run) -> str | None:
    """Return how often a run went on by itself after losses, and what that cost; None of a run that lost nothing."""
    found = []
    if how := _restarted_how(run):
        places = [_restart_place(event) for event in run.events if event.event == "run_restarted"][-MAX_NAMED_RESTARTS:]
        where = f" It resumed {', '.join(places)}." if places else ""
        found.append(f"The run was restarted ({how}): updates since the checkpoint were repeated, and its tasks restarted.{where}")
    if how := _lacked_workers_how(run):
        found.append(f"A worker was lost and replaced ({how}): the others trained meanwhile, and no update was repeated.")
    causes = [event.detail.get("cause") for event in run.events if event.event in ("attempt_failed", "task_failed")]
    known = list(dict.fromkeys(one_line(str(cause)) for cause in causes if cause))[-MAX_NAMED_RESTARTS:]
    return " ".join([*found, *([f"Cause: {'; '.join(known)}."] if known else [])]) if found else None


def _restart_place(event: EventRecord) -> str:
    nodes = event.detail.get("nodes")
    step, on = event.detail.get("step"), f" on {len(nodes)} nodes" if isinstance(nodes, list) else ""
    return f"at {number_text(event.time_seconds, 2)} s after update {count_text(step if isinstance(step, int) else None)}{on}"


def _changed(run: Run) -> str | None:
    return ", ".join(changed_on_resume(run)) or None


def _was_profiled(run: Run) -> bool:
    updates = run.summary.get("profiled_updates")  # an earlier release did not count them
    return bool(run.job.get("profile") if updates is None else updates)


def _profiled(run: Run) -> str | None:
    return "yes" if _was_profiled(run) and _profiled_throughout(run) is None else None


def _profiled_how(run: Run) -> str | None:
    updates, seconds = run.summary.get("profiled_updates"), run.summary.get("profile_seconds")
    return _profiled(run) and f"{updates:,} updates in {duration_text(seconds)}"


def _profiled_throughout(run: Run) -> str | None:
    known = run.summary.get("profiled_updates") is not None and run.summary.get("examples_per_second") is not None
    return "yes" if _was_profiled(run) and not known else None


def _starved(run: Run) -> str | None:
    return None if cpu_starvation(run.summary) is None else "yes"


def _starved_by(run: Run) -> str | None:
    found = cpu_starvation(run.summary)
    return None if found is None else f"{found.fraction:.0%}"


def _learnt_by_the_clock(run: Run) -> str | None:
    """Return whether what a contended run has learnt depends on its pace: async updates, and evaluations by the clock that end a run."""
    by_clock = Cadence.parse(run.job.get("eval_every") or "1epoch").unit == "seconds"
    ended_by_evaluation = run.summary.get("target_reached") or ended_by_patience(run)
    return _starved(run) if run.summary["mode"] == "async" or (by_clock and ended_by_evaluation) else None


LEARNT_UNDER_CONTENTION = "learnt under contention"

CAVEATS: tuple[Caveat, ...] = (
    Caveat("state", "state", _ended, ALL, "the figures cover only the finished part"),
    Caveat("diverged", "loss NaN or infinite", _diverged, ALL, "its speed is not that of training", _diverged_since),
    Caveat("synthetic", "synthetic data", _synthetic, LEARNING, "images and labels are random, so quality has no meaning"),
    Caveat("resumed", "resumed", _resumed, frozenset({TIME, RESOURCES}), "the figures include several starts"),
    Caveat(
        "restarted",
        "restarted after failures",
        _restarted,
        frozenset({TIME, TARGET, RESOURCES}),
        "its time includes restarts and repeated work",
        _restarted_how,
    ),
    Caveat(
        "lacked workers",
        "a worker was lost and replaced",
        _lacked_workers,
        WORK,
        "fewer workers shared the updates for a time",
        _lacked_workers_how,
    ),
    Caveat(
        "profiled",
        "profiled",
        _profiled,
        frozenset({TIME, TARGET, RESOURCES}),
        "tracing took time and memory",
        _profiled_how,
    ),
    Caveat(
        "profiled throughout",
        "profiled, and without a speed",
        _profiled_throughout,
        WORK,
        "too few updates were not traced, or an earlier version did not separate them",
    ),
    Caveat(
        "starved",
        "CPU contention",
        _starved,
        WORK,
        "other programs took this share of the CPU time that its tasks needed",
        _starved_by,
        repeats="all",
    ),
    Caveat(
        LEARNT_UNDER_CONTENTION,
        "CPU contention that affects quality",
        _learnt_by_the_clock,
        LEARNT,
        "the staleness, or the update at which the run ended, depends on CPU contention",
        _starved_by,
        repeats="any",
    ),
    Caveat("changed", CHANGED, _changed, ALL, CHANGED_MEANS),
)
"""What is wrong with one run whatever it is compared with."""
