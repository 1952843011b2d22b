"""Synchronous training by MultiWorkerMirroredStrategy, many steps per `tf.function`.

A single worker needs no strategy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....core.cluster import Task
from ....core.job import Job
from ....core.liveness import startup_phase
from ....data.base import Dataset, Split
from ....data.sampler import Batches
from ....exchange.mesh import Mesh, Vector
from ....models.base import Array, ModelSpec
from ...base import Plan, State, StepResult, calibration_batches
from ...compiling import settle, should_time, timed
from ...loading import tune_malloc
from ...rank_session import RankSession
from ...timing import CarryOut, DirectTrial, measure_step
from ...vectors import StateMemory, evaluation_batch
from ..calibration import StepProfiler
from ..compiler import xla_errors
from ..data import Resident, layout_for, resident
from ..decoding import TfStepper
from ..model import ForwardContexts, TfModel, build_model, micro_batches_on, summed
from ..optimizers import precision_used
from ..runtime import device_kind
from .calibration import Calibrator, RankComponents
from .collectives import Collectives
from .direct import TcpCollectives, init_collectives
from .steps import Replica, Steps

MAX_KEPT_BYTES = 1 << 27  # freed by a small model's step; large models gain nothing and take a sixth more memory
WARM_SPLIT: Split = "test"  # others are traced on first use


def open_sync(task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str) -> SyncSession:
    """Join the other ranks, create data and parameters, and warm up."""
    chooses = should_time(job, spec, data)
    ranks = init_collectives(task, job, device, sequential=layout_for(job, spec, data.info).has_small_ops)
    session = SyncSession(task, job, spec, data, device, ranks)
    startup_phase("warming up")
    session.steps.compile(on=session.compile_is_faster() if chooses else job.compile == "on")
    with xla_errors(job):
        session.warm_up()
    return session


class SyncSession(RankSession[StateMemory]):
    """A rank; implements `Session`. `steps` makes its updates."""

    def __init__(self, task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str, ranks: Collectives) -> None:
        super().__init__(task, job, spec, data)
        self._ranks = ranks
        self._model: TfModel = build_model(job.model, spec, deterministic=job.deterministic)
        self._micro_batches = micro_batches_on(device, job, spec, task.threads)
        self._passes = ForwardContexts(job, spec, task.rank)
        self._device, self._updates = device, 0

        self.precision_used, self.device_used = precision_used(job.precision, device), device_kind(device)
        if job.accumulate > 1:  # else sums of gradients become temporary variables, which clash in nested loops
            tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
        layout = layout_for(job, spec, data.info)
        self._sequential = layout.has_small_ops
        with tf.device(device):
            self._splits: dict[Split, Resident] = {split: resident(data, split, layout) for split in ("train", "test")}
            self._replica = Replica(job, self._model)
        if self._micro_batches > 1:
            tune_malloc(MAX_KEPT_BYTES, MAX_KEPT_BYTES // 4, one_arena=False)
        first = self._sampler.for_rank(0, 0, 1, task.rank)
        self.steps = Steps(job, self._model, self._replica, ranks, self._splits["train"], self._passes, first, self._micro_batches)
        bounds = [tf.TensorSpec([], tf.int32)] * 2
        self._evaluations = {split: ranks.traced(partial(self._evaluate, split), *bounds) for split in self._splits}
        self._predictions = {split: ranks.traced(partial(self._predict, split), *bounds) for split in self._splits}
        self._averaging = ranks.traced(partial(ranks.on_replica, self._average_in_ops))
        self._tracer = StepProfiler(job.profile, here=task.rank == 0)

    def compile_is_faster(self) -> bool:
        """Return whether compiled steps are faster on all ranks together.

        The caller then chooses how to compute.
        """
        timing = timed(self._measure_step, self.steps.to_compile_gradient(), self._measure_compiled_step)
        faster = settle(timing, self._job.workers)
        self._replica.reset()
        return faster

    def _measure_step(self) -> float:
        return measure_step(self._make_repetition())

    def _measure_compiled_step(self) -> float:
        self.steps.compile(on=True)
        return self._measure_step()

    def warm_up(self) -> None:
        """Trace and run everything once, on all ranks, then restore the initial state.

        A few examples are evaluated: a whole split takes a large model many seconds.
        """
        last = self._sampler.steps_per_epoch - 1  # an epoch's last batch may be smaller, and computed by other code
        for step in sorted({0, last} if self.steps.in_compiled_loop else {0}):
            self._call(self._sampler.for_rank(0, step, 1, self._task.rank), np.zeros(1), 0)
        self._average_buffers()
        self._sums_between(WARM_SPLIT, 0, min(self._job.micro_batch, self._sizes[WARM_SPLIT]))
        if self._spec.objective.translation is not None:
            self.translating().warm_up()
        self._replica.reset()
        self._updates = 0
        if self._job.saved_every is not None:
            self._state_memory()

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply the plan in calls of at most `job.steps_per_call` steps; a call is a result."""
        begin = 0
        while begin < plan.count:
            count, profiled = min(self._tracer.left or self.steps.most_per_call, plan.count - begin), self._tracer.left > 0
            self._tracer.begin()
            started = time.perf_counter()
            batches = self._sampler.for_rank(plan.epoch, plan.first_in_epoch + begin, count, self._task.rank, plan.skip, plan.arranged)
            losses = self._call(batches, plan.learning_rates[begin : begin + count], plan.first_step + begin)
            seconds = time.perf_counter() - started
            self._tracer.done(count)
            yield StepResult(plan.first_step + begin, losses, int(batches.examples.sum()), seconds, profiled=profiled)
            begin += count

    def _sums(self, split: Split) -> list[float]:
        return self._sums_between(split, *self._share(split))

    def _sums_between(self, split: Split, start: int, stop: int) -> list[float]:
        return list(self._evaluations[split](tf.constant(start), tf.constant(stop)).numpy().tolist())

    def _stepper(self) -> TfStepper:
        return self._model.stepper(partial(self._replica.read, to_evaluate=True), self._passes.evaluation, self._device)

    def _logits(self, split: Split, start: int, stop: int) -> Array:
        step = evaluation_batch(self._spec)
        function = self._predictions[split]
        pieces = [function(tf.constant(begin), tf.constant(min(begin + step, stop))).numpy() for begin in range(start, stop, step)]
        return np.concatenate([np.zeros((0, self._spec.classes), np.float32), *pieces])

    def _make_memory(self) -> StateMemory:
        return StateMemory(self._spec, self._replica.optimizer.slots)

    def _copy_to(self, memory: StateMemory) -> None:
        self._replica.copy_to(memory)

    @property
    def _updates_done(self) -> int:
        return self._updates

    @property
    def _scalars(self) -> Mapping[str, float]:
        return self._replica.scalars

    def load(self, state: State | None) -> None:
        """Replace the state by rank 0's on every rank.

        Raises ValueError if it does not fit the model or optimiser.
        """
        self._replica.install(state, self._ranks.broadcast)
        self._updates = self._broadcast_count(None if state is None else state.updates)
        self._averaged = True

    def _open_trial(self) -> DirectTrial:
        """Connect the ranks over TCP, to time that all-reduce against the native one."""
        traced = self._ranks.traced(partial(self._ranks.on_replica, self._ranks.sum_in_order), tf.TensorSpec([None], tf.float32))

        def all_reduce(vector: Vector) -> Vector:
            return np.asarray(traced(tf.constant(vector)).numpy())

        def make(mesh: Mesh) -> CarryOut:
            return self._make_calibrator(TcpCollectives(mesh, self._device, sequential=self._sequential)).run

        return DirectTrial.open(self._task, not self._device.startswith("GPU"), all_reduce, self._job.node_timeout, make)

    def _make_repetition(self) -> CarryOut:
        return self._make_calibrator(self._ranks).run

    def _make_calibrator(self, ranks: Collectives) -> Calibrator:
        batches = calibration_batches(self._sampler, self._rank)
        scalars = self._replica.optimizer.host_scalars(np.zeros(1), self._updates + 1)[0]
        components = RankComponents(
            self._splits["train"], batches, self.steps.gradients, self._replica, ranks, scalars,
            workers=self._job.workers, dropout=self._passes.dropout,
        )  # fmt: skip
        looped = ranks.compiled if self.steps.in_compiled_loop else None
        return Calibrator(ranks.traced, components.make, deterministic=self._job.deterministic, compiled=looped)

    def _leave(self) -> None:
        self._ranks.leave()

    def _broadcast_count(self, count: int | None) -> int:
        """Return rank 0's count, sent as two exact float32 (each below 2²⁴)."""
        halves = None if count is None else np.array(divmod(count, 1 << 24), np.float32)
        high, low = self._ranks.broadcast(halves, (2,)).tolist()
        return (int(high) << 24) + int(low)

    def _average(self) -> None:
        self._averaging()

    def _average_in_ops(self) -> tf.Tensor:
        self._replica.average_buffers(self._ranks.all_reduce, self._job.workers)
        return tf.constant(True)

    def _call(self, batches: Batches, learning_rates: NDArray[np.float64], first_step: int) -> Array:
        losses = self.steps(batches, learning_rates, self._updates, first_step)
        self._updates += len(batches)
        self._averaged = False
        if self._replica.loss_scale is not None:
            self._replica.loss_scale.check()
        return losses

    def _evaluate(self, split: Split, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        parameters, buffers = self._replica.read(to_evaluate=True)
        context = self._passes.evaluation(buffers)
        sums = summed(self._model, self._splits[split], parameters, context, start, stop, self._micro_batches)
        return self._ranks.on_replica(lambda local: self._ranks.all_reduce([local])[0], sums)

    def _predict(self, split: Split, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        parameters, buffers = self._replica.read(to_evaluate=True)
        data = self._splits[split]
        micro_batches = data.micro_batches(*data.laid_batch(tf.range(start, stop)), self._micro_batches)
        return self._model.logits(parameters, micro_batches, self._passes.evaluation(buffers))
