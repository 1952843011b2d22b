"""Components of a step, as an async worker repeats them on the chief's order.

See `Session.calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ...base import StepComponent
from ..calibration import LIMITS, SMALL_ELEMENTS, State, Step, any_element, ready_after, repeated
from ..data import Batch, Resident, part_of
from ..model import flattened
from .tickets import Work, unpack
from .worker import WorkerFunctions

PUSHED = 1e-3  # with zeros slots would decay to numbers that are slow to compute with


class WorkerComponents(WorkerFunctions):
    """Functions of a worker's components.

    Each maps a `local_dataset` iterator, a ticket with batches, and limits to float64 [3]: worker's index, and `repeated`.
    """

    def function(self, component: StepComponent) -> Callable[[Iterator[Any], tf.Tensor, tf.Tensor], tf.Tensor]:
        """Make a component's function; as in training its loop has only explicit dependencies."""

        def loop(*arguments: tf.Tensor) -> tf.Tensor:
            *tensors, ticket, limits = arguments
            data, work = Resident.from_tensors(self.layout, "train", tensors), unpack(ticket, changing=self.layout.changing)
            state, step = self._make(component, data, work)
            return repeated(step, state, limits)

        specs = self.layout.tensor_specs("train")
        vectors = tf.TensorSpec([None], tf.int32), LIMITS
        wrapped = tf.compat.v1.wrap_function(loop, [*specs, *vectors])

        def run(iterator: Iterator[Any], ticket: tf.Tensor, limits: tf.Tensor) -> tf.Tensor:
            worker, *tensors = next(iterator)
            return tf.concat([[tf.cast(worker, tf.float64)], wrapped(*tensors[: len(specs)], ticket, limits)], axis=0)

        return run

    def _make(self, component: StepComponent, data: Resident, work: Work) -> tuple[State, Step]:
        if component == "data":
            return ready_after([*data.tensors.values(), work.indices]), self._gathering(data, work)
        if component in ("compute", "half"):
            return self._computing(data, work, half=component == "half")
        if component == "communicate":
            return [tf.identity(shard.pull()) for shard in self.shards], self._push
        return [tf.zeros([SMALL_ELEMENTS]) for _ in self.shards], self._echo

    @staticmethod
    def _batch(data: Resident, work: Work, position: tf.Tensor | int) -> tuple[Batch, tf.Tensor]:
        begin, end = tf.gather(work.offsets, position), tf.gather(work.offsets, position + 1)
        indices = work.indices[begin:end]
        return data.laid_batch(indices, None if work.changes is None else work.changes[begin:end]), indices

    def _gathering(self, data: Resident, work: Work) -> Step:
        def gather(done: tf.Tensor, state: State) -> State:
            batch, _ = self._batch(data, work, tf.math.floormod(done, work.count))
            return [any_element(batch)]

        return gather

    def _computing(self, data: Resident, work: Work, *, half: bool) -> tuple[State, Step]:
        batch, indices = self._batch(data, work, 0)
        size = tf.size(indices) // 2 if half else tf.size(indices)
        batch, indices = part_of((batch, indices), 0, size)
        messages = [tf.identity(shard.pull()) for shard in self.shards]

        def compute(done: tf.Tensor, state: State) -> State:
            with tf.control_dependencies(state):
                received = [tf.identity(message) for message in messages]
            values = self.pull(received)
            number = work.first_step + tf.cast(done, tf.int64) if self.passes.dropout else None
            weight = 1.0 / work.weights[0]
            if self.job.accumulate == 1:
                (read,) = data.micro_batches(*batch, 1)
                loss_sum, gradients, decrements = self.compute_batch(read, indices, values, weight, number)
            else:

                def take(begin: tf.Tensor, end: tf.Tensor) -> tuple[Batch, tf.Tensor]:
                    (laid, target), taken = part_of((batch, indices), begin, end)
                    return (data.as_read(laid), target), taken

                loss_sum, gradients, decrements = self.compute_micro_batches(take, tf.size(indices), values, weight, number)
            return [flattened([*gradients, *decrements])[:1] + loss_sum]

        return ready_after([*tf.nest.flatten(batch), indices, *messages]), compute

    def _push(self, done: tf.Tensor, state: State) -> State:
        return [
            shard.push(tf.fill([shard.stop - shard.start], PUSHED), tf.constant(0.0), message)
            for shard, message in zip(self.shards, state, strict=True)
        ]

    def _echo(self, done: tf.Tensor, state: State) -> State:
        answers = []
        for shard, message in zip(self.shards, state, strict=True):
            with tf.device(shard.device):
                answers.append(message + 1.0)
        return answers
