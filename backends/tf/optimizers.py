"""The update rules, by torch's formulas, over one variable and its slots.

SGD:    g ← g + d·w;  b ← μ·b + g;  w ← w − η·b  (Nesterov: w − η·(g + μ·b))
Adam:   g ← g + d·w (AdamW: w ← w − η·d·w);  m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  w ← w − η/(1−β₁ᵗ)·m / (√v/√(1−β₂ᵗ) + ε)

TensorFlow's Adam op computes w − α·m/(√v + ε'). With α = η·√(1−β₂ᵗ)/(1−β₁ᵗ) and ε' = ε·√(1−β₂ᵗ) that is the formula above. Both are
computed in float64, from the float32 values of β that the op works with: 1 − 0.999 in float32 is off by 1.3e-5, and so the first
update would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.job import Job
from ...core.update_rules import EMA, FIRST_MOMENT, MOMENTUM, SECOND_MOMENT, averaging_rates, slot_names

__all__ = ["Adam", "Averaging", "Optimizer", "Sgd", "build_optimizer", "clipped"]

Scalars = Sequence[tf.Tensor]
Slots = Mapping[str, tf.Variable]


class Optimizer(Protocol):
    """An update rule. `slots` names the vectors it keeps beside each parameter, which start at zero (`EMA` as the parameter).

    What differs from update to update are a few scalars: `host_scalars` computes them before the loop, `scalars` where the number of
    the update is known only when it is applied. `needs_count` says whether they depend on that number at all.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots."""
        ...

    @property
    def needs_count(self) -> bool:
        """Whether the scalars depend on the number of the update."""
        ...

    def host_scalars(self, learning_rates: NDArray[np.float64], first_update: int) -> NDArray[np.float32]:
        """Return the scalars of consecutive updates, float32 [count, scalars]; `first_update` counts from 1."""
        ...

    def scalars(self, learning_rate: tf.Tensor, update: tf.Tensor | None) -> Scalars:
        """Return the same of one update, as float32 scalars, in ops. `learning_rate` float32, `update` int64 from 1."""
        ...

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update under the variables' locks and return the op after which it is complete."""
        ...


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stochastic gradient descent. Scalars: η."""

    slots: tuple[str, ...]
    momentum: float
    nesterov: bool
    weight_decay: float

    @property
    def needs_count(self) -> bool:
        """The rule does not depend on the number of the update."""
        return False

    def host_scalars(self, learning_rates: NDArray[np.float64], first_update: int) -> NDArray[np.float32]:
        """Return η, float32 [count, 1]."""
        return learning_rates.astype(np.float32)[:, None]

    def scalars(self, learning_rate: tf.Tensor, update: tf.Tensor | None) -> Scalars:
        """Return (η,)."""
        return (learning_rate,)

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update; see the formula on top."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * variable.read_value()
        if not self.momentum:
            return tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=scalars[0], delta=gradient, use_locking=True)
        return tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=slots[MOMENTUM].handle,
            lr=scalars[0],
            grad=gradient,
            momentum=self.momentum,
            use_locking=True,
            use_nesterov=self.nesterov,
        )


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam, or AdamW where `decoupled`. Scalars: α, ε' (see on top) and η·d."""

    slots: tuple[str, ...]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    decoupled: bool

    @property
    def needs_count(self) -> bool:
        """The bias corrections depend on the number of the update."""
        return True

    def host_scalars(self, learning_rates: NDArray[np.float64], first_update: int) -> NDArray[np.float32]:
        """Return (α, ε', η·d), float32 [count, 3]."""
        update = np.arange(first_update, first_update + len(learning_rates), dtype=np.float64)
        root = np.sqrt(1.0 - _float32(self.beta2) ** update)
        step_size = learning_rates * root / (1.0 - _float32(self.beta1) ** update)
        return np.stack([step_size, self.epsilon * root, learning_rates * self.weight_decay], axis=1).astype(np.float32)

    def scalars(self, learning_rate: tf.Tensor, update: tf.Tensor | None) -> Scalars:
        """Return (α, ε', η·d), computed in float64."""
        rate, number = tf.cast(learning_rate, tf.float64), tf.cast(update, tf.float64)
        root = tf.sqrt(1.0 - tf.pow(tf.constant(_float32(self.beta2), tf.float64), number))
        step_size = rate * root / (1.0 - tf.pow(tf.constant(_float32(self.beta1), tf.float64), number))
        return tuple(tf.cast(value, tf.float32) for value in (step_size, self.epsilon * root, rate * self.weight_decay))

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update; see the formula on top. The op's own bias correction is off: both powers are 0."""
        step_size, epsilon, decay = scalars
        before: list[tf.Operation] = []
        if self.weight_decay and self.decoupled:
            shrink = decay * variable.read_value()
            before = [tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=shrink)]
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * variable.read_value()
        with tf.control_dependencies(before):
            return tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=slots[FIRST_MOMENT].handle,
                v=slots[SECOND_MOMENT].handle,
                beta1_power=0.0,
                beta2_power=0.0,
                lr=step_size,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=epsilon,
                grad=gradient,
                use_locking=True,
            )


