"""How long does the planned run take, judged by the part of it that was measured?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ...records.summary.segments import last_segment
from ...records.text.numbers import count_text
from ..catalog.run import Run
from ..catalog.summary_rows import number
from ..diagnosis.words import NAMES
from ..series.arrays import StepSeries
from ..series.throughput import checkpoint_pauses, end_translations, pauses, training_clock
from .answer import Answer, percent, time_text
from .time_left import Estimate, Measured, blocks_of, estimate, plan_of, steps_per_epoch

__all__ = ["AS_PLANNED", "Wanted", "duration"]

KEY, QUESTION = "duration", "how long"


NOTABLE_REST = 0.01
"""Of the run clock; less is rounding."""

START_UP_SPREAD = 0.5
"""Start-up and end of one job differ by so much from run to run (docs/explain.md): a fraction within which they are expected."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which plan is asked about: that of the run where both are None, else so many updates or epochs in all."""

    steps: int | None = None
    epochs: int | None = None


AS_PLANNED = Wanted()


@dataclass(frozen=True, slots=True)
class _Part:
    """The measured part: the run, or its last segment where it was resumed (with other settings, perhaps). Times are seconds.

    `translated`: it ended with the translation of all test sentences.
    """

    steps: int
    began_seconds: float
    began_step: int
    examples_per_step: float | None
    measured: Measured
    trained_seconds: float
    paused_seconds: float
    translated: bool


def duration(run: Run, series: StepSeries, wanted: Wanted) -> Answer | None:
    """Return how long the run takes as planned, or as `wanted`; None where it trained too little to have a pace.

    Raises UsageError for a plan that the run has behind it already, or that cannot be counted.
    """
    part = _measured_part(run, series)
    per_epoch = steps_per_epoch(run.job, part.examples_per_step)
    total = _total_steps(run, wanted, part, per_epoch)
    if total is None:
        return None
    if total <= part.steps or (wanted == AS_PLANNED and run.summary["state"] == "succeeded"):  # which its target may have ended early
        return _as_it_was(run, part)
    plan = plan_of(run.job, total, per_epoch)
    left = estimate(plan, part.measured)
    if left is None:
        return None
    whole = _whole(run, part, left, estimate(plan, _anew(part)))
    return Answer(KEY, QUESTION, _text(run, wanted, part, left, whole), whole)


def _measured_part(run: Run, series: StepSeries) -> _Part:
    began, first = last_segment(run.job)
    kept = (series.group_time_seconds > began) & ~series.profiled_groups
    ends, counts = series.group_time_seconds[kept] - began, series.count[kept]
    paused = sorted([*pauses(run.evals, run.events), *series.profile_pauses()])
    stops = [(start - began, end - began) for start, end in paused if end > began]
    evaluations = [record.seconds for record in run.evals if record.time_seconds > began]
    saved = [end - start for start, end in checkpoint_pauses(run.events) if end > began]
    translated = end_translations(run.events)
    own = [end - start for start, end in translated if end > began]
    steps = int(run.summary["steps"])  # as they were made, also where records were lost since
    examples = float(series.group_examples[kept].sum() / counts.sum()) if len(counts) else None
    measured = Measured(steps, blocks_of(ends, counts, stops), evaluations, saved, [end - start for start, end in translated])
    trained = float(training_clock(np.array([ends.max()]), stops)[0]) if len(ends) else 0.0
    translating = math.fsum(own) or run.summary["translate_seconds"]  # also of one that was cut off, which no event times
    beside = math.fsum(evaluations) + math.fsum(saved) + translating
    return _Part(steps, began, first, examples, measured, trained, beside, bool(own))


def _anew(part: _Part) -> Measured:
    """The same pace, of a part that begins at its first update: what all of the plan's evaluations and checkpoints take."""
    return replace(part.measured, steps=part.began_step)


def _total_steps(run: Run, wanted: Wanted, part: _Part, per_epoch: float | None) -> int | None:
    if wanted.steps is None and wanted.epochs is None:
        total: int | None = run.job.get("total_steps")
        return total
    if wanted.steps is not None:
        total, asked = wanted.steps, f"--planned-steps {wanted.steps}"
    elif per_epoch is None:
        raise UsageError("planned-epochs: this run does not tell how many updates an epoch has; give --planned-steps instead.")
    else:
        total, asked = round((wanted.epochs or 0) * per_epoch), f"--planned-epochs {wanted.epochs}"
    if total <= part.steps:
        option = asked.split()[0].removeprefix("--")
        raise UsageError(f"{option}: {asked} is {total:,} updates, and the run has made {part.steps:,} already; give more than that.")
    return total


def _as_it_was(run: Run, part: _Part) -> Answer:
    summary = run.summary
    names = ("init_seconds", "run_seconds", "train_seconds", "eval_seconds", "checkpoint_seconds", "translate_seconds", "profile_seconds")
    figures = {name: summary[name] for name in names}
    evaluations = len(run.evals)  # of all parts, as the seconds are
    parts = _parts(evaluations, *(figures[name] for name in names[2:-1]))
    if figures["profile_seconds"]:
        parts += f", profiling {time_text(figures['profile_seconds'])}"
    if run.job.get("translation_signatures") and not part.translated:
        parts += f", {'which' if figures['translate_seconds'] else f'without {_TRANSLATION}, which'} was not finished"
    rest = max(0.0, summary["run_seconds"] - math.fsum(figures[name] for name in names[2:]))
    lost = min(rest, summary.get("restart_seconds_lost") or 0.0)
    figures |= {"restart_seconds_lost": lost, "other_seconds": rest - lost}
    around = time_text(summary["total_seconds"] - summary["run_seconds"])
    if lost:
        parts += f", lost by restarts {time_text(lost)}"
    parts += _rest_text(rest - lost, summary["run_seconds"])
    text = f"{time_text(summary['total_seconds'])} {_why_it_ended(run, part.steps)}: start-up and shutdown {around}, {parts}"
    return Answer(KEY, QUESTION, text, {"predicted": False, "steps": part.steps, "total_seconds": summary["total_seconds"], **figures})


