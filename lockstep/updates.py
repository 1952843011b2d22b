"""An update by the formulas of the rules, in float64, from a state and its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.job import Job
from ..core.patterns import matching
from ..core.update_rules import EMA, FIRST_MOMENT, MOMENTUM, SECOND_MOMENT

Array = NDArray[Any]
State = Mapping[str, Array]  # by the keys of `state_to_arrays`
PARAMETER, BUFFER, SLOT = "parameters/", "buffers/", "slots/"
BLOCK = 1 << 13  # elements; BLAS starts threads for longer products, which cost more than they save
LARGE_RATE = 2.0**20  # an update by it shows the gradient of plain SGD: the weights vanish beside the step


@dataclass(frozen=True)
class Rule:
    """An update rule with its settings; the last ones are faults that it may have."""

    adam: bool
    rate: float
    update: int  # its number, from 1
    momentum: float
    nesterov: bool
    weight_decay: float
    decoupled: bool
    exempt: frozenset[str]
    beta1: float
    beta2: float
    epsilon: float
    ema_decay: float | None
    epsilon_inside: bool = False
    corrected: bool = True
    ramped: bool = True

    @classmethod
    def of_job(cls, job: Job, rate: float, update: int, parameters: list[str]) -> Rule:
        """Return a job's rule for its update `update`, from 1."""
        return cls(
            job.optimizer != "sgd",
            rate,
            update,
            job.momentum,
            job.nesterov,
            job.weight_decay,
            job.optimizer == "adamw",
            frozenset(matching(job.weight_decay_except, parameters)),
            job.beta1,
            job.beta2,
            job.epsilon,
            job.ema_decay or None,
        )

    def decay(self, name: str) -> float:
        """Return the weight decay of a parameter."""
        return 0.0 if name in self.exempt else self.weight_decay


def parameter_names(state: State) -> list[str]:
    """Return the names of a state's parameters."""
    return [key.removeprefix(PARAMETER) for key in state if key.startswith(PARAMETER)]


def without_slots(state: State) -> dict[str, Array]:
    """Return a state before its first update, whose slots then show its gradients."""
    return {key: value for key, value in state.items() if not key.startswith(SLOT)}


def shows_gradient_by_rate(job: Job) -> bool:
    """Return whether a job's gradients can be seen in its weights alone."""
    return job.optimizer == "sgd" and not job.momentum


def measured_gradients(job: Job, before: State, after: State) -> dict[str, Array]:
    """Return what an update from a state without slots shows of its gradients.

    That is the first moment, the momentum, or without both the gradient, float64, of an update by `LARGE_RATE`; see `gradients_of`.
    """
    slot = FIRST_MOMENT if job.optimizer != "sgd" else MOMENTUM if job.momentum else None
    if slot is not None:
        return {name: after[f"{SLOT}{slot}/{name}"] for name in parameter_names(before)}
    return {name: (before[PARAMETER + name].astype(np.float64) - after[PARAMETER + name]) / LARGE_RATE for name in parameter_names(before)}


def gradients_of(rule: Rule, before: State, measured: Mapping[str, Array]) -> dict[str, Array]:
    """Return gradients without a rule's weight decay, from `measured_gradients`."""
    return {name: gradient_of(rule, name, before[PARAMETER + name].astype(np.float64), value) for name, value in measured.items()}


def gradient_of(rule: Rule, name: str, weight: Array, measured: Array) -> Array:
    """Return a parameter's gradient as `gradients_of` does, from its weight in float64."""
    gradient = measured.astype(np.float64)
    if rule.adam:
        gradient /= 1.0 - float(np.float32(rule.beta1))
    return gradient if rule.decoupled else gradient - rule.decay(name) * weight


