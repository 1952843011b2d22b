"""Vectors of an update rule per parameter, in every backend, and learning rates.

``--ema-decay D``: e ← dₜ·e + (1 − dₜ)·w after update t (from 1), with dₜ = min(D, (1 + t) / (10 + t)), as with ``num_updates`` of
TensorFlow's ExponentialMovingAverage. It begins as the initial weights, whose part falls as 10! / t⁹ while dₜ rises to D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError
from .job import Job
from .patterns import matching
from .schedules import SCHEDULES, Updates

Weights = TypeVar("Weights")
MOMENTUM = "momentum"  # SGD: the accumulated gradient
FIRST_MOMENT, SECOND_MOMENT = "first_moment", "second_moment"  # Adam and AdamW: running means of the gradient and its square
EMA = "ema"  # with ``--ema-decay``; if absent it begins as the parameter, all others at zero


def slot_names(job: Job) -> tuple[str, ...]:
    """Return the slots' names per parameter; `EMA` starts as the parameter, others at zero."""
    average = (EMA,) if job.ema_decay else ()
    if job.optimizer == "sgd":
        return (*([MOMENTUM] if job.momentum else []), *average)
    return (FIRST_MOMENT, SECOND_MOMENT, *average)


def without_decay(job: Job) -> Job:
    """Return the job of the same update rule without weight decay."""
    return job.model_copy(update={"weight_decay": 0.0, "weight_decay_except": None})


def decayed_spans(job: Job, sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the bounds of what decays in the flat vector of parameters of these `sizes`."""
    exempt, spans, position = matching(job.weight_decay_except, sizes), list[tuple[int, int]](), 0
    for name, size in sizes.items():
        if name not in exempt:
            begin = spans.pop()[0] if spans and spans[-1][1] == position else position
            spans.append((begin, position + size))
        position += size
    return spans


def weights_to_evaluate(trained: Weights, slots: Mapping[str, Weights]) -> Weights:
    """Return the weights to evaluate in all backends and modes: the moving average, if any."""
    return slots.get(EMA, trained)


def averaging_rates(decay: float, updates: Any, minimum: Callable[[Any, float], Any] = np.minimum) -> Any:
    """Return 1 − dₜ, the new weights' part in their moving average, for updates t from 1.

    `minimum` is that of their framework.
    """
    return 1.0 - minimum((1.0 + updates) / (10.0 + updates), decay)


def check_model_width(job: Job, width: int | None) -> None:
    """Raise UsageError if the schedule needs the width of a model without one."""
    if SCHEDULES[job.schedule].needs_width and width is None:
        raise UsageError(
            f"schedule: got {job.schedule!r}, whose rate depends on the width of the model, and {job.model!r} has none; allowed there: "
            f"{', '.join(name for name, known in SCHEDULES.items() if not known.needs_width)}. A model says its width in ModelSpec.width."
        )


def base_learning_rate(job: Job) -> float:
    """Return the learning rate after ``--scale-lr``: lr · (global / base batch), or its root.

    Linear rule: Goyal et al. 2017 ("Accurate, Large Minibatch SGD"); root: Krizhevsky 2014 ("One weird trick for parallelizing
    convolutional neural networks"). In async mode the batch is that of an update, one worker's.
    """
    ratio = job.update_batch / job.base_batch_size
    return job.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[job.scale_lr]


def learning_rates(
    job: Job,
    first_step: int,
    count: int,
    steps_per_epoch: int,
    total_steps: float,
    positions: NDArray[np.float64] | None = None,
    width: int | None = None,
) -> NDArray[np.float64]:
    """Return the learning rates of updates first_step … first_step + count − 1, float64 [count].

    - constant: r
    - step: r · γ^⌊epoch / E⌋
    - cosine: r · (1 + cos(π · t / T)) / 2, T planned updates (Loshchilov and Hutter 2017, one cycle without restart)
    - noam: r · c · d^−½ · min(s^−½, s · w^−³ᐟ²), s = t + 1 from the start of the run, c `schedule_coefficient`, d `width`,
      w `warmup_steps` (Vaswani et al. 2017, "Attention Is All You Need", section 5.3)

    r is the scaled rate, epoch = t / steps per epoch; other schedules than noam are multiplied by (t + 1) / w in the warm-up's updates.
    `positions` float64 [count] replace t after a resume with another batch size (`EpochIndex.positions`); `total_steps` has their unit.
    """
    steps = np.arange(first_step, first_step + count, dtype=np.float64)
    places = steps if positions is None else positions
    schedule = SCHEDULES[job.schedule]
    rates = np.full(count, base_learning_rate(job))
    rates *= schedule.factors(job, Updates(steps + 1.0, places, places / steps_per_epoch, total_steps, width))
    if job.warmup_steps and not schedule.has_warmup:
        rates *= np.minimum((steps + 1.0) / job.warmup_steps, 1.0)
    return rates


def schedule_text(job: Job, total_steps: int | None) -> str:
    """Explain the learning rate's peak, warm-up and decay; unknown `total_steps` are None."""
    base, schedule = f"{base_learning_rate(job):.3g}", SCHEDULES[job.schedule]
    if job.scale_lr != "none":
        base += f" (--lr {job.lr:.3g} scaled {job.scale_lr} from batch {job.base_batch_size} to {job.update_batch})"
    text = schedule.describe(job, base, total_steps)
    if not job.warmup_steps or schedule.has_warmup:
        return text
    return f"linear warm-up over the first {job.warmup_steps:,} updates (--warmup-steps); {text}"
