"""The update rules as formulas over any module of arrays (numpy, jax.numpy, …): written once, for backends that bring none of their own.

They are torch's: sgd is g ← g + λ·w, with momentum b ← μ·b + g, and w ← w − lr·b, or lr·(g + μ·b) by Nesterov. Adam has
m ← m + (1−β1)·(g−m), v ← β2·v + (1−β2)·g², w ← w − lr/(1−β1ᵗ)·m / (√v/√(1−β2ᵗ) + ε), where λ·w is added to g, or with adamw
w ← (1 − lr·λ)·w comes first. The moving average of the weights is in `core.update_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.job import Job
from ...core.update_rules import EMA, FIRST_MOMENT, MOMENTUM, SECOND_MOMENT, averaging_rates, slot_names
from ...models.base import Array

__all__ = ["Factors", "UpdateFormulas", "clip"]


class Factors(NamedTuple):
    """The numbers of one update, computed in float64: so that nothing has to be compiled anew where they change."""

    lr: float
    decay: float
    """What adamw multiplies the weights by."""
    first_rate: float
    """lr / (1 − β1ᵗ)."""
    second_root: float
    """√(1 − β2ᵗ)."""
    averaging: float
    """The part of the new weights in their moving average."""


class UpdateFormulas:
    """A job's update rule, without memory. Element by element: of any part of the parameters, in any shape."""

    def __init__(self, job: Job) -> None:
        self._job, self.slots = job, slot_names(job)

    def factors(self, lr: float, update: int) -> Factors:
        """Return the numbers of an update, counted from 1."""
        job = self._job
        averaging = float(averaging_rates(job.ema_decay, np.array([update]))[0]) if job.ema_decay else 1.0
        if job.optimizer == "sgd":
            return Factors(lr, 1.0, 0.0, 1.0, averaging)
        decay = 1.0 - lr * job.weight_decay if job.optimizer == "adamw" else 1.0
        return Factors(lr, decay, lr / (1.0 - job.beta1**update), math.sqrt(1.0 - job.beta2**update), averaging)

    def updated(self, arrays: Any, weights: Any, gradient: Any, slots: Mapping[str, Any], factors: Factors) -> tuple[Any, dict[str, Any]]:
        """Return weights and slots after an update. `arrays` is the module whose arrays they are; nothing is written to."""
        job = self._job
        if job.weight_decay and job.optimizer != "adamw":
            gradient = gradient + job.weight_decay * weights
        if job.optimizer == "sgd":
            found = {}
            if job.momentum:
                found[MOMENTUM] = job.momentum * slots[MOMENTUM] + gradient
                gradient = gradient + job.momentum * found[MOMENTUM] if job.nesterov else found[MOMENTUM]
            weights = weights - factors.lr * gradient
        else:
            first = slots[FIRST_MOMENT] + (1.0 - job.beta1) * (gradient - slots[FIRST_MOMENT])
            second = job.beta2 * slots[SECOND_MOMENT] + (1.0 - job.beta2) * gradient * gradient
            root = arrays.sqrt(second) / factors.second_root + job.epsilon
            kept = factors.decay * weights if job.optimizer == "adamw" else weights
            weights, found = kept - factors.first_rate * first / root, {FIRST_MOMENT: first, SECOND_MOMENT: second}
        if job.ema_decay:
            found[EMA] = slots[EMA] + factors.averaging * (weights - slots[EMA])
        return weights, found


def clip(gradient: Array, limit: float) -> None:
    """Scale a flat gradient down, in place, to a norm of about `limit` where it is larger: g · min(1, limit / (‖g‖ + 1e-6))."""
    factor = limit / (float(np.linalg.norm(gradient)) + 1e-6)
    if factor < 1.0:
        gradient *= np.float32(factor)
