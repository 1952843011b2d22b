"""The steps of a sync rank: a loop of ops that makes many of them, or one that XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....core.job import Job
from ....data.sampler import Batches
from ....models.base import Array
from ...compiling.choice import compiled_sizes
from ..accumulation import accumulated
from ..compiler.gradients import compiled
from ..compiler.loop import CompiledLoop
from ..data import Batch, ColumnTensors, Resident
from ..forward_context import ForwardContexts
from ..model import TfModel
from .collectives import Collectives
from .replica import Replica

__all__ = ["Steps"]

STEPS_PER_CALL = 2000
"""Most steps fused by default. A call costs about half a millisecond besides its steps: at 45,000 steps/s that is 4% of 500 steps."""

_NO_CHANGES = np.zeros((0, 3), np.int32)


class Steps:
    """Makes updates from a rank's examples. `data` are the training examples; `first` is the first batch, by whose size XLA compiles."""

    def __init__(
        self,
        job: Job,
        model: TfModel,
        replica: Replica,
        ranks: Collectives,
        data: Resident,
        passes: ForwardContexts,
        first: Batches,
        micro_batches: int,
    ) -> None:
        self._job, self._replica, self._ranks, self._data, self._passes = job, replica, ranks, data, passes
        self._model = self._op_by_op = model
        self._first, self._size, self._micro_batches = first, int(first.offsets[-1]), micro_batches
        self._changing = data.layout.changing
        self._by_xla: TfModel | None = None
        self._loop: CompiledLoop | None = None
        self._train = ranks.traced(
            self._steps,
            *(tf.TensorSpec([None], kind) for kind in (tf.int32, tf.int64, tf.float32)),
            tf.TensorSpec([None, None], tf.float32),
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([None, 3], tf.int32),
        )

    def compile(self, *, on: bool) -> None:
        """Have whatever is traced from now on compute by XLA, or op by op."""
        self._model = self._compiled_model() if on else self._op_by_op
        self._replica.compiled = on
        self._loop = self._compiled_loop() if on else None

    def _compiled_loop(self) -> CompiledLoop | None:
        """Return a loop of steps that XLA compiles as a whole, where nothing in a step comes from outside it."""
        plain = self._job.accumulate == self._micro_batches == 1 and self._replica.loss_scale is None
        if not plain or self._changing or self._passes.dropout:
            return None
        return CompiledLoop.of(self._compiled_step, self._ranks.compiled, self._size, self._scalars_of_a_step, self.most_per_call)

    def _compiled_step(self, indices: tf.Tensor, share: tf.Tensor, *scalars: tf.Tensor) -> tf.Tensor:
        return self._step(indices, None, None, share, *scalars)

    @property
    def _scalars_of_a_step(self) -> int:
        of_optimizer: int = self._replica.optimizer.host_scalars(np.zeros(0), 1).shape[1]
        return 1 + of_optimizer

    @property
    def most_per_call(self) -> int:
        """How many updates a call makes at most."""
        return self._job.steps_per_call or STEPS_PER_CALL

    @property
    def in_compiled_loop(self) -> bool:
        """Whether XLA compiles the loop of steps, too."""
        return self._loop is not None

    def _compiled_model(self) -> TfModel:
        """Return the model whose gradients XLA compiles; the same each time, so that what it has compiled already is not compiled again."""
        if self._by_xla is None:
            self._by_xla = compiled(self._op_by_op, compiled_sizes(self._size, self._job.accumulate, self._micro_batches))
        return self._by_xla

    def to_compile_gradient(self) -> Callable[[], object]:
        """Return what compiles the gradient of a batch, or micro-batch, and computes it. It only reads, and so it may end late."""
        batch, model = self._first, self._compiled_model()
        first, _ = batch.in_micro_batches(self._job.accumulate)
        stop = int(first.offsets[1])

        def gradient() -> tf.Tensor:
            indices = tf.constant(batch.indices[:stop])
            laid, target = self._data.laid_batch(indices, None if batch.changes is None else tf.constant(batch.changes[:stop]))
            parameters, buffers = self._replica.read()
            context = self._passes.training(buffers, tf.constant(0, tf.int64) if self._passes.dropout else None, indices)
            micro_batches = self._data.micro_batches(laid, target, self._micro_batches)
            loss_sum, gradients = model.loss_and_gradients(parameters, micro_batches, tf.constant(1.0), context)
            return tf.add_n([loss_sum, *(tf.reshape(one, [-1])[0] for one in gradients)])

        function = self._ranks.traced(gradient)
        return lambda: function().numpy()

    def __call__(self, batches: Batches, learning_rates: NDArray[np.float64], updates: int, first_step: int) -> Array:
        """Make len(batches) updates after `updates` others. Returns each one's loss over all ranks, float32 [count]."""
        scalars = self._replica.optimizer.host_scalars(learning_rates, updates + 1)
        scalars = np.concatenate([1 / batches.weights.astype(np.float32)[:, None], scalars], axis=1)
        if self._loop is None:
            return self._in_ops(batches, scalars, first_step)
        losses = []
        for first, count, fits in self._loop.parts(batches):
            part, own = batches.slice(first, count), scalars[first : first + count]
            losses.append(self._loop(part, own) if fits else self._in_ops(part, own, first_step + first))
        return np.concatenate(losses)

    def _in_ops(self, batches: Batches, scalars: NDArray[np.float32], first_step: int) -> Array:
        own = slice(int(batches.offsets[0]), int(batches.offsets[-1]))
        sizes, weights = np.diff(batches.offsets).astype(np.int64), batches.weights.astype(np.float32)
        changes = _NO_CHANGES if batches.changes is None else batches.changes[own]
        inputs = (batches.indices[own], sizes, weights, scalars, np.int64(first_step), changes)
        losses: Array = self._train(*map(tf.constant, inputs)).numpy()
        return losses

    def _steps(
        self,
        indices: tf.Tensor,
        sizes_k: tf.Tensor,
        weights_k: tf.Tensor,
        scalars_ks: tf.Tensor,
        first_step: tf.Tensor,
        changes: tf.Tensor,
    ) -> tf.Tensor:
        """Carry out k steps in ops; return their losses [k].

        Step i takes the next `sizes_k[i]` of `indices` (and of `changes`, where images are changed). `weights_k` are those of the global
        batches, and row i of `scalars_ks` is (1 / weight, optimiser's …). What can be done for all steps at once is done outside the
        loop, where an op costs nothing; what a model or a job does not need is not in the loop at all.
        """
        count = tf.size(sizes_k)
        width = self._scalars_of_a_step
        batches = tf.TensorArray(tf.int32, size=count, element_shape=[None], infer_shape=False).split(indices, sizes_k)
        if self._changing:
            cut_changes = tf.TensorArray(tf.int32, size=count, element_shape=[None, 3], infer_shape=False).split(changes, sizes_k)

        def body(step: tf.Tensor, loss_sums: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            share, *scalars = tf.unstack(tf.gather(scalars_ks, step), width)
            number = first_step + tf.cast(step, tf.int64) if self._passes.dropout else None
            changed = cut_changes.read(step) if self._changing else None
            loss_sum = self._ranks.on_replica(self._step, batches.read(step), changed, number, share, *scalars)
            return step + 1, loss_sums.write(step, loss_sum)

        loss_sums = tf.TensorArray(tf.float32, size=count, element_shape=[])
        _, loss_sums = tf.while_loop(lambda step, _: step < count, body, (tf.constant(0), loss_sums))
        return self._ranks.on_replica(self._ranks.add_in_order, loss_sums.stack() / weights_k)

    def _step(
        self, indices: tf.Tensor, changes: tf.Tensor | None, number: tf.Tensor | None, share: tf.Tensor, *scalars: tf.Tensor
    ) -> tf.Tensor:
        """Apply one update from this rank's examples and the other ranks' gradients; return the sum of this rank's example losses."""
        if self._job.accumulate == 1:
            laid, target = self._data.laid_batch(indices, changes)
            loss_sum, gradients = self._gradients(laid, target, indices, number, share)
        else:

            def take(begin: tf.Tensor, end: tf.Tensor) -> tuple[Batch, tf.Tensor]:
                own = indices[begin:end]
                return self._data.laid_batch(own, None if changes is None else changes[begin:end]), own

            loss_sum, gradients = self._accumulated(take, tf.size(indices), number, share)
        self._replica.apply(self._ranks.add_up(gradients), scalars)
        return loss_sum

    def _accumulated(
        self, take: Callable[[tf.Tensor, tf.Tensor], tuple[Batch, tf.Tensor]], size: tf.Tensor, number: tf.Tensor | None, share: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """Do the same as `_gradients` in micro-batches, one after another. `take` gives the examples begin … end − 1 and their indices."""

        def compute(begin: tf.Tensor, end: tf.Tensor, micro_batch: tf.Tensor, *_sums: tf.Tensor) -> list[tf.Tensor]:
            (laid, target), indices = take(begin, end)
            loss_sum, gradients = self._gradients(laid, target, indices, number, share, micro_batch)
            return [loss_sum, *gradients]

        loss_sum, *gradients = accumulated(compute, size, self._job.accumulate, [tf.zeros([]), *self._replica.zeros()])
        return loss_sum, gradients

    def gradients(
        self, laid: ColumnTensors, target: ColumnTensors, indices: tf.Tensor, number: tf.Tensor | None, share: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """Return the same of examples that were gathered together, in as many micro-batches as training computes them in."""
        if self._job.accumulate == 1:
            return self._gradients(laid, target, indices, number, share)

        def take(begin: tf.Tensor, end: tf.Tensor) -> tuple[Batch, tf.Tensor]:
            part: Batch = tf.nest.map_structure(lambda tensor: tensor[begin:end], (laid, target))
            return part, indices[begin:end]

        return self._accumulated(take, tf.size(indices), number, share)

    def _gradients(
        self,
        laid: ColumnTensors,
        target: ColumnTensors,
        indices: tf.Tensor,
        number: tf.Tensor | None,
        share: tf.Tensor,
        micro_batch: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """Return the sum of this rank's example losses and its share of the gradients; buffers are kept. Images lie as in memory."""
        parameters, buffers = self._replica.read()
        context = self._passes.training(buffers, number, indices, micro_batch)
        scale = self._replica.loss_scale
        slope = share if scale is None else share * scale.scale
        micro_batches = self._data.micro_batches(laid, target, self._micro_batches)
        loss_sum, gradients = self._model.loss_and_gradients(parameters, micro_batches, slope, context)
        self._replica.keep(context.updated)
        return loss_sum, gradients
