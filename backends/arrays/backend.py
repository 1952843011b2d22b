"""A backend for both modes, from a framework's gradients and evaluations on numpy arrays."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.cluster import Task, TaskSpec
from ...core.errors import UsageError
from ...core.job import Job
from ...core.liveness import startup_phase
from ...core.update_rules import slot_names, weights_to_evaluate
from ...data.base import Dataset, Split
from ...data.sampler import Batches, Sampler
from ...exchange.mesh import Mesh
from ...exchange.parameter_server.shards import MakeRule, UpdateRule, Vector, bind_rule
from ...models.base import Array, ModelSpec
from ...models.decoding import Stepper
from ..base import (
    Availability,
    Plan,
    Server,
    Session,
    State,
    StepResult,
    calibration_batches,
    parameter_server_placement,
    ranks_placement,
)
from ..capabilities import Capabilities
from ..parameter_server.worker import open_task
from ..rank_session import RankSession
from ..timing import Calibrator, CarryOut, DirectTrial
from ..vectors import FlatValues, StateMemory, VectorRule, clip, reset_slots
from .model import ArrayComputation, ArrayModel, Batch, Passes


class Ranks(Protocol):
    """All ranks as one of them sees them; all call the same methods in the same order."""

    def add_up(self, vector: NDArray[Any]) -> None:
        """Replace a flat vector, float32 or float64, by its sum over all ranks.

        Raises ConnectionError where one is lost.
        """

    def close(self, *, healthy: bool) -> None:
        """Leave together with the other ranks, immediately if this one has failed."""


class SingleRank:
    """A single rank."""

    def add_up(self, vector: NDArray[Any]) -> None:
        """Leave the vector as it is."""

    def close(self, *, healthy: bool) -> None:
        """Do nothing."""


class MeshRanks:
    """Ranks connected directly: sums in the order of the ranks, bit-identical each time."""

    def __init__(self, task: Task, job: Job) -> None:
        self._mesh = Mesh(task, job.start_timeout, job.node_timeout)

    def add_up(self, vector: NDArray[Any]) -> None:
        """Sum in the order of the ranks."""
        self._mesh.all_reduce(vector)

    def close(self, *, healthy: bool) -> None:
        """Close the connections after a barrier."""
        self._mesh.leave(healthy=healthy)


def barrier(ranks: Ranks) -> None:
    """Wait for all ranks."""
    ranks.add_up(np.zeros(1))


def broadcast(ranks: Ranks, rank: int, vector: NDArray[Any]) -> None:
    """Broadcast the first rank's flat vector. Adding −0 changes no number, not even a −0."""
    if rank:
        vector.fill(-0.0)
    ranks.add_up(vector)


# Losses are divided by the global batch's weight, so gradients and losses are only summed; a rank with an empty slice adds zeros.


