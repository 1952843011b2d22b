"""Which vectors does an update rule keep beside each parameter? Their names are the same in every backend, and in checkpoints.

With ``--ema-decay D`` one of them is an exponential moving average of the parameter, which evaluations use instead of it:

    e ← dₜ·e + (1 − dₜ)·w after update t (from 1), with dₜ = min(D, (1 + t) / (10 + t))

It begins as the initial weights. These would stay in it for long with a large D, and a bias correction as Adam's, which is for averages
that begin at zero, would not take them out. So dₜ rises to D with the updates, as with ``num_updates`` of TensorFlow's
ExponentialMovingAverage; as long as it rises, the initial weights' part in the average falls as 10! / t⁹.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .job import Job

__all__ = ["EMA", "FIRST_MOMENT", "MOMENTUM", "SECOND_MOMENT", "averaging_rates", "slot_names", "weights_to_evaluate"]

Weights = TypeVar("Weights")

MOMENTUM = "momentum"
"""SGD: the accumulated gradient."""

FIRST_MOMENT, SECOND_MOMENT = "first_moment", "second_moment"
"""Adam and AdamW: the running means of the gradient and of its square."""

EMA = "ema"
"""With ``--ema-decay``: the moving average of the parameter itself. Where it is absent it begins as the parameter, all others at zero."""


def slot_names(job: Job) -> tuple[str, ...]:
    """Return the names of the slots that the job's update rule keeps for each parameter; they start at zero, `EMA` as the parameter."""
    average = (EMA,) if job.ema_decay else ()
    if job.optimizer == "sgd":
        return (*([MOMENTUM] if job.momentum else []), *average)
    return (FIRST_MOMENT, SECOND_MOMENT, *average)


def weights_to_evaluate(trained: Weights, slots: Mapping[str, Weights]) -> Weights:
    """Return what evaluations and translations use of `trained` weights: their moving average where the slots have one, else themselves.

    The one place that decides it, for every backend and mode, in whatever form weights and slots are held.
    """
    return slots.get(EMA, trained)


def averaging_rates(decay: float, updates: NDArray[np.integer] | NDArray[np.floating]) -> NDArray[np.float64]:
    """Return 1 − dₜ, the part of the new weights in their moving average, for updates t counted from 1."""
    return 1.0 - np.minimum(decay, (1.0 + updates) / (10.0 + updates))
