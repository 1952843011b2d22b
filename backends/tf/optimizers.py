"""Update rules over one variable and its slots, gradient clipping and loss scaling.

SGD: g ← g + d·w; b ← μ·b + g; w ← w − η·b (Nesterov: w − η·(g + μ·b)), as torch
Adam: g ← g + d·w (AdamW: w ← w − η·d·w); m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²; w ← w − η/(1−β₁ᵗ)·m / (√v/√(1−β₂ᵗ) + ε)
TensorFlow's op computes w − α·m/(√v + ε'): the same with α = η·√(1−β₂ᵗ)/(1−β₁ᵗ) and ε' = ε·√(1−β₂ᵗ), computed in float64 from the op's
float32 values of β: 1 − 0.999 in float32 is off by 1.3e-5, and so would be the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.job import Job
from ...core.update_rules import EMA, FIRST_MOMENT, MOMENTUM, SECOND_MOMENT, averaging_rates, slot_names
from ...models.base import ForwardContext
from ..capabilities import unused_precision
from ..vectors import FIRST_SCALE, next_scale, refuse_exhausted
from .data import Tensors

Scalars = Tensors
Slots = Mapping[str, tf.Variable]


class Optimizer:
    """Update rule with slots from zero.

    `host_scalars` come before the loop, `scalars` in it where `needs_count`.
    """

    slots: tuple[str, ...]
    needs_count = True  # whether the scalars depend on the number of the update

    def values(self, module: Any, rate: Any, update: Any) -> Sequence[Any]:
        """Return the scalars, float64, of updates by learning rate and number (from 1).

        `module` is numpy or TensorFlow.
        """
        raise NotImplementedError

    def host_scalars(self, learning_rates: NDArray[np.float64], first_update: int) -> NDArray[np.float32]:
        """Return the scalars of consecutive updates, float32 [count, scalars].

        `first_update` counts from 1.
        """
        update = np.arange(first_update, first_update + len(learning_rates), dtype=np.float64)
        return np.stack(self.values(np, learning_rates, update), axis=1).astype(np.float32)

    def scalars(self, learning_rate: tf.Tensor, update: tf.Tensor | None) -> Scalars:
        """Return those of one update, float32, in ops.

        `learning_rate` float32, `update` int64 from 1.
        """
        if not self.needs_count:
            return (learning_rate,)
        values = self.values(tf, tf.cast(learning_rate, tf.float64), tf.cast(update, tf.float64))
        return tuple(tf.cast(value, tf.float32) for value in values)

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update under the variables' locks; return the op that completes it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Stochastic gradient descent. Scalars: η."""

    slots: tuple[str, ...]
    momentum: float
    nesterov: bool
    weight_decay: float
    needs_count = False

    def values(self, module: Any, rate: Any, update: Any) -> Sequence[Any]:
        """Return (η,)."""
        return (rate,)

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


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, or AdamW where `decoupled`. Scalars: α, ε' (see on top) and η·d."""

    slots: tuple[str, ...]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    decoupled: bool

    def values(self, module: Any, rate: Any, update: Any) -> Sequence[Any]:
        """Return (α, ε', η·d)."""
        root = module.sqrt(1.0 - _float32(self.beta2) ** update)
        return rate * root / (1.0 - _float32(self.beta1) ** update), self.epsilon * root, rate * self.weight_decay

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update; see the formula on top.

        The op's own bias correction is off: both powers are 0.
        """
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


@dataclass(frozen=True)
class PartialDecay(Optimizer):
    """Rule without weight decay after the decay of the elements where `mask` is 1.

    Scalars: those of `rule`, then η·d.
    """

    slots: tuple[str, ...]
    rule: Optimizer
    weight_decay: float
    decoupled: bool
    mask: tf.Variable

    def values(self, module: Any, rate: Any, update: Any) -> Sequence[Any]:
        """Return the scalars of the rule, then η·d."""
        return (*self.rule.values(module, rate, update), rate * self.weight_decay)

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update; see the formulas on top."""
        *rule_scalars, decay = scalars
        decaying = self.mask.read_value() * variable.read_value()
        before: list[tf.Operation] = []
        if self.decoupled:
            before = [tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=decay * decaying)]
        else:
            gradient = gradient + self.weight_decay * decaying
        with tf.control_dependencies(before):
            return self.rule.apply(variable, slots, gradient, rule_scalars)


@dataclass(frozen=True)
class Averaging(Optimizer):
    """Rule with a moving average of its parameters (`core.update_rules`).

    Scalars: those of `rule`, then 1 − dₜ.
    """

    slots: tuple[str, ...]
    rule: Optimizer
    decay: float

    def values(self, module: Any, rate: Any, update: Any) -> Sequence[Any]:
        """Return the scalars of the rule, then 1 − dₜ."""
        return (*self.rule.values(module, rate, update), averaging_rates(self.decay, update, module.minimum))

    def apply(self, variable: tf.Variable, slots: Slots, gradient: tf.Tensor, scalars: Scalars) -> tf.Operation:
        """Apply one update, then move the average towards the new values."""
        *rule_scalars, rate = scalars
        with tf.control_dependencies([self.rule.apply(variable, slots, gradient, rule_scalars)]):
            distance = slots[EMA].read_value() - variable.read_value()
            return tf.raw_ops.AssignSubVariableOp(resource=slots[EMA].handle, value=rate * distance)


