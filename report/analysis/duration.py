"""The duration of the planned run, estimated from its measured part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from ...core.errors import UsageError
from ...core.job import saved_every
from ...core.units import Cadence
from ...records.text import count_text
from ...records.time_shares import last_segment
from ..runs.run import Run, number, train_size
from ..runs.series import checkpoint_pauses, end_translations, pauses, training_clock
from ..runs.series_arrays import Floats, Integers, StepSeries
from .evidence import NAMES, Answer, percent, time_text

MAX_BLOCKS = 10  # of equal training time; each holds several groups of updates
MIN_BLOCKS = 4  # for a band; from so many on the first block, which warms up, is excluded
UNSEEN = 0.1  # fraction allowed for later changes of the machine, by choice (docs/explain.md)
# Student's t for a two-sided 90 % interval, by degrees of freedom.
_T = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83}


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive updates (maybe a fraction) and their seconds of training, without pauses."""

    steps: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run: its updates, and how often it evaluates and saves."""

    total_steps: int
    evaluate: Cadence
    save: Cadence | None  # None or end: only the last state, if `save_final`
    save_final: bool
    steps_per_epoch: float | None  # maybe a mean, None if unknown
    translate: bool = False  # test sentences at the end


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known so far: updates, blocks, evaluations, pauses and final translations."""

    steps: int
    blocks: Sequence[Block]
    evaluation_seconds: Sequence[float]
    stall_seconds: Sequence[float]
    translation_seconds: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """The remaining seconds with a band; None (not counted) for what was never measured."""

    seconds: float
    low_seconds: float | None
    high_seconds: float | None
    steps: int
    step_seconds: float
    train_seconds: float
    evaluations: int
    evaluate_seconds: float | None
    saves: int
    save_seconds: float | None
    translate_seconds: float | None

    @property
    def half_width(self) -> float | None:
        """Half of the band, in seconds."""
        return None if self.high_seconds is None else self.high_seconds - self.seconds


def read_plan(job: Mapping[str, Any], total_steps: int, steps_per_epoch: float | None) -> Plan:
    """Return the plan of a run from its ``job.json``."""
    save = saved_every(job.get("checkpoint_every"), job.get("max_restarts", 0))
    evaluate = Cadence.parse(job.get("eval_every") or "1epoch")
    final, translate = bool(job.get("save_final", True)), bool(job.get("translation_signatures"))
    return Plan(total_steps, evaluate, None if save is None else Cadence.parse(save), final, steps_per_epoch, translate)


def steps_per_epoch(job: Mapping[str, Any], examples_per_step: float | None) -> float | None:
    """Return the updates of an epoch, from the plan or the examples of an update, if known."""
    if len(job.get("segments") or ()) <= 1 and job.get("epochs") and job.get("total_steps") and not job.get("steps"):
        return float(job["total_steps"] / job["epochs"])
    size = train_size(job)
    if not size or not examples_per_step:
        return None
    return float(max(1, math.ceil(size / examples_per_step - 1e-6)))


def make_blocks(ends: Floats, counts: Integers, stops: Sequence[tuple[float, float]], most: int = MAX_BLOCKS) -> list[Block]:
    """Return at most `most` blocks of equal training time from groups of updates [groups]."""
    # `ends` are seconds since the measured part began, `stops` the pauses. Groups of async workers overlap; their ends count.
    if not len(ends):
        return []
    trained = np.maximum.accumulate(training_clock(ends.astype(np.float64), stops))
    if trained[-1] <= 0:
        return []
    edges = np.linspace(0.0, trained[-1], min(most, len(ends)) + 1)
    done = np.interp(edges, np.concatenate([[0.0], trained]), np.concatenate([[0], np.cumsum(counts)]).astype(np.float64))
    return [Block(float(steps), float(seconds)) for steps, seconds in zip(np.diff(done), np.diff(edges), strict=True)]


