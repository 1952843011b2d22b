"""Synchronous training: every rank takes its slice of the global batch, and one update follows from the sum of their gradients.

The losses of a rank's slice are divided by the weight of the whole global batch, so that gradients and losses have only to be added up; a
rank with an empty slice adds zeros. All ranks then apply the same update. Buffers are each rank's own while it trains, and averaged over
ranks before they are evaluated or saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import Task, split_evenly
from ...core.job import Job
from ...core.liveness.startup_watchdog import startup_phase
from ...core.update_rules import slot_names, weights_to_evaluate
from ...data.base import Dataset, Split
from ...data.sampler import Batches
from ...exchange.parameter_server.shards import MakeRule
from ...models.base import Array, ModelSpec
from ..base import (
    DIRECT_COMPONENTS,
    CalibrationOrder,
    CalibrationResult,
    EvalResult,
    Plan,
    State,
    StepResult,
    calibration_batches,
    make_sampler,
)
from ..timing import Calibrator
from ..translating import Translating
from ..vectors.flat_values import FlatValues
from ..vectors.state_memory import StateMemory
from ..vectors.update_formulas import clip
from ..vectors.vector_rule import reset_slots
from .model import ArrayModel, Batch
from .passes import Passes
from .ranks import Ranks, barrier, spread

__all__ = ["ArraySession"]


class ArraySession:
    """One rank of a sync run, from a model's gradients, an update rule and a sum over ranks; a `Session`."""

    def __init__(self, task: Task, job: Job, spec: ModelSpec, data: Dataset, model: ArrayModel, make_rule: MakeRule, ranks: Ranks) -> None:
        """Warm up with ranks that have been joined; this session closes them."""
        self._job, self._spec, self._ranks = job, spec, ranks
        self._rank, self._world, self._sizes = task.rank, task.cluster.workers, dict(data.info.sizes)
        self._sampler = make_sampler(job, data, spec.objective.weight)
        self._passes = Passes(job, spec, data, model)
        self._values, self._averaged_weights = FlatValues(spec), FlatValues(spec)
        self._values.set_initial(spec, job.seed)
        self._rule, self._slots = make_rule(job, self._values.trained), slot_names(job)
        room = np.zeros(spec.size + max(1, spec.buffers_size), np.float32)
        self._gradient = FlatValues(spec, room[: spec.size + spec.buffers_size])
        self._message = room[: spec.size + 1]  # the gradient and, in the place of what nobody else wants to know, the loss
        self._memory = StateMemory(spec, self._slots) if self._rank == 0 else None
        self._averaged, self._open, self._healthy = True, True, True
        self._calibrator: Calibrator | None = None
        self.precision_used, self.device_used = job.precision, model.device_used
        startup_phase("warming up")
        self._warm_up()

    def _warm_up(self) -> None:
        """Run everything once, and undo what that has changed."""
        epoch = self._sampler.for_rank(0, 0, self._sampler.steps_per_epoch, self._rank)
        self._passes.warm_up(epoch, self._values, self._gradient, [self._share("test")])
        self._rule.step(self._gradient.trained, 0.0)
        self._ranks.add_up(self._message)
        barrier(self._ranks)
        self._values.set_initial(self._spec, self._job.seed)
        reset_slots(self._rule.slots, self._values.trained)
        self._rule.updates = 0

    def _share(self, split: Split) -> tuple[int, int]:
        return split_evenly(self._sizes[split], self._world)[self._rank]

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply the plan; see `Session.train`."""
        own = self._sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, self._rank, plan.skip, plan.arranged)
        self._healthy = self._averaged = False
        most = self._job.steps_per_call or plan.count
        for first in range(0, plan.count, most):
            count = min(most, plan.count - first)
            yield self._run(own.slice(first, count), plan.first_step + first, plan.learning_rates[first : first + count])
        self._healthy = True

    def _run(self, own: Batches, first_step: int, rates: NDArray[np.float64]) -> StepResult:
        """Apply some updates as one group."""
        began, losses = time.perf_counter(), np.empty(len(own), np.float32)
        self._passes.gather_seconds = 0.0
        gradient, message, clip_norm = self._gradient.trained, self._message, self._job.clip_norm
        updates = zip(self._passes.gradients(own, first_step, self._values, self._gradient), rates.tolist(), strict=True)
        for position, (loss, lr) in enumerate(updates):
            message[-1] = loss
            self._ranks.add_up(message)
            losses[position] = message[-1]
            if clip_norm:
                clip(gradient, clip_norm)
            self._rule.step(gradient, lr)
        seconds = time.perf_counter() - began
        return StepResult(first_step, losses, int(own.examples.sum()), seconds, data_wait_seconds=self._passes.gather_seconds)

    def drain(self) -> Iterator[StepResult]:
        """Nothing is ever outstanding."""
        return iter(())

    def evaluate(self, split: Split) -> EvalResult:
        """Evaluate the rank's share of the split and add up over ranks; see `Session.evaluate`."""
        began = time.perf_counter()
        sums = np.array(self._passes.sums(self._to_evaluate(), split, *self._share(split)))
        self._add_up(sums)
        seconds = time.perf_counter() - began
        return EvalResult.of(self._spec.objective, split, self._sizes[split], sums.tolist(), seconds, self._rule.updates)

    def _to_evaluate(self) -> FlatValues:
        """Return the values that evaluations use: of the weights their moving average, where the job keeps one."""
        self._average_buffers()
        weights = weights_to_evaluate(self._values.trained, self._rule.slots)
        if weights is self._values.trained:
            return self._values
        np.copyto(self._averaged_weights.trained, weights)
        np.copyto(self._averaged_weights.tail, self._values.tail)
        return self._averaged_weights

    def _add_up(self, vector: NDArray[Any]) -> None:
        """Add up over ranks; where that fails the others are not waited for at the end."""
        self._healthy = False
        self._ranks.add_up(vector)
        self._healthy = True

    def _average_buffers(self) -> None:
        """Replace every rank's buffers by their mean over the ranks. A second call before further updates changes nothing."""
        if not self._averaged and self._world > 1 and len(self._values.tail):
            self._add_up(self._values.tail)
            self._values.tail /= self._world
        self._averaged = True

    def predict(self, split: Split, start: int, stop: int) -> Array:
        """Return logits; see `Session.predict`. Raises RuntimeError where there are several ranks."""
        if self._world > 1:
            raise RuntimeError(f"predict: needs a single worker, and this run has {self._world}")
        return self._passes.logits(self._to_evaluate(), split, start, stop)

    def translating(self) -> Translating:
        """Refuse: `ArrayBackend` opens no model that translates."""
        raise RuntimeError(f"this backend does not translate with {self._spec.name!r}")

    def state(self) -> State:
        """Return a copy of the state; complete on the first rank, without values on the others."""
        self._average_buffers()
        if self._memory is None:
            return State({}, updates=self._rule.updates)
        for kept, own in zip([*self._memory.vectors, self._memory.buffers], self._vectors(), strict=True):
            np.copyto(kept, own)
        return self._memory.state(self._rule.updates)

    def _vectors(self) -> list[Array]:
        """Return what the state consists of."""
        return [self._values.trained, *(self._rule.slots[name] for name in self._slots), self._values.tail]

    def load(self, state: State | None) -> None:
        """Take over the first rank's state. Raises ValueError where it does not fit the model."""
        updates = np.zeros(1)
        if self._memory is not None:
            if state is None:
                raise ValueError("load: the first rank was given no state")
            self._memory.fill(state)
            updates[0] = state.updates
            for own, kept in zip(self._vectors(), [*self._memory.vectors, self._memory.buffers], strict=True):
                np.copyto(own, kept)
        self._healthy = False
        for vector in self._vectors():
            spread(self._ranks, self._rank, vector)
        spread(self._ranks, self._rank, updates)
        self._healthy = self._averaged = True
        self._rule.updates = int(updates[0])

    def calibrate(self, order: CalibrationOrder) -> Sequence[CalibrationResult]:
        """Repeat a component of a step with the other ranks; see `Session.calibrate`. Buffers and slots change, parameters do not."""
        if order.component in DIRECT_COMPONENTS:
            return [CalibrationResult(self._rank, 0, 0.0, refused="the backend is not made to try it")]
        if self._calibrator is None:
            batches = calibration_batches(self._sampler, self._rank)
            self._calibrator = Calibrator(batches, self._passes.gather, self._alone, self if self._job.wrapped else None)
        self._healthy = False
        count, seconds = self._calibrator.run(order)
        self._healthy = True
        return [CalibrationResult(self._rank, count, seconds)]

    def _alone(self, found: list[Batch], batch: Batches) -> None:
        self._passes.gradient(found, float(batch.weights[0]), self._values, self._gradient)
        self._rule.step(self._gradient.trained, 0.0)

    def whole(self) -> None:
        """To calibrate: exchange a gradient's worth of zeros, whose sums stay what they are."""
        self._message.fill(0.0)
        self._ranks.add_up(self._message)

    def small(self) -> None:
        """To calibrate: exchange a few bytes in its place."""
        barrier(self._ranks)

    def close(self) -> None:
        """Leave together with the other ranks (at once where this one failed); a second call does nothing."""
        if self._open:
            self._open = False
            self._ranks.close(healthy=self._healthy)