class ArraySession(RankSession[StateMemory]):
    """A rank of a sync run, from a model's gradients, an update rule and a sum over ranks.

    A `Session`.
    """

    def __init__(self, task: Task, job: Job, spec: ModelSpec, data: Dataset, model: ArrayModel, make_rule: MakeRule, ranks: Ranks) -> None:
        super().__init__(task, job, spec, data)
        self._ranks = ranks
        self._passes = Passes(job, spec, data, model)
        self._values, self._averaged_weights = FlatValues(spec), FlatValues(spec)
        self._values.set_initial(spec, job.seed)
        sizes = {parameter.name: parameter.size for parameter in spec.parameters}
        self._rule, self._slots = bind_rule(job, self._values.trained, make_rule, sizes), slot_names(job)
        room = np.zeros(spec.size + max(1, spec.buffers_size), np.float32)
        self._gradient = FlatValues(spec, room[: spec.size + spec.buffers_size])
        self._message = room[: spec.size + 1]  # the gradient, then the loss in place of the first buffer value

        self.precision_used, self.device_used = job.precision, model.device_used
        startup_phase("warming up")
        self._warm_up()

    def _warm_up(self) -> None:
        epoch = self._sampler.for_rank(0, 0, self._sampler.steps_per_epoch, self._rank)
        self._passes.warm_up(epoch, self._values, self._gradient, [self._share("test")])
        self._rule.step(self._gradient.trained, 0.0)
        self._ranks.add_up(self._message)
        barrier(self._ranks)
        self._values.set_initial(self._spec, self._job.seed)
        reset_slots(self._rule.slots, self._values.trained)
        self._rule.updates = 0
        self._state_memory()

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply the plan; see `Session.train`."""
        batches = self._sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, self._rank, plan.skip, plan.arranged)
        self._healthy = self._averaged = False
        most = self._job.steps_per_call or plan.count
        for first in range(0, plan.count, most):
            count = min(most, plan.count - first)
            yield self._run(batches.slice(first, count), plan.first_step + first, plan.learning_rates[first : first + count])
        self._healthy = True

    def _run(self, batches: Batches, first_step: int, rates: NDArray[np.float64]) -> StepResult:
        began, losses = time.perf_counter(), np.empty(len(batches), np.float32)
        self._passes.gather_seconds = 0.0
        gradient, message, clip_norm = self._gradient.trained, self._message, self._job.clip_norm
        updates = zip(self._passes.gradients(batches, first_step, self._values, self._gradient), rates.tolist(), strict=True)
        for position, (loss, lr) in enumerate(updates):
            message[-1] = loss
            self._ranks.add_up(message)
            losses[position] = message[-1]
            if clip_norm:
                clip(gradient, clip_norm)
            self._rule.step(gradient, lr)
        seconds = time.perf_counter() - began
        return StepResult(first_step, losses, int(batches.examples.sum()), seconds, data_wait_seconds=self._passes.gather_seconds)

    def _sums(self, split: Split) -> list[float]:
        sums = np.array(self._passes.sums(self._to_evaluate(), split, *self._share(split)))
        with self._meeting():
            self._ranks.add_up(sums)
        return list(sums.tolist())

    def _to_evaluate(self) -> FlatValues:
        weights = weights_to_evaluate(self._values.trained, self._rule.slots)
        if weights is self._values.trained:
            return self._values
        np.copyto(self._averaged_weights.trained, weights)
        np.copyto(self._averaged_weights.tail, self._values.tail)
        return self._averaged_weights

    def _average(self) -> None:
        with self._meeting():
            self._ranks.add_up(self._values.tail)
        self._values.tail /= self._world

    def _logits(self, split: Split, start: int, stop: int) -> Array:
        return self._passes.logits(self._to_evaluate(), split, start, stop)

    def _stepper(self) -> Stepper:
        raise RuntimeError(f"this backend does not translate with {self._spec.name!r}")

    def _make_memory(self) -> StateMemory:
        return StateMemory(self._spec, self._slots)

    def _copy_to(self, memory: StateMemory) -> None:
        for kept, vector in zip([*memory.vectors, memory.buffers], self._vectors(), strict=True):
            np.copyto(kept, vector)

    @property
    def _updates_done(self) -> int:
        return self._rule.updates

    def _vectors(self) -> list[Array]:
        return [self._values.trained, *(self._rule.slots[name] for name in self._slots), self._values.tail]

    def load(self, state: State | None) -> None:
        """Take over the first rank's state. Raises ValueError where it does not fit the model."""
        updates = np.zeros(1)
        if (memory := self._state_memory()) is not None:
            if state is None:
                raise ValueError("load: the first rank was given no state")
            memory.fill(state)
            updates[0] = state.updates
            for vector, kept in zip(self._vectors(), [*memory.vectors, memory.buffers], strict=True):
                np.copyto(vector, kept)
        vectors: list[NDArray[Any]] = [*self._vectors(), updates]
        with self._meeting():
            for vector in vectors:
                broadcast(self._ranks, self._rank, vector)
        self._averaged = True
        self._rule.updates = int(updates[0])

    def _open_trial(self) -> DirectTrial:
        return DirectTrial(self._rank, "the backend is not made to try it")

    def _make_repetition(self) -> CarryOut:
        batches = calibration_batches(self._sampler, self._rank)
        return Calibrator(batches, self._passes.gather, self._compute_alone, self if self._job.wrapped else None).run

    def _compute_alone(self, micro_batches: list[Batch], batch: Batches) -> None:
        self._passes.gradient(micro_batches, float(batch.weights[0]), self._values, self._gradient)
        self._rule.step(self._gradient.trained, 0.0)

    def whole(self) -> None:
        """Calibration: exchange as many zeros as a gradient has values."""
        self._message.fill(0.0)
        self._ranks.add_up(self._message)

    def small(self) -> None:
        """Calibration: exchange a few bytes instead."""
        barrier(self._ranks)

    def _leave(self) -> None:
        self._ranks.close(healthy=self._healthy)


class ArrayBackend(ABC):
    """A `Backend` for both modes and any columns.

    A subclass declares `name` and `capabilities`, but no fp16 or translation.
    """

    name: str
    capabilities: Capabilities

    @abstractmethod
    def probe(self) -> Availability:
        """See `Backend.probe`."""

    @abstractmethod
    def model(self, task: Task, job: Job, spec: ModelSpec) -> ArrayModel:
        """Return the computation of a model for a sync rank or async worker.

        It uses `task.threads` threads.
        """

    def rule(self, job: Job, parameters: Vector) -> UpdateRule:
        """Bind the job's update rule to a vector, in numpy unless a subclass has a faster one.

        See `MakeRule`.
        """
        return VectorRule(job, parameters)

    def ranks(self, task: Task, job: Job) -> Ranks:
        """Join the ranks of a sync run, by the mesh unless a subclass has its collectives."""
        return MeshRanks(task, job) if job.wrapped else SingleRank()

    def placement(self, job: Job) -> list[TaskSpec]:
        """Sync: one rank a worker. Async: the chief is the first parameter server."""
        return ranks_placement(job) if job.mode == "sync" else parameter_server_placement(job, chief_is_first_ps=True)

    @abstractmethod
    def preload(self, job: Job) -> None:
        """See `Backend.preload`."""

    def open(self, task: Task, job: Job, model: ModelSpec, data: Dataset) -> Session | Server:
        """Join the cluster and warm up; see `Backend.open`.

        Raises UsageError for translation and fp16.
        """
        if model.objective.translation is not None:
            raise UsageError(f"model: {job.model!r} translates, which backend {self.name} does not do.")
        if job.precision == "fp16":
            raise UsageError(f"precision: got 'fp16', for which backend {self.name} would have to scale the loss; use bf16 or fp32.")
        if job.mode == "async":
            compute = partial(self._compute, task, job, model, data)
            return open_task(task, job, model, data, self.rule, compute)
        computed = self.model(task, job, model)
        startup_phase("joining the cluster", for_others=True)
        return ArraySession(task, job, model, data, computed, self.rule, self.ranks(task, job))

    def _compute(self, task: Task, job: Job, model: ModelSpec, data: Dataset, sampler: Sampler) -> ArrayComputation:
        return ArrayComputation(job, model, data, sampler, self.model(task, job, model))