def build_optimizer(job: Job, mask: tf.Variable | None = None) -> Optimizer:
    """Return the job's update rule.

    `mask`: of a flat variable, 1 for elements that decay and 0 for others.
    """
    decay, decoupled = 0.0 if mask is not None else job.weight_decay, job.optimizer == "adamw"
    if job.optimizer == "sgd":
        rule: Optimizer = Sgd(slot_names(job), job.momentum, job.nesterov, decay)
    else:
        rule = Adam(slot_names(job), job.beta1, job.beta2, job.epsilon, decay, decoupled=decoupled)
    if mask is not None:
        rule = PartialDecay(rule.slots, rule, job.weight_decay, decoupled, mask)
    return Averaging(rule.slots, rule, job.ema_decay) if job.ema_decay else rule


def clipped(gradients: Tensors, limit: float) -> list[tf.Tensor]:
    """Scale gradients down to a norm of about `limit` together, in ops.

    g · min(1, limit / (‖g‖ + 1e-6)), as clip_grad_norm_.
    """
    factor = tf.minimum(1.0, limit / (tf.linalg.global_norm(gradients) + 1e-6))
    return [gradient * factor for gradient in gradients]


def _float32(value: float) -> float:
    return float(np.float32(value))


Compute = Callable[..., Tensors]  # (begin, end, number int32, sums so far) -> summands


def accumulated(compute: Compute, size: tf.Tensor, most: int, zeros: Tensors) -> list[tf.Tensor]:
    """Return the sums of `compute` over micro-batches, with the shapes of `zeros`.

    Their borders are ⌊size·j / k⌋ with k = min(most, size) ≥ 1.
    """
    count = tf.minimum(most, tf.maximum(size, 1))

    def border(number: tf.Tensor) -> tf.Tensor:
        whole = tf.cast(size, tf.int64) * tf.cast(number, tf.int64)
        return tf.cast(whole // tf.cast(count, tf.int64), tf.int32)

    def body(number: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        summands = compute(border(number), border(number + 1), number, *sums)
        return number + 1, *(total + summand for total, summand in zip(sums, summands, strict=True))

    _, *sums = tf.while_loop(lambda number, *_: number < count, body, (tf.constant(0), *zeros), parallel_iterations=1)
    return list(sums)


# Formats of convolutions and matrix products, and fp16's loss scaling; all else stays float32. fp16 and TF32 are untested on a GPU.

TENSOR_FLOAT_CAPABILITY = (8, 0)  # the first GPUs with TF32
LOW_FORMATS: Mapping[str, tf.DType | None] = {"fp32": None, "bf16": tf.bfloat16, "fp16": tf.float16}


def precision_used(precision: str, device: str) -> str:
    """Return the precision for the summary; fp32 notes TF32 on GPUs that use it."""
    if precision == "fp32" and device.startswith("GPU") and tf.config.experimental.tensor_float_32_execution_enabled():
        details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.get_visible_devices("GPU")]
        if any(detail.get("compute_capability", (0, 0)) >= TENSOR_FLOAT_CAPABILITY for detail in details):
            return "fp32 (TF32)"
    return precision


def watched(forward: Callable[..., tf.Tensor], model: str) -> Callable[..., tf.Tensor]:
    """Return a forward function whose tracing raises UsageError without the low format."""

    def watching(parameters: Any, x: Any, context: ForwardContext[tf.Tensor]) -> tf.Tensor:
        if context.compute is None or tf.executing_eagerly():
            return forward(parameters, x, context)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = forward(parameters, x, context)
        if not any(_computed_in(graph, before, context.compute)):
            raise unused_precision(next(name for name, low in LOW_FORMATS.items() if low == context.compute), model, "tf")
        return result

    return watching


def _computed_in(graph: tf.Graph, first: int, low: tf.DType) -> Iterator[bool]:
    for operation in graph.get_operations()[first:]:
        yield operation.type != "Cast" and any(output.dtype.base_dtype == low for output in operation.outputs)
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            yield node.op != "Cast" and node.attr["T"].type == low.as_datatype_enum


def unscaled(gradients: Tensors, scale: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """In ops: return the gradients divided by the scale, and whether all are finite."""
    return [gradient / scale for gradient in gradients], tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients]
    )


class LossScale:
    """Dynamic loss scaling, in ops; see `backends.vectors`."""

    @staticmethod
    def initial() -> dict[str, float]:
        """Return the scalars at the start of a run."""
        return {"loss_scale": FIRST_SCALE, "clean_steps": 0.0}

    def __init__(self) -> None:
        self.scale = tf.Variable(FIRST_SCALE, name="loss_scale")
        self._clean = tf.Variable(0.0, name="clean_steps")

    @property
    def scalars(self) -> dict[str, float]:
        """Numbers for a checkpoint."""
        return {"loss_scale": float(self.scale.numpy()), "clean_steps": float(self._clean.numpy())}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Restore the numbers of a checkpoint, or the initial values."""
        values = {**self.initial(), **scalars}
        self.scale.assign(values["loss_scale"])
        self._clean.assign(values["clean_steps"])

    def check(self) -> None:
        """Raise RunFailedError if the scale is exhausted."""
        refuse_exhausted(float(self.scale.numpy()))

    def guarded(self, gradients: Tensors, apply: Callable[[Tensors], object]) -> None:
        """Apply the divided gradients if all are finite, and adapt the scale, in ops.

        Ranks with summed gradients agree.
        """
        divided, finite = unscaled(gradients, self.scale)

        def take() -> tf.Tensor:
            apply(divided)
            return tf.constant(True)

        tf.cond(finite, take, lambda: tf.constant(False))
        scale, clean = next_scale(self.scale.read_value(), self._clean.read_value(), finite, where=tf.where, smaller=tf.minimum)
        self.scale.assign(scale)
        self._clean.assign(clean)