def _why_it_ended(run: Run, steps: int) -> str:
    """Say what a run that did all that it was to do came to its end by, and how many updates it had made by then."""
    patience, planned = run.summary.get("patience"), run.job.get("total_steps")
    if run.summary["target_reached"]:
        return f"until {run.job['until']} was reached, {count_text(steps)} updates"
    if patience is not None and patience["exhausted"] and planned is not None and planned > steps:
        spent = f"{count_text(steps)} of {count_text(planned)} planned updates"
        return f"until --patience {count_text(patience['evaluations'])} was exhausted ({spent})"
    return f"for {count_text(steps)} updates"


def _whole(run: Run, part: _Part, left: Estimate, anew: Estimate | None) -> dict[str, Any]:
    """The whole of the plan: what earlier segments took, start-up and end as measured, and of this segment all that the plan has in it."""
    summary = run.summary
    made = _dataset_made_seconds(run)
    fixed = summary["total_seconds"] - summary["run_seconds"] - made
    beside = max(0.0, summary["run_seconds"] - part.began_seconds - part.trained_seconds - part.paused_seconds)
    counted = () if anew is None else (anew.evaluate_seconds, anew.save_seconds, anew.translate_seconds)
    run_seconds = part.began_seconds + part.trained_seconds + left.train_seconds + math.fsum(one or 0.0 for one in counted) + beside
    half = None if left.half_width is None else math.hypot(left.half_width, START_UP_SPREAD * fixed)
    band = (None, None) if half is None else (max(0.0, fixed + run_seconds - half), fixed + run_seconds + half)
    return {
        "predicted": True,
        "planned_steps": left.steps + part.steps,
        "measured_steps": part.steps - part.began_step,
        "measured_seconds": summary["run_seconds"] - part.began_seconds,
        "total_seconds": fixed + run_seconds,
        "total_seconds_low": band[0],
        "total_seconds_high": band[1],
        "run_seconds": run_seconds,
        "earlier_seconds": part.began_seconds,
        "dataset_made_seconds": made,
        "init_seconds": summary["init_seconds"],
        "train_seconds": part.trained_seconds + left.train_seconds,
        "evaluations": 0 if anew is None else anew.evaluations,
        "eval_seconds": None if anew is None else anew.evaluate_seconds,
        "checkpoints": 0 if anew is None else anew.saves,
        "checkpoint_seconds": None if anew is None else anew.save_seconds,
        "translate_seconds": None if anew is None else anew.translate_seconds,
        "left": asdict(left),
    }


def _dataset_made_seconds(run: Run) -> float:
    """Return how long this run took to make the store of its dataset, which another run finds there; at most what was not training."""
    seconds = [number(event.detail.get("seconds")) or 0.0 for event in run.events if event.event == "dataset_made"]
    made = math.fsum(filter(math.isfinite, seconds))
    return min(max(0.0, made), float(run.summary["total_seconds"] - run.summary["run_seconds"]))


_TRANSLATION = NAMES["translating"]


def _parts(evaluations: int, train: float, evaluate: float | None, save: float | None, translate: float | None) -> str:
    counted = f"{evaluations:,} evaluation{'s' if evaluations != 1 else ''}"
    evaluated = f"{counted} not counted, as none was measured" if evaluate is None else f"{counted} {time_text(evaluate)}"
    saved = "checkpoints not counted, as none was measured" if save is None else f"checkpoint pauses {time_text(save)}"
    at_the_end = f", {_TRANSLATION} not counted, as none was measured" if translate is None else f", {_TRANSLATION} {time_text(translate)}"
    return f"training {time_text(train)}, {evaluated}, {saved}{'' if translate == 0.0 else at_the_end}"


def _rest_text(rest: float, run: float) -> str:
    """Return what of the run clock is in no part, with a comma before it; empty where that is next to nothing."""
    return f", {NAMES['other']} {time_text(rest)}" if 0.0 < NOTABLE_REST * run <= rest else ""


def _text(run: Run, wanted: Wanted, part: _Part, left: Estimate, whole: Mapping[str, Any]) -> str:
    high, total = whole["total_seconds_high"], whole["total_seconds"]
    band = " (no band: too little was measured)" if high is None else f" ± {percent((high - total) / total)}"
    planned = "planned " if wanted == AS_PLANNED else ""
    until = f", or less if {run.job['until']} is reached earlier" if run.job.get("until") else ""
    made = whole["dataset_made_seconds"]
    without = f" (without {time_text(made)} of dataset preparation)" if made else ""
    around = f"{time_text(total - whole['run_seconds'])}{without}"
    earlier = f"until it was resumed {time_text(part.began_seconds)}, then " if part.began_seconds else ""
    times = [whole[name] for name in ("train_seconds", "eval_seconds", "checkpoint_seconds", "translate_seconds")]
    parts = _parts(whole["evaluations"], *times) + _rest_text(
        whole["run_seconds"] - math.fsum(seconds or 0.0 for seconds in (part.began_seconds, *times)), whole["run_seconds"]
    )
    judged = f"{count_text(whole['measured_steps'])} updates in {time_text(whole['measured_seconds'])}"
    since = " since the run was resumed" if part.began_seconds else ""
    return (
        f"about {time_text(total)}{band} for {count_text(whole['planned_steps'])} {planned}updates{until}: "
        f"start-up and shutdown {around}, {earlier}{parts}; "
        f"estimated from {judged}{since}; {time_text(left.seconds)} left from there"
    )