def estimate(plan: Plan, measured: Measured) -> Estimate | None:
    """Return the rest of the plan at the mean pace of the blocks, if any."""
    # The band is a 90 % prediction interval (Student's t over the blocks), with that of evaluations and `UNSEEN` added in quadrature.
    steady = measured.blocks[1:] if len(measured.blocks) >= MIN_BLOCKS else measured.blocks
    steps, seconds = math.fsum(block.steps for block in steady), math.fsum(block.seconds for block in steady)
    if steps <= 0:
        return None
    left = max(0, plan.total_steps - measured.steps)
    step_seconds = seconds / steps
    train = left * step_seconds
    evaluations = _count_due(plan.evaluate, plan, measured.steps, train, at_end=True)
    saves = 0 if plan.save is None else _count_due(plan.save, plan, measured.steps, train, at_end=plan.save_final)
    if plan.save is None or plan.save.unit == "end":
        saves = int(plan.save_final and left > 0)
    translations = int(plan.translate and left > 0)
    evaluate = _repeated_seconds(evaluations, measured.evaluation_seconds)
    save = _repeated_seconds(saves, measured.stall_seconds)
    translate = _repeated_seconds(translations, measured.translation_seconds)
    whole = train + (evaluate or 0.0) + (save or 0.0) + (translate or 0.0)
    if len(measured.blocks) < MIN_BLOCKS:
        low = high = None
    else:
        spread = math.hypot(
            _train_spread(steady, step_seconds, train),
            _evaluation_spread(evaluations, measured.evaluation_seconds),
            _evaluation_spread(translations, measured.translation_seconds),
            UNSEEN * whole,
        )
        low, high = max(0.0, whole - spread), whole + spread
    return Estimate(whole, low, high, left, step_seconds, train, evaluations, evaluate, saves, save, translate)


def _count_due(cadence: Cadence, plan: Plan, done: int, train_seconds: float, *, at_end: bool) -> int:
    total = plan.total_steps
    if total <= done:
        return 0
    if cadence.unit == "seconds":
        return int(train_seconds / cadence.amount) + at_end
    if cadence.unit == "end":
        return int(at_end)
    every = cadence.amount * (1.0 if cadence.unit == "steps" else plan.steps_per_epoch or math.inf)
    return max(0, _multiples(total, every, at_end) - _multiples(done, every, False))


def _multiples(steps: int, every: float, at_end: bool) -> int:
    whole = int((steps + 0.5) / every) if math.isfinite(every) else 0
    return whole + (at_end and (whole == 0 or abs(whole * every - steps) > 0.5))


def _repeated_seconds(count: int, values: Sequence[float]) -> float | None:
    """Return the seconds of `count` more, without the first, which compiles or caches."""
    if not count:
        return 0.0
    return count * median(values[1:] or values) if values else None


def _train_spread(steady: Sequence[Block], step_seconds: float, train_seconds: float) -> float:
    paces = [block.seconds / block.steps for block in steady if block.steps > 0]
    if len(paces) < 2 or not train_seconds:
        return 0.0
    coming = max(1.0, train_seconds / fmean(block.seconds for block in steady))
    error = stdev(paces) * math.sqrt(1 / len(paces) + 1 / coming)
    return _T.get(len(paces) - 1, 1.65) * error / step_seconds * train_seconds


def _evaluation_spread(count: int, values: Sequence[float]) -> float:
    known = values[1:] or values
    if not count or not known:
        return 0.0
    if len(known) == 1:
        return 0.5 * count * known[0]
    return _T.get(len(known) - 1, 1.65) * stdev(known) * math.sqrt(1 / len(known) + 1 / count) * count


KEY, QUESTION = "duration", "how long"
NOTABLE_REST = 0.01  # share of the run clock; less is rounding
START_UP_SPREAD = 0.5  # relative difference of start-up and shutdown between runs of a job (docs/explain.md)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The plan asked about: the run's if both are None, else so many updates or epochs in all."""

    steps: int | None = None
    epochs: int | None = None


AS_PLANNED = Wanted()


@dataclass(frozen=True, slots=True)
class _Part:
    steps: int
    began_seconds: float
    began_step: int
    examples_per_step: float | None
    measured: Measured
    trained_seconds: float
    paused_seconds: float
    translated: bool  # ended with the final translation


