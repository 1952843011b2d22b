"""How long does the rest of a training take? The estimate that ``trainer explain`` and ``trainer watch`` share.

What was measured goes in as blocks of training, evaluations and pauses for checkpoints; what is to come follows from the plan. Nothing
here reads a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from ...core.job import saved_every
from ...core.units import Cadence
from ..catalog.batches import train_size
from ..series.arrays import Floats, Integers
from ..series.throughput import training_clock

__all__ = ["MOST_BLOCKS", "Block", "Estimate", "Measured", "Plan", "blocks_of", "estimate", "plan_of", "steps_per_epoch"]

MOST_BLOCKS = 10
"""Blocks of equal training time whose paces are compared: enough for a deviation, long enough to hold several groups of updates."""

LEAST_BLOCKS = 4
"""With fewer the scatter of the pace is not known, and there is no band. From so many on the first block is left out: it warms up."""

UNSEEN = 0.1
"""What a measured part cannot show is how the machine is later: this fraction is allowed for it, by choice (docs/explain.md)."""

_T = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83}
"""Student's t that 5% lie above, by degrees of freedom: nine in ten lie within plus and minus that."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive updates: how many (maybe with a fraction), and the seconds of training they took, pauses left out."""

    steps: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What the run is to do in all: its updates, and what comes between them.

    `evaluate` and `save` say how often; `save` is None, or ``end``, where only the last state is saved, and that only with `save_final`.
    `steps_per_epoch` may be a mean; None where it is not known.
    `translate` says whether all test sentences are translated when the training is over.
    """

    total_steps: int
    evaluate: Cadence
    save: Cadence | None
    save_final: bool
    steps_per_epoch: float | None
    translate: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known so far: updates done, blocks of training in their order, and seconds of each evaluation and pause for a checkpoint.

    `translation_seconds` are those of the translations of all test sentences with which earlier parts of the run have ended.
    """

    steps: int
    blocks: Sequence[Block]
    evaluation_seconds: Sequence[float]
    stall_seconds: Sequence[float]
    translation_seconds: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """The rest of a training, in seconds, with a band around it; None for a band that is not known.

    `evaluate_seconds` is None where evaluations are to come and none was measured, so that they are not counted; `save_seconds`
    and `translate_seconds` (of all test sentences, at the end) likewise.
    """

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


def plan_of(job: Mapping[str, Any], total_steps: int, steps_per_epoch: float | None) -> Plan:
    """Return the plan of a run from its ``job.json``."""
    save = saved_every(job.get("checkpoint_every"), job.get("max_restarts", 0))
    evaluate = Cadence.parse(job.get("eval_every") or "1epoch")
    final, translate = bool(job.get("save_final", True)), bool(job.get("translation_signatures"))
    return Plan(total_steps, evaluate, None if save is None else Cadence.parse(save), final, steps_per_epoch, translate)


def steps_per_epoch(job: Mapping[str, Any], examples_per_step: float | None) -> float | None:
    """Return the updates of an epoch from ``job.json``: exact where the plan was given in epochs, else from the examples of an update.

    None where neither is known; what is due by epochs is then counted at the end alone.
    """
    if len(job.get("segments") or ()) <= 1 and job.get("epochs") and job.get("total_steps") and not job.get("steps"):
        return float(job["total_steps"] / job["epochs"])
    size = train_size(job)
    if not size or not examples_per_step:
        return None
    return float(max(1, math.ceil(size / examples_per_step - 1e-6)))


