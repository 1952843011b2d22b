"""Caveats of single runs, and the figures that each makes incomparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.console import one_line
from ...core.setting import ALL, LEARNING, LEARNT, RESOURCES, TARGET, TIME, WORK
from ...core.units import Cadence
from ...records.store.schema import EventRecord
from ...records.text import count_text, duration_text, number_text
from ...records.time_shares import nodes_of_last_segment
from ..runs.cpu_starvation import cpu_starvation
from ..runs.run import Run, diverged
from .factor_values import ended_by_patience
from .factors import RULES


@dataclass(frozen=True, slots=True)
class Caveat:
    """A caveat of a single run that makes figures of it incomparable with any other's."""

    key: str
    label: str
    text: Callable[[Run], str | None]  # what it is in a run, if any
    confounds: frozenset[str]
    why: str
    # Repeats all have it or none (equal), or have the same text (same); else a row has it if all or any of its runs have it.
    repeats: Literal["equal", "same", "all", "any"] = "equal"

    def of_repeats(self, repeats: Sequence[Run]) -> str | None:
        """Return the caveat of a row with these repeats, if any."""
        texts = [text for run in repeats if (text := self.text(run)) is not None]
        return texts[0] if texts and (self.repeats == "any" or len(texts) == len(repeats)) else None

    def identity(self, run: Run) -> str | bool | None:
        """Return a value that is equal for repeats."""
        text = self.text(run)
        return text if self.repeats == "same" else self.repeats == "equal" and text is not None


CHANGED = "changed when it was resumed"
CHANGED_MEANS = "the figures add up parts under different settings"
_HARMLESS = {"epochs", "steps", "examples", "until"} | {rule.key for rule in RULES if not (rule.confounds or rule.also or rule.independent)}


def changed_on_resume(run: Run) -> list[str]:
    """Return the relevant settings that differ in an earlier segment of a resumed run."""
    segments = run.job.get("segments", ())[1:]
    return sorted({field for segment in segments for field in segment.get("changed") or ()} - _HARMLESS)


def changed_text(run: Run, means: str | None = None) -> str | None:
    """Return the sentence on a run resumed with other settings, and what this `means`, if any."""
    changed = changed_on_resume(run)
    if not changed:
        return None
    shown = "those of the last" if nodes_of_last_segment(run.job) == run.job.get("nodes", 1) else "those that were asked for"
    return f"The run {CHANGED} ({', '.join(changed)}): {means or f'{CHANGED_MEANS}; the settings are {shown}'}."


def _yes(applies: Callable[[Run], Any]) -> Callable[[Run], str | None]:
    return lambda run: "yes" if applies(run) else None


def _ended(run: Run) -> str | None:
    return None if run.summary["state"] == "succeeded" else str(run.summary["state"])


def _resumed(run: Run) -> bool:
    return bool(run.summary.get("resumed")) and not changed_on_resume(run)


def _how_often(count: int, seconds: float | None, what: str) -> str | None:
    times = "once" if count == 1 else f"{count} times"
    return (times if seconds is None else f"{times}, {duration_text(seconds)} {what}") if count else None


def _restarts(run: Run) -> str | None:
    count = (run.summary.get("restarts") or 0) - (run.summary.get("worker_restarts") or 0)
    return _how_often(count, run.summary.get("restart_seconds_lost"), "lost")


def _worker_restarts(run: Run) -> str | None:
    return _how_often(run.summary.get("worker_restarts") or 0, run.summary.get("worker_absent_seconds"), "in all")


MAX_NAMED_RESTARTS = 3  # only the last ones are named with their causes


def restarts_text(run: Run) -> str | None:
    """Return the restarts of a run and their cost in sentences, if any."""
    sentences = []
    if how := _restarts(run):
        places = [_restart_place(event) for event in run.events if event.event == "run_restarted"][-MAX_NAMED_RESTARTS:]
        where = f" It resumed {', '.join(places)}." if places else ""
        sentences.append(f"The run was restarted ({how}): updates since the checkpoint were repeated, and its tasks restarted.{where}")
    if how := _worker_restarts(run):
        sentences.append(f"A worker was lost and replaced ({how}): the others trained meanwhile, and no update was repeated.")
    causes = [event.detail.get("cause") for event in run.events if event.event in ("attempt_failed", "task_failed")]
    known = list(dict.fromkeys(one_line(str(cause)) for cause in causes if cause))[-MAX_NAMED_RESTARTS:]
    return " ".join([*sentences, *([f"Cause: {'; '.join(known)}."] if known else [])]) if sentences else None


