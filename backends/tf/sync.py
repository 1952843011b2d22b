"""Synchronous training: every rank runs the same steps in lockstep and adds its share of each gradient (MultiWorkerMirroredStrategy).

One `tf.function` carries out many steps. With one worker, and unless the wrapper is asked for, it is a plain loop without a strategy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from .runtime import set_tf_config, single_threaded_executor, translated_errors, within

__all__ = ["SyncSession", "open_sync"]

STEPS_PER_CALL = 500
"""Most steps fused by default. Measured: the gain is complete at 100, and 500 are still short beside the half second of a command."""

EVALUATION_BATCH = 1024
"""Examples evaluated at once: bounds the memory that activations take."""

PACK_BYTES = 25 << 20
"""Gradients are reduced in packs of this size: one for a small model, several that overlap for a large one."""

Reduce = Callable[[Any], Any]


def open_sync(task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str) -> SyncSession:
    """Join the other ranks, put data and parameters in place and warm up."""
    strategy = _form_cluster(task, job) if job.wrapped else None
    session = SyncSession(task, job, spec, data, device, strategy)
    within(job.start_timeout, "warming up", session.warm_up)
    return session


def _form_cluster(task: Task, job: Job) -> tf.distribute.Strategy:
    set_tf_config(task)
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=PACK_BYTES, timeout_seconds=job.stall_timeout)
    with translated_errors(task):
        return within(
            job.start_timeout, "forming the cluster", lambda: tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        )


class SyncSession:
    """A rank at work; implements `Session`."""

    def __init__(
        self, task: Task, job: Job, spec: ModelSpec, data: Dataset, device: str, strategy: tf.distribute.Strategy | None
    ) -> None:
        self._task, self._job, self._spec, self._device, self._strategy = task, job, spec, device, strategy
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
        self._train = self._traced(
            self._steps, tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 2], tf.int32), tf.TensorSpec([None, None], tf.float32)
        )
        self._evaluations = {split: self._traced(self._evaluation(split)) for split in self._data}
        self._spread = self._traced(self._sum_over_ranks, tf.TensorSpec([None], tf.float32))

    def warm_up(self) -> None:
        """Trace and run everything once, on every rank together, then go back to the initial state."""
        initial = self.state()
        whole = self._sampler.for_rank(0, 0, 1, self._task.rank)
        twice = Batches(
            np.concatenate([whole.indices] * 2), np.append(whole.offsets, 2 * whole.offsets[-1]), np.repeat(whole.global_sizes, 2)
        )
        self._call(twice, np.zeros(2))
        for split in self._data:
            self.evaluate(split)
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
        slots = {
            slot: {name: of[slot].numpy() for name, of in zip(names, self._slots, strict=True)} for slot in self._optimizer.slots
        }
        return State(parameters, slots, self._updates)

    def load(self, state: State | None) -> None:
        """Replace the state on every rank by that of rank 0."""
        targets = [(variable, _value(state, None, name)) for name, variable in self._named()]
        targets += [(of[slot], _value(state, slot, name)) for (name, _), of in zip(self._named(), self._slots, strict=True) for slot in of]
        for variable, value in targets:
            given = np.zeros(variable.shape, np.float32) if value is None else value
            variable.assign(tf.reshape(self._spread(tf.constant(given.ravel())), variable.shape))
        updates = 0 if state is None else state.updates
        digits = np.array([updates >> 20, updates & 0xFFFFF], np.float32)  # exact in float32, unlike a large count
        high, low = self._spread(tf.constant(digits)).numpy().tolist()
        self._updates = (int(high) << 20) + int(low)

    def close(self) -> None:
        """Wait until every rank is here: one that leaves earlier would fail the others. Two barriers, since a rank may see the end of
        the first while another has yet to read its last message; after the first nothing can be lost any more, so the second may fail."""
        if self._closed:
            return
        self._closed = True
        if self._strategy is None:
            return
        self._spread(tf.zeros([1])).numpy()
        try:
            self._spread(tf.zeros([1])).numpy()
        except tf.errors.OpError as error:
            tf.get_logger().info("A peer left between the two closing barriers: %s", error)

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

    def _steps(self, reduce: Reduce, indices: tf.Tensor, slices_k2: tf.Tensor, scalars_ks: tf.Tensor) -> tf.Tensor:
        """Carry out k steps in ops; row i of `slices_k2` is (begin, size) in `indices`, of `scalars_ks` (global size, optimiser's …)."""
        count = tf.shape(slices_k2)[0]
        width = 1 + self._optimizer.host_scalars(np.zeros(0), 1).shape[1]

        def body(step: tf.Tensor, losses: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            begin, size = tf.split(tf.gather(slices_k2, step), 2)
            global_size, *scalars = tf.unstack(tf.gather(scalars_ks, step), width)
            x_bchw, y_b = self._data["train"].batch(tf.slice(indices, begin, size))
            parameters = {name: variable.read_value() for name, variable in self._named()}
            loss, gradients = self._model.loss_and_gradients(parameters, x_bchw, y_b, global_size)
            for variable, slots, gradient in zip(self._variables, self._slots, reduce(gradients), strict=True):
                self._optimizer.apply(variable, slots, gradient, scalars)
            return step + 1, losses.write(step, loss)

        losses = tf.TensorArray(tf.float32, size=count, element_shape=[])
        _, losses = tf.while_loop(lambda step, _: step < count, body, (tf.constant(0), losses))
        return reduce([losses.stack()])[0]

    def _evaluation(self, split: Split) -> Callable[[Reduce], tf.Tensor]:
        start, stop = split_evenly(self._sizes[split], self._job.workers)[self._task.rank]

        def evaluation(reduce: Reduce) -> tf.Tensor:
            parameters = {name: variable.read_value() for name, variable in self._named()}

            def body(begin: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                end = tf.minimum(begin + EVALUATION_BATCH, stop)
                return end, sums + self._model.sums(parameters, *self._data[split].batch(tf.range(begin, end)))

            _, sums = tf.while_loop(lambda begin, _: begin < stop, body, (tf.constant(start), tf.zeros([3], tf.float64)))
            return reduce([sums])[0]

        return evaluation

    def _sum_over_ranks(self, reduce: Reduce, vector: tf.Tensor) -> tf.Tensor:
        return reduce([vector])[0]

    def _traced(self, function: Callable[..., tf.Tensor], *signature: tf.TensorSpec) -> Callable[..., tf.Tensor]:
        """Make a `tf.function` of `function(reduce, …)`, where `reduce` adds a list of tensors up over all ranks."""
        strategy = self._strategy
        if strategy is None:
            device = self._device

            @tf.function(input_signature=signature, autograph=False)
            def alone(*arguments: tf.Tensor) -> tf.Tensor:
                with tf.device(device):
                    return function(lambda tensors: tensors, *arguments)

            def run(*arguments: tf.Tensor) -> tf.Tensor:
                with single_threaded_executor():
                    return alone(*arguments)

            return run

        def on_replica(*arguments: tf.Tensor) -> tf.Tensor:
            return function(_all_reduce, *arguments)

        @tf.function(input_signature=signature, autograph=False)
        def together(*arguments: tf.Tensor) -> tf.Tensor:
            return strategy.run(on_replica, args=arguments)

        result: Callable[..., tf.Tensor] = together
        return result


def _all_reduce(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Add each tensor up over all ranks (called on a replica)."""
    reduced: Sequence[tf.Tensor] = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(tensors))
    return reduced


def _value(state: State | None, slot: str | None, name: str) -> Array | None:
    """Return one array of a state: a parameter, or its value in a slot; None where this rank was given no state."""
    if state is None:
        return None
    values: Mapping[str, Array] = state.parameters if slot is None else state.slots[slot]
    return values[name]