def blocks_of(ends: Floats, counts: Integers, stops: Sequence[tuple[float, float]], most: int = MOST_BLOCKS) -> list[Block]:
    """Return at most `most` blocks of equal training time from groups of updates, in the order of their ends.

    `ends` [groups] are seconds since the measured part began, `counts` the updates of each, `stops` when training stood still. Groups of
    async workers overlap; what counts is when they ended. There are no more blocks than groups.
    """
    if not len(ends):
        return []
    trained = np.maximum.accumulate(training_clock(ends.astype(np.float64), stops))
    if trained[-1] <= 0:
        return []
    edges = np.linspace(0.0, trained[-1], min(most, len(ends)) + 1)
    done = np.interp(edges, np.concatenate([[0.0], trained]), np.concatenate([[0], np.cumsum(counts)]).astype(np.float64))
    return [Block(float(steps), float(seconds)) for steps, seconds in zip(np.diff(done), np.diff(edges), strict=True)]


def estimate(plan: Plan, measured: Measured) -> Estimate | None:
    """Return what is left of the plan, also of one that began anew (`Measured.steps` of 0); None where no pace is known.

    Each update takes the mean of the blocks, the first left out where there are four or more. The band is a prediction interval for the
    mean pace of the rest (90%, Student's t over the blocks), with that of the evaluations and `UNSEEN` added in quadrature.
    """
    steady = measured.blocks[1:] if len(measured.blocks) >= LEAST_BLOCKS else measured.blocks
    steps, seconds = math.fsum(block.steps for block in steady), math.fsum(block.seconds for block in steady)
    if steps <= 0:
        return None
    left = max(0, plan.total_steps - measured.steps)
    step_seconds = seconds / steps
    train = left * step_seconds
    evaluations = _due(plan.evaluate, plan, measured.steps, train, at_end=True)
    saves = 0 if plan.save is None else _due(plan.save, plan, measured.steps, train, at_end=plan.save_final)
    if plan.save is None or plan.save.unit == "end":
        saves = int(plan.save_final and left > 0)
    translations = int(plan.translate and left > 0)
    evaluate = _times(evaluations, measured.evaluation_seconds)
    save = _times(saves, measured.stall_seconds)
    translate = _times(translations, measured.translation_seconds)
    whole = train + (evaluate or 0.0) + (save or 0.0) + (translate or 0.0)
    if len(measured.blocks) < LEAST_BLOCKS:
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


def _due(cadence: Cadence, plan: Plan, done: int, train_seconds: float, *, at_end: bool) -> int:
    """Return how often something is due in the rest of a plan that takes `train_seconds` of training; the one at the end counts once."""
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
    """Return how many multiples of `every` lie in 1 … `steps`, and one more where the last update is none and something is due there.

    An epoch's mean of updates may be off by rounding: within half an update of a multiple counts as it.
    """
    whole = int((steps + 0.5) / every) if math.isfinite(every) else 0
    return whole + (at_end and (whole == 0 or abs(whole * every - steps) > 0.5))


def typical_seconds(values: Sequence[float]) -> float | None:
    """Return what one more takes: the median, without the first where there are several, as that compiles or reads for the first time."""
    return median(values[1:] if len(values) > 1 else values) if values else None


def _times(count: int, values: Sequence[float]) -> float | None:
    each = typical_seconds(values)
    return 0.0 if not count else None if each is None else count * each


def _train_spread(steady: Sequence[Block], step_seconds: float, train_seconds: float) -> float:
    """Half of the 90% interval for the seconds of the rest, from how the blocks' paces differ."""
    paces = [block.seconds / block.steps for block in steady if block.steps > 0]
    if len(paces) < 2 or not train_seconds:
        return 0.0
    coming = max(1.0, train_seconds / fmean(block.seconds for block in steady))
    error = stdev(paces) * math.sqrt(1 / len(paces) + 1 / coming)
    return _T.get(len(paces) - 1, 1.65) * error / step_seconds * train_seconds


def _evaluation_spread(count: int, values: Sequence[float]) -> float:
    """The same for `count` evaluations; of a single one measured half of it is taken to be uncertain."""
    known = values[1:] if len(values) > 1 else values
    if not count or not known:
        return 0.0
    if len(known) == 1:
        return 0.5 * count * known[0]
    return _T.get(len(known) - 1, 1.65) * stdev(known) * math.sqrt(1 / len(known) + 1 / count) * count