def _restart_place(event: EventRecord) -> str:
    nodes = event.detail.get("nodes")
    step, on = event.detail.get("step"), f" on {len(nodes)} nodes" if isinstance(nodes, list) else ""
    return f"at {number_text(event.time_seconds, 2)} s after update {count_text(step if isinstance(step, int) else None)}{on}"


def _profiled(run: Run) -> bool:
    updates = run.summary.get("profiled_updates")  # missing in older releases
    return bool(run.job.get("profile") if updates is None else updates)


def _has_other_speed(run: Run) -> bool:
    """Return whether the speed is that of the updates that were not profiled."""
    return run.summary.get("profiled_updates") is not None and run.summary.get("examples_per_second") is not None


def _profiling(run: Run) -> str | None:
    if not (_profiled(run) and _has_other_speed(run)):
        return None
    return f"{run.summary['profiled_updates']:,} updates in {duration_text(run.summary.get('profile_seconds'))}"


def _starved(run: Run) -> str | None:
    contention = cpu_starvation(run.summary)
    return None if contention is None else f"{contention.fraction:.0%}"


def _learnt_by_the_clock(run: Run) -> str | None:
    by_clock = Cadence.parse(run.job.get("eval_every") or "1epoch").unit == "seconds"
    ended_by_evaluation = run.summary.get("target_reached") or ended_by_patience(run)
    return _starved(run) if run.summary["mode"] == "async" or (by_clock and ended_by_evaluation) else None


MAX_ADAPTER_COST = 1.03  # of a step, over the model's own; below that is the noise of two measurements


def _adapter(run: Run) -> str | None:
    cost = run.summary.get("adapter_cost")
    return None if cost is None or cost <= MAX_ADAPTER_COST else f"{run.summary.get('model_method')}, {cost:.2f} × the time of a step"


LEARNT_UNDER_CONTENTION = "learnt under contention"
_TIME_AND_RESOURCES = frozenset({TIME, TARGET, RESOURCES})
CAVEATS: tuple[Caveat, ...] = (
    Caveat("state", "state", _ended, ALL, "the figures cover only the finished part", "same"),
    Caveat("diverged", "loss NaN or infinite", lambda run: diverged(run.summary), ALL, "its speed is not that of training"),
    Caveat(
        "synthetic",
        "synthetic data",
        _yes(lambda run: run.summary.get("synthetic")),
        LEARNING,
        "images and labels are random, so quality has no meaning",
    ),
    Caveat("resumed", "resumed", _yes(_resumed), frozenset({TIME, RESOURCES}), "the figures include several starts"),
    Caveat("restarted", "restarted after failures", _restarts, _TIME_AND_RESOURCES, "its time includes restarts and repeated work"),
    Caveat("lacked workers", "a worker was lost and replaced", _worker_restarts, WORK, "fewer workers shared the updates for a time"),
    Caveat("profiled", "profiled", _profiling, _TIME_AND_RESOURCES, "tracing took time and memory"),
    Caveat(
        "profiled throughout",
        "profiled, and without a speed",
        _yes(lambda run: _profiled(run) and not _has_other_speed(run)),
        WORK,
        "too few updates were not traced, or an earlier version did not separate them",
    ),
    Caveat("starved", "CPU contention", _starved, WORK, "other programs took this share of the CPU time that its tasks needed", "all"),
    Caveat(
        LEARNT_UNDER_CONTENTION,
        "CPU contention that affects quality",
        _learnt_by_the_clock,
        LEARNT,
        "the staleness, or the update at which the run ended, depends on CPU contention",
        "any",
    ),
    Caveat("adapter", "costly adapter of the model", _adapter, WORK, "the model by itself takes less time", "any"),
    Caveat("changed", CHANGED, lambda run: ", ".join(changed_on_resume(run)) or None, ALL, CHANGED_MEANS, "same"),
)