def updated(rule: Rule, before: State, gradients: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Return the values after an update, and the size of what was added, by the state's keys."""
    return {key: pair for name, gradient in gradients.items() for key, pair in _updated(rule, before, name, gradient).items()}


def updated_in_blocks(rule: Rule, before: State, name: str, measured: Array) -> Iterator[tuple[str, slice, tuple[Array, Array]]]:
    """Yield what `updated` returns of a parameter, from measured gradients.

    It is flat, and in blocks that fit a processor's cache.
    """
    keys = (f"{PARAMETER}{name}", *(f"{SLOT}{slot}/{name}" for slot in (MOMENTUM, FIRST_MOMENT, SECOND_MOMENT, EMA)))
    state = {key: before[key].reshape(-1) for key in keys if key in before}
    flat = measured.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        part = slice(start, start + BLOCK)
        block = {key: values[part] for key, values in state.items()}
        gradient = gradient_of(rule, name, block[PARAMETER + name].astype(np.float64), flat[part])
        for key, pair in _updated(rule, block, name, gradient).items():
            yield key, part, pair


def _updated(rule: Rule, before: State, name: str, gradient: Array) -> dict[str, tuple[Array, Array]]:
    weight = before[PARAMETER + name].astype(np.float64)
    slots = {
        slot: before.get(f"{SLOT}{slot}/{name}", np.zeros_like(weight)).astype(np.float64)
        for slot in (MOMENTUM, FIRST_MOMENT, SECOND_MOMENT)
    }
    step, size, changed = (_adam if rule.adam else _sgd)(rule, rule.decay(name), weight, gradient, slots)
    after = {PARAMETER + name: (weight - step, size), **{f"{SLOT}{slot}/{name}": values for slot, values in changed.items()}}
    if rule.ema_decay is not None:
        average = before.get(f"{SLOT}{EMA}/{name}", before[PARAMETER + name]).astype(np.float64)
        decay = min(rule.ema_decay, (1 + rule.update) / (10 + rule.update)) if rule.ramped else rule.ema_decay
        new = weight - step
        after[f"{SLOT}{EMA}/{name}"] = average + (1 - decay) * (new - average), (1 - decay) * (np.abs(new) + np.abs(average) + size)
    return after


Slots = dict[str, tuple[Array, Array]]


def _sgd(rule: Rule, decay: float, weight: Array, gradient: Array, slots: Mapping[str, Array]) -> tuple[Array, Array, Slots]:
    decayed, size = gradient, np.abs(gradient)
    if not rule.decoupled:
        decayed, size = gradient + decay * weight, size + np.abs(decay * weight)
    shrink = rule.rate * decay * weight if rule.decoupled else np.zeros_like(weight)
    if not rule.momentum:
        return rule.rate * decayed + shrink, rule.rate * size, {}
    velocity, sizes = rule.momentum * slots[MOMENTUM] + decayed, rule.momentum * np.abs(slots[MOMENTUM]) + size
    step, step_size = (decayed + rule.momentum * velocity, size + rule.momentum * sizes) if rule.nesterov else (velocity, sizes)
    return rule.rate * step + shrink, rule.rate * step_size + np.abs(shrink), {MOMENTUM: (velocity, sizes)}


def _adam(rule: Rule, decay: float, weight: Array, gradient: Array, slots: Mapping[str, Array]) -> tuple[Array, Array, Slots]:
    decayed = gradient if rule.decoupled else gradient + decay * weight
    size = np.abs(gradient) if rule.decoupled else np.abs(gradient) + np.abs(decay * weight)
    first = rule.beta1 * slots[FIRST_MOMENT] + (1 - rule.beta1) * decayed
    first_size = rule.beta1 * np.abs(slots[FIRST_MOMENT]) + (1 - rule.beta1) * size
    second = rule.beta2 * slots[SECOND_MOMENT] + (1 - rule.beta2) * decayed**2
    second_size = rule.beta2 * slots[SECOND_MOMENT] + (1 - rule.beta2) * size**2
    by_first, by_second = (1 - rule.beta1**rule.update, 1 - rule.beta2**rule.update) if rule.corrected else (1.0, 1.0)
    root = np.sqrt(second / by_second + rule.epsilon) if rule.epsilon_inside else np.sqrt(second / by_second) + rule.epsilon
    step = rule.rate * first / by_first / root
    shrink = rule.rate * decay * weight if rule.decoupled else np.zeros_like(weight)
    step_size = rule.rate * first_size / by_first / root * np.maximum(1.0, np.sqrt(second_size / np.maximum(second, 1e-300)))
    return step + shrink, step_size + np.abs(shrink), {FIRST_MOMENT: (first, first_size), SECOND_MOMENT: (second, second_size)}


def with_fault(rule: Rule, **changes: Any) -> Rule:
    """Return a rule with other settings."""
    return replace(rule, **changes)


def clipping_factor(gradients: Mapping[str, Array], limit: float) -> float:
    """Return min(1, limit / (‖g‖ + 1e-6)) of all gradients."""
    return min(1.0, limit / (math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values())) + 1e-6))