@dataclass(frozen=True, slots=True)
class Averaging:
    """A rule that also keeps a moving average of its parameters (`core.update_rules`). Scalars: those of `rule`, then 1 − dₜ."""

    rule: Optimizer
    decay: float

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of the rule, which has been told of the average."""
        return self.rule.slots

    @property
    def needs_count(self) -> bool:
        """The decay depends on the number of the update."""
        return True

    def host_scalars(self, learning_rates: NDArray[np.float64], first_update: int) -> NDArray[np.float32]:
        """Return the scalars, float32 [count, scalars]."""
        update = np.arange(first_update, first_update + len(learning_rates), dtype=np.float64)
        rates = averaging_rates(self.decay, update).astype(np.float32)
        return np.concatenate([self.rule.host_scalars(learning_rates, first_update), rates[:, None]], axis=1)

    def scalars(self, learning_rate: tf.Tensor, update: tf.Tensor | None) -> Scalars:
        """Return the scalars of one update."""
        number = tf.cast(update, tf.float64)
        rate = 1.0 - tf.minimum(tf.constant(self.decay, tf.float64), (1.0 + number) / (10.0 + number))
        return (*self.rule.scalars(learning_rate, update), tf.cast(rate, tf.float32))

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update, then move the average towards the new values."""
        *own, rate = scalars
        with tf.control_dependencies([self.rule.apply(variable, slots, gradient, own)]):
            distance = slots[EMA].read_value() - variable.read_value()
            return tf.raw_ops.AssignSubVariableOp(resource=slots[EMA].handle, value=rate * distance)


def build_optimizer(job: Job) -> Optimizer:
    """Return the job's update rule."""
    if job.optimizer == "sgd":
        rule: Optimizer = Sgd(slot_names(job), job.momentum, job.nesterov, job.weight_decay)
    else:
        rule = Adam(slot_names(job), job.beta1, job.beta2, job.epsilon, job.weight_decay, decoupled=job.optimizer == "adamw")
    return Averaging(rule, job.ema_decay) if job.ema_decay else rule


def clipped(gradients: Sequence[tf.Tensor], limit: float) -> list[tf.Tensor]:
    """In ops: return gradients scaled down to a norm of all together of about `limit` where it is larger.

    g · min(1, limit / (‖g‖ + 1e-6)): the formula of torch.nn.utils.clip_grad_norm_.
    """
    factor = tf.minimum(1.0, limit / (tf.linalg.global_norm(gradients) + 1e-6))
    return [gradient * factor for gradient in gradients]


def _float32(value: float) -> float:
    """Return the value that a float32 op sees, as float64."""
    return float(np.float32(value))