def duration(run: Run, series: StepSeries, wanted: Wanted) -> Answer | None:
    """Return the planned or `wanted` duration, if there is a pace. Raises UsageError."""
    part = _measured_part(run, series)
    per_epoch = steps_per_epoch(run.job, part.examples_per_step)
    total = _total_steps(run, wanted, part, per_epoch)
    if total is None:
        return None
    if total <= part.steps or (wanted == AS_PLANNED and run.summary["state"] == "succeeded"):  # a target may have ended it early
        return _finished_duration(run, part)
    plan = read_plan(run.job, total, per_epoch)
    left = estimate(plan, part.measured)
    complete = estimate(plan, replace(part.measured, steps=part.began_step))  # all of the plan's evaluations and checkpoints
    if left is None or complete is None:
        return None
    whole = _estimate_total(run, part, left, complete)
    return Answer(KEY, QUESTION, _text(run, wanted, part, left, whole), whole)


def _measured_part(run: Run, series: StepSeries) -> _Part:
    began, first = last_segment(run.job)
    measured_groups = (series.group_time_seconds > began) & ~series.profiled_groups
    ends, counts = series.group_time_seconds[measured_groups] - began, series.count[measured_groups]
    paused = sorted([*pauses(run.evals, run.events), *series.profile_pauses()])
    stops = [(start - began, end - began) for start, end in paused if end > began]
    evaluations = [record.seconds for record in run.evals if record.time_seconds > began]
    saved = [end - start for start, end in checkpoint_pauses(run.events) if end > began]
    translated = end_translations(run.events)
    last_translations = [end - start for start, end in translated if end > began]
    steps = int(run.summary["steps"])  # as written, even if records were lost since
    examples = float(series.group_examples[measured_groups].sum() / counts.sum()) if len(counts) else None
    measured = Measured(steps, make_blocks(ends, counts, stops), evaluations, saved, [end - start for start, end in translated])
    trained = float(training_clock(np.array([ends.max()]), stops)[0]) if len(ends) else 0.0
    translating = math.fsum(last_translations) or run.summary["translate_seconds"]  # an aborted one has no event
    paused_seconds = math.fsum(evaluations) + math.fsum(saved) + translating
    return _Part(steps, began, first, examples, measured, trained, paused_seconds, bool(last_translations))


def _total_steps(run: Run, wanted: Wanted, part: _Part, per_epoch: float | None) -> int | None:
    if wanted.steps is None and wanted.epochs is None:
        total: int | None = run.job.get("total_steps")
        return total
    if wanted.steps is not None:
        total, option_text = wanted.steps, f"--planned-steps {wanted.steps}"
    elif per_epoch is None:
        raise UsageError("planned-epochs: this run does not tell how many updates an epoch has; give --planned-steps instead.")
    else:
        total, option_text = round((wanted.epochs or 0) * per_epoch), f"--planned-epochs {wanted.epochs}"
    if total <= part.steps:
        option = option_text.split()[0].removeprefix("--")
        raise UsageError(f"{option}: {option_text} is {total:,} updates, and the run has made {part.steps:,} already; give more than that.")
    return total


def _finished_duration(run: Run, part: _Part) -> Answer:
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
    patience, planned = run.summary.get("patience"), run.job.get("total_steps")
    if run.summary["target_reached"]:
        return f"until {run.job['until']} was reached, {count_text(steps)} updates"
    if patience is not None and patience["exhausted"] and planned is not None and planned > steps:
        spent = f"{count_text(steps)} of {count_text(planned)} planned updates"
        return f"until --patience {count_text(patience['evaluations'])} was exhausted ({spent})"
    return f"for {count_text(steps)} updates"


def _estimate_total(run: Run, part: _Part, left: Estimate, complete: Estimate) -> dict[str, Any]:
    summary = run.summary
    made = _dataset_made_seconds(run)
    fixed = summary["total_seconds"] - summary["run_seconds"] - made
    other_seconds = max(0.0, summary["run_seconds"] - part.began_seconds - part.trained_seconds - part.paused_seconds)
    paused = {
        "eval_seconds": complete.evaluate_seconds,
        "checkpoint_seconds": complete.save_seconds,
        "translate_seconds": complete.translate_seconds,
    }
    pause = math.fsum(seconds or 0.0 for seconds in paused.values())
    run_seconds = part.began_seconds + part.trained_seconds + left.train_seconds + pause + other_seconds
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
        "evaluations": complete.evaluations,
        "checkpoints": complete.saves,
        **paused,
        "left": asdict(left),
    }


def _dataset_made_seconds(run: Run) -> float:
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
