"""Synchronous training: every rank runs the same steps in lockstep and adds its share of each gradient (MultiWorkerMirroredStrategy).

One `tf.function` carries out many steps. With one worker, and unless the wrapper is asked for, it is a plain loop without a strategy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.cluster import Task, split_evenly
from ...core.job import Job
from ...data.base import Dataset, Split
from ...data.sampler import Batches
from ...models.base import Array, ModelSpec
from ..base import EvalResult, Plan, State, StepResult, make_sampler
from .data import Resident, resident
from .model import TfModel, build_model
from .optimizers import Optimizer, build_optimizer
from .ranks import Ranks, form
from .runtime import within

__all__ = ["SyncSession", "open_sync"]

STEPS_PER_CALL = 2000
"""Most steps fused by default. A call costs about half a millisecond besides its steps: at 45,000 steps/s that is 4% of 500 steps."""

WARM_SPLIT: Split = "test"
"""The split that runs are evaluated on; the evaluation of another one is traced when it is first asked for."""

EVALUATION_BATCH = 1024
"""Examples evaluated at once: bounds the memory that activations take."""


def open_sync(task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str) -> SyncSession:
    """Join the other ranks, put data and parameters in place and warm up."""
    session = SyncSession(task, job, spec, data, device, form(task, job, device))
    within(job.start_timeout, "warming up", session.warm_up)
    return session


class SyncSession:
    """A rank at work; implements `Session`."""

    def __init__(self, task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str, ranks: Ranks) -> None:
        self._task, self._job, self._spec, self._ranks = task, job, spec, ranks
        self._sampler = make_sampler(job, data)
        self._model: TfModel = build_model(job.model, spec)
        self._optimizer: Optimizer = build_optimizer(job)
        self._updates = 0
        self._closed = False
        with tf.device(device):
            self._data: dict[Split, Resident] = {split: resident(data, split) for split in ("train", "test")}
            self._variables = [tf.Variable(value, name=name) for name, value in spec.initial(job.seed).items()]
            self._slots = [{slot: tf.Variable(tf.zeros_like(variable)) for slot in self._optimizer.slots} for variable in self._variables]
            self._sizes = {split: int(self._data[split].labels.shape[0]) for split in self._data}
        integers, floats = tf.int32, tf.float32
        self._train = ranks.traced(
            self._steps, tf.TensorSpec([None], integers), tf.TensorSpec([None, 2], integers), tf.TensorSpec([None, None], floats)
        )
        self._evaluations = {split: ranks.traced(self._evaluation(split)) for split in self._data}

    def warm_up(self) -> None:
        """Trace and run everything once, on every rank together, then go back to the initial state."""
        initial = self.state()
        whole = self._sampler.for_rank(0, 0, 1, self._task.rank)
        twice = Batches(
            np.concatenate([whole.indices] * 2), np.append(whole.offsets, 2 * whole.offsets[-1]), np.repeat(whole.global_sizes, 2)
        )
        self._call(twice, np.zeros(2))
        self.evaluate(WARM_SPLIT)
        self.load(initial if self._task.rank == 0 else None)

    def train(self, plan: Plan) -> Iterator[StepResult]:
        """Apply the plan in calls of at most `job.steps_per_call` steps; a call is a result."""
        at_once = self._job.steps_per_call or STEPS_PER_CALL
        for begin in range(0, plan.count, at_once):
            count = min(at_once, plan.count - begin)
            started = time.perf_counter()
            batches = self._sampler.for_rank(plan.epoch, plan.first_in_epoch + begin, count, self._task.rank)
            losses = self._call(batches, plan.learning_rates[begin : begin + count])
            examples = int(batches.global_sizes.sum())
            yield StepResult(plan.first_step + begin, losses, examples, time.perf_counter() - started)

    def drain(self) -> Iterator[StepResult]:
        """Nothing is ever outstanding."""
        return iter(())

    def evaluate(self, split: Split) -> EvalResult:
        """Evaluate a contiguous share of the split on every rank and add up; the number of examples is checked."""
        started = time.perf_counter()
        loss_sum, correct, count = self._evaluations[split]().numpy().tolist()
        if count != self._sizes[split]:
            raise RuntimeError(f"evaluation covered {count:g} examples of split {split!r} instead of {self._sizes[split]}")
        return EvalResult(split, int(count), loss_sum, int(correct), time.perf_counter() - started, self._updates)

    def state(self) -> State:
        """Return a copy of the state; every rank has the same."""
        names = [parameter.name for parameter in self._spec.parameters]
        parameters = {name: variable.numpy() for name, variable in zip(names, self._variables, strict=True)}
        slots = {slot: {name: of[slot].numpy() for name, of in zip(names, self._slots, strict=True)} for slot in self._optimizer.slots}
        return State(parameters, slots, self._updates)

    def load(self, state: State | None) -> None:
        """Replace the state on every rank by that of rank 0."""
        for (name, variable), slots in zip(self._named(), self._slots, strict=True):
            shape = tuple(variable.shape)
            variable.assign(self._ranks.spread(None if state is None else state.parameters[name], shape))
            for slot, of in slots.items():
                of.assign(self._ranks.spread(None if state is None else state.slots[slot][name], shape))
        self._updates = self._spread_count(None if state is None else state.updates)

    def close(self) -> None:
        """Wait until every rank is here, then leave; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._ranks.leave()

    def _spread_count(self, count: int | None) -> int:
        """Return rank 0's count, sent as two float32 that hold it exactly (each below 2²⁴)."""
        halves = None if count is None else np.array(divmod(count, 1 << 24), np.float32)
        high, low = self._ranks.spread(halves, (2,)).tolist()
        return (int(high) << 24) + int(low)

    def _named(self) -> list[tuple[str, tf.Variable]]:
        return [(parameter.name, variable) for parameter, variable in zip(self._spec.parameters, self._variables, strict=True)]

    def _call(self, batches: Batches, learning_rates: NDArray[np.float64]) -> Array:
        """Run one call: len(batches) updates. Returns each update's loss over all ranks, float32 [count]."""
        slices = np.stack([batches.offsets[:-1], np.diff(batches.offsets)], axis=1)
        scalars = self._optimizer.host_scalars(learning_rates, self._updates + 1)
        scalars = np.concatenate([batches.global_sizes.astype(np.float32)[:, None], scalars], axis=1)
        losses: Array = self._train(tf.constant(batches.indices), tf.constant(slices), tf.constant(scalars)).numpy()
        self._updates += len(batches)
        return losses

    def _steps(self, indices: tf.Tensor, slices_k2: tf.Tensor, scalars_ks: tf.Tensor) -> tf.Tensor:
        """Carry out k steps in ops; row i of `slices_k2` is (begin, size) in `indices`, of `scalars_ks` (global size, optimiser's …)."""
        count = tf.shape(slices_k2)[0]
        width = 1 + self._optimizer.host_scalars(np.zeros(0), 1).shape[1]

        def body(step: tf.Tensor, losses: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            begin, size = tf.split(tf.gather(slices_k2, step), 2)
            global_size, *scalars = tf.unstack(tf.gather(scalars_ks, step), width)
            loss = self._ranks.on_replica(self._step, tf.slice(indices, begin, size), global_size, *scalars)
            return step + 1, losses.write(step, loss)

        losses = tf.TensorArray(tf.float32, size=count, element_shape=[])
        _, losses = tf.while_loop(lambda step, _: step < count, body, (tf.constant(0), losses))
        return self._ranks.on_replica(lambda local: self._ranks.add_up([local])[0], losses.stack())

    def _step(self, indices: tf.Tensor, global_size: tf.Tensor, *scalars: tf.Tensor) -> tf.Tensor:
        """Apply one update from this rank's examples and the other ranks' gradients; return this rank's share of the loss."""
        x_bchw, y_b = self._data["train"].batch(indices)
        parameters = {name: variable.read_value() for name, variable in self._named()}
        loss, gradients = self._model.loss_and_gradients(parameters, x_bchw, y_b, global_size)
        for variable, slots, gradient in zip(self._variables, self._slots, self._ranks.add_up(gradients), strict=True):
            self._optimizer.apply(variable, slots, gradient, scalars)
        return loss

    def _evaluation(self, split: Split) -> Callable[[], tf.Tensor]:
        """Make the function that evaluates this rank's share of a split and adds the sums up over all ranks."""
        start, stop = split_evenly(self._sizes[split], self._job.workers)[self._task.rank]

        def evaluation() -> tf.Tensor:
            parameters = {name: variable.read_value() for name, variable in self._named()}

            def body(begin: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                end = tf.minimum(begin + EVALUATION_BATCH, stop)
                return end, sums + self._model.sums(parameters, *self._data[split].batch(tf.range(begin, end)))

            _, sums = tf.while_loop(lambda begin, _: begin < stop, body, (tf.constant(start), tf.zeros([3], tf.float64)))
            return self._ranks.on_replica(lambda local: self._ranks.add_up([local])[0], sums)

        return evaluation
