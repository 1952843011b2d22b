"""The steps of a sync rank, in a loop of ops or one compiled by XLA, and its variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....core.job import Job
from ....core.patterns import matching
from ....core.update_rules import EMA, weights_to_evaluate, without_decay
from ....data.sampler import Batches
from ....models.base import Array, ParameterSpec
from ....models.layers.tf import HeldParameters
from ...base import State
from ...compiling import compiled_sizes
from ...vectors import StateMemory
from ..compiler import CompiledLoop, compiled
from ..data import Batch, Columns, Resident, Tensors, part_of
from ..model import Buffers, ForwardContexts, TfModel
from ..optimizers import LossScale, Optimizer, accumulated, build_optimizer, clipped
from ..runtime import checked_values, copy_all
from .collectives import Collectives

Broadcast = Callable[[Array | None, tuple[int, ...]], Array]


class Replica:
    """Variables of a rank, in the model's layouts.

    Parameters and slots are equal on all ranks, buffers are not.
    """

    def __init__(self, job: Job, model: TfModel) -> None:
        spec = self._spec = model.spec
        self._model, self._seed = model, job.seed
        self.optimizer: Optimizer = build_optimizer(job)
        exempt = matching(job.weight_decay_except, [parameter.name for parameter in spec.parameters])
        exempting = build_optimizer(without_decay(job))  # its scalars are the same
        self._rules = [exempting if parameter.name in exempt else self.optimizer for parameter in spec.parameters]
        self._parameters = [tf.Variable(model.to_storage(name, value), name=name) for name, value in spec.initial(job.seed).items()]
        self._slots = [{slot: tf.Variable(tf.zeros_like(variable)) for slot in self.optimizer.slots} for variable in self._parameters]
        self._buffers = {name: tf.Variable(value, name=name) for name, value in spec.initial_buffers(job.seed).items()}
        self.loss_scale = LossScale() if job.precision == "fp16" else None
        self._clip_norm = job.clip_norm
        self.compiled = False
        self._to_evaluate = [weights_to_evaluate(*held) for held in zip(self._parameters, self._slots, strict=True)]
        self._averages = [slots[EMA] for slots in self._slots] if EMA in self.optimizer.slots else None
        self._reset_averages()

    def read(self, *, to_evaluate: bool = False) -> tuple[HeldParameters, Buffers]:
        """Return parameters, maybe their moving averages, and buffers, in ops.

        `read_value` would add a copy of the reference.
        """
        variables = self._to_evaluate if to_evaluate else self._parameters
        named = zip((parameter.name for parameter in self._spec.parameters), variables, strict=True)
        parameters = self._model.parameters({name: _read(variable) for name, variable in named})
        return parameters, {name: _read(variable) for name, variable in self._buffers.items()}

    def apply(self, gradients: Tensors, scalars: Tensors) -> None:
        """In ops: update every parameter, unless a scaled gradient overflowed."""

        def update(gradients: Tensors, scalars: Tensors) -> None:
            if self._clip_norm:
                gradients = clipped(gradients, self._clip_norm)
            for rule, variable, slots, gradient in zip(self._rules, self._parameters, self._slots, gradients, strict=True):
                rule.apply(variable, slots, gradient, scalars)

        if self.compiled:
            update = tf.function(update, jit_compile=True, autograph=False)
        if self.loss_scale is None:
            update(gradients, scalars)
        else:
            self.loss_scale.guarded(gradients, lambda unscaled: update(unscaled, scalars))

    def zeros(self) -> list[tf.Tensor]:
        """In ops: return zeros in the shapes of the gradients."""
        return [tf.zeros(variable.shape) for variable in self._parameters]

    def any_element(self) -> tf.Tensor:
        """In ops: return a number of the largest parameter, whose update takes longest."""
        largest = max(self._parameters, key=lambda variable: int(np.prod(variable.shape)))
        return tf.reshape(_read(largest), [-1])[0]

    def keep(self, updated: Buffers) -> None:
        """In ops: take over the buffers that a training pass has changed."""
        for name, value in updated.items():
            self._buffers[name].assign(value)

    def average_buffers(self, all_reduce: Callable[[Tensors], Tensors], workers: int) -> None:
        """In ops: replace the buffers by their mean over the ranks."""
        sums = all_reduce([_read(variable) for variable in self._buffers.values()])
        for variable, summed in zip(self._buffers.values(), sums, strict=True):
            variable.assign(summed / workers)

    def reset(self) -> None:
        """Undo updates with a learning rate of 0.

        They change no parameter, so no copy of those is needed.
        """
        for variable in (variable for slots in self._slots for variable in slots.values()):
            variable.assign(tf.zeros_like(variable))
        self._reset_averages()
        for name, value in self._spec.initial_buffers(self._seed).items():
            self._buffers[name].assign(value)
        if self.loss_scale is not None:
            self.loss_scale.restore({})

    def _reset_averages(self) -> None:
        for average, variable in zip(self._averages or (), self._parameters, strict=self._averages is not None):
            average.assign(variable)

    @property
    def scalars(self) -> Mapping[str, float]:
        """The further numbers of the state."""
        return {} if self.loss_scale is None else self.loss_scale.scalars

    def copy_to(self, memory: StateMemory) -> None:
        """Copy everything.

        On a CPU sources are views of the variables' memory, released immediately.
        """
        copy_all((into, self._canonical_view(spec.name, held)) for into, (spec, held) in zip(memory.arrays, self._variables(), strict=True))

    def _variables(self) -> list[tuple[ParameterSpec, tf.Variable]]:
        """Return all variables in the order of `vectors.each_value`."""
        trained = [self._parameters, *([slots[slot] for slots in self._slots] for slot in self.optimizer.slots)]
        pairs = [pair for variables in trained for pair in zip(self._spec.parameters, variables, strict=True)]
        return pairs + [(buffer, self._buffers[buffer.name]) for buffer in self._spec.buffers]

    def install(self, state: State | None, broadcast: Broadcast) -> None:
        """Take over rank 0's state, which `broadcast` broadcasts; absent slots are reset.

        Others give None. Raises ValueError.
        """
        variables = self._variables()
        values = [None] * len(variables) if state is None else checked_values(self._spec, self.optimizer.slots, state)
        for (spec, variable), value in zip(variables, values, strict=True):
            array = np.zeros(spec.shape, np.float32) if value is None and state is not None else value
            variable.assign(self._model.to_storage(spec.name, broadcast(array, spec.shape)))
        if self.loss_scale is not None:
            scalars = {} if state is None else state.scalars
            array = np.array([scalars.get(name, value) for name, value in LossScale.initial().items()], np.float32)
            scale = broadcast(None if state is None else array, array.shape)
            self.loss_scale.restore(dict(zip(LossScale.initial(), scale.tolist(), strict=True)))

    def _canonical_view(self, name: str, variable: tf.Variable) -> Array:
        held = np.asarray(variable.read_value())
        return self._model.layouts[name].as_canonical(held) if name in self._model.layouts else held


def _read(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


STEPS_PER_CALL = 2000  # default; a call costs 0.5 ms: at 45,000 steps/s 4% of 500 steps
_NO_CHANGES = np.zeros((0, 3), np.int32)


class Steps:
    """Updates from a rank's examples.

    `data` are the training examples; XLA compiles for the size of batch `first`.
    """

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
        """Compute whatever is traced from now on by XLA, or op by op."""
        self._model = self._compiled_model() if on else self._op_by_op
        self._replica.compiled = on
        self._loop = self._compiled_loop() if on else None

    def _compiled_loop(self) -> CompiledLoop | None:
        """Return a loop of steps that XLA compiles as a whole, if a step needs nothing from outside."""
        plain = self._job.accumulate == self._micro_batches == 1 and self._replica.loss_scale is None
        if not plain or self._changing or self._passes.dropout:
            return None
        step = lambda indices, share, *scalars: self._step(indices, None, None, share, *scalars)  # noqa: E731
        return CompiledLoop.from_step(step, self._ranks.compiled, self._size, self._scalars_of_a_step, self.most_per_call)

    @property
    def _scalars_of_a_step(self) -> int:
        of_optimizer: int = self._replica.optimizer.host_scalars(np.zeros(0), 1).shape[1]
        return 1 + of_optimizer

    @property
    def most_per_call(self) -> int:
        """Maximum of updates in a call."""
        return self._job.steps_per_call or STEPS_PER_CALL

    @property
    def in_compiled_loop(self) -> bool:
        """Whether XLA compiles the loop of steps, too."""
        return self._loop is not None

    def _compiled_model(self) -> TfModel:
        if self._by_xla is None:
            self._by_xla = compiled(self._op_by_op, compiled_sizes(self._size, self._job.accumulate, self._micro_batches))
        return self._by_xla

    def to_compile_gradient(self) -> Callable[[], object]:
        """Return what compiles and computes the gradient of a (micro-)batch.

        It only reads, so it may end late.
        """
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
            return tf.add_n([loss_sum, *(tf.reshape(tensor, [-1])[0] for tensor in gradients)])

        function = self._ranks.traced(gradient)
        return lambda: function().numpy()

    def __call__(self, batches: Batches, learning_rates: NDArray[np.float64], updates: int, first_step: int) -> Array:
        """Make len(batches) updates after `updates` others.

        Return each one's loss over all ranks, float32 [count].
        """
        scalars = self._replica.optimizer.host_scalars(learning_rates, updates + 1)
        scalars = np.concatenate([1 / batches.weights.astype(np.float32)[:, None], scalars], axis=1)
        if self._loop is None:
            return self._in_ops(batches, scalars, first_step)
        losses = []
        for first, count, fits in self._loop.parts(batches):
            part, part_scalars = batches.slice(first, count), scalars[first : first + count]
            losses.append(self._loop(part, part_scalars) if fits else self._in_ops(part, part_scalars, first_step + first))
        return np.concatenate(losses)

    def _in_ops(self, batches: Batches, scalars: Array, first_step: int) -> Array:
        examples = slice(int(batches.offsets[0]), int(batches.offsets[-1]))
        sizes, weights = np.diff(batches.offsets).astype(np.int64), batches.weights.astype(np.float32)
        changes = _NO_CHANGES if batches.changes is None else batches.changes[examples]
        inputs = (batches.indices[examples], sizes, weights, scalars, np.int64(first_step), changes)
        return np.asarray(self._train(*map(tf.constant, inputs)).numpy())

    def _steps(
        self,
        indices: tf.Tensor,
        sizes_k: tf.Tensor,
        weights_k: tf.Tensor,
        scalars_ks: tf.Tensor,
        first_step: tf.Tensor,
        changes: tf.Tensor,
    ) -> tf.Tensor:
        """Return k steps' losses [k].

        Step i takes the next `sizes_k[i]` of `indices`; `scalars_ks` rows: 1 / weight, optimiser's.
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
        return self._ranks.on_replica(self._ranks.sum_in_order, loss_sums.stack() / weights_k)

    def _step(
        self, indices: tf.Tensor, changes: tf.Tensor | None, number: tf.Tensor | None, share: tf.Tensor, *scalars: tf.Tensor
    ) -> tf.Tensor:
        if self._job.accumulate == 1:
            laid, target = self._data.laid_batch(indices, changes)
            loss_sum, gradients = self._gradients(laid, target, indices, number, share)
        else:

            def take(begin: tf.Tensor, end: tf.Tensor) -> tuple[Batch, tf.Tensor]:
                taken = indices[begin:end]
                return self._data.laid_batch(taken, None if changes is None else changes[begin:end]), taken

            loss_sum, gradients = self._accumulated(take, tf.size(indices), number, share)
        self._replica.apply(self._ranks.all_reduce(gradients), scalars)
        return loss_sum

    def _accumulated(
        self, take: Callable[[tf.Tensor, tf.Tensor], tuple[Batch, tf.Tensor]], size: tf.Tensor, number: tf.Tensor | None, share: tf.Tensor
    ) -> tuple[tf.Tensor, Tensors]:
        """Compute as `_gradients` in micro-batches, in turn.

        `take` returns examples begin … end − 1 and their indices.
        """

        def compute(begin: tf.Tensor, end: tf.Tensor, micro_batch: tf.Tensor, *_sums: tf.Tensor) -> list[tf.Tensor]:
            (laid, target), indices = take(begin, end)
            loss_sum, gradients = self._gradients(laid, target, indices, number, share, micro_batch)
            return [loss_sum, *gradients]

        loss_sum, *gradients = accumulated(compute, size, self._job.accumulate, [tf.zeros([]), *self._replica.zeros()])
        return loss_sum, gradients

    def gradients(
        self, laid: Columns, target: Columns, indices: tf.Tensor, number: tf.Tensor | None, share: tf.Tensor
    ) -> tuple[tf.Tensor, Tensors]:
        """Return the same of examples gathered together, in as many micro-batches as in training."""
        if self._job.accumulate == 1:
            return self._gradients(laid, target, indices, number, share)
        return self._accumulated(partial(part_of, ((laid, target), indices)), tf.size(indices), number, share)

    def _gradients(
        self,
        laid: Columns,
        target: Columns,
        indices: tf.Tensor,
        number: tf.Tensor | None,
        share: tf.Tensor,
        micro_batch: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, Tensors]:
        """Return the sum of this rank's losses and its part of the gradients; buffers are kept.

        Images lie as in memory.
        """
        parameters, buffers = self._replica.read()
        context = self._passes.training(buffers, number, indices, micro_batch)
        scale = self._replica.loss_scale
        slope = share if scale is None else share * scale.scale
        micro_batches = self._data.micro_batches(laid, target, self._micro_batches)
        loss_sum, gradients = self._model.loss_and_gradients(parameters, micro_batches, slope, context)
        self._replica.keep(context.updated)
        return loss_sum, gradients
