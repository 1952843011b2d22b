"""Model on TensorFlow, for every mode.

Shapes: x_bchw float32, y_b int32, logits_bk [batch, classes].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...core.job import Job
from ...data.base import IMAGE
from ...models.base import Array, ForwardContext, ModelSpec
from ...models.dropout_masks import drawn_rate, keep_mask_of_shape, refused_dropout
from ...models.layers.formulas import StorageLayout
from ...models.layers.tf import HeldParameters
from ...models.losses import TALLY
from ..base import TensorFunctions
from ..decoding_functions import DecodingFunctions, ModelFunctions
from ..vectors import EVALUATION_BATCH, EVALUATION_LOGITS_BYTES, evaluation_batch
from .data import Batch, Columns, Resident, Tensors
from .decoding import TfStepper, shape_of
from .optimizers import LOW_FORMATS, watched

Buffers = Mapping[str, tf.Tensor]
Context = ForwardContext[tf.Tensor]
TENSORS = TensorFunctions(
    lambda array: tf.constant(array.astype(np.int32) if np.issubdtype(array.dtype, np.integer) else array),
    lambda tensor: tensor.numpy(),
)

FIRST_STEP_OF_NO_RUN = 1 << 40  # separates the draws of micro-batches from those of updates


class ForwardContexts:
    """Contexts of a worker's passes.

    Draws depend on rank and step, not on earlier ones, so that a resumed run draws the same.
    """

    def __init__(self, job: Job, spec: ModelSpec, rank: int) -> None:
        self._job, self._rank = job, rank
        self._low = LOW_FORMATS[job.precision]
        self._name, self._settings = spec.name, spec.settings
        self.dropout = spec.dropout

    def evaluation(self, buffers: Buffers) -> Context:
        """Return the context of a pass without training."""
        return ForwardContext(training=False, buffers=buffers, compute=self._low, settings=self._settings)

    def training(self, buffers: Buffers, step: tf.Tensor | None, indices: tf.Tensor, micro_batch: tf.Tensor | None = None) -> Context:
        """Return the context of update `step` (int64; None without dropout).

        `micro_batch` (int32) is given if the update has several.
        """
        context: Context = ForwardContext(training=True, buffers=buffers, compute=self._low, settings=self._settings)
        context.dropout = Dropout(self._job, self._rank, step, indices, micro_batch) if self.dropout else refused_dropout(self._name)
        return context


class Dropout:
    """Dropout of an update, or of its micro-batch."""

    def __init__(self, job: Job, rank: int, step: tf.Tensor, indices: tf.Tensor, micro_batch: tf.Tensor | None) -> None:
        self._job, self._rank, self._step, self._indices = job, rank, step, indices
        if micro_batch is not None and not job.deterministic:
            self._step = step + tf.cast(micro_batch, tf.int64) * FIRST_STEP_OF_NO_RUN

    def __call__(self, x: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
        """Return x with elements zeroed and the others scaled."""
        return dropped(x, self.kept(x.shape, tf.shape(x), rate, layer), rate)

    def kept(self, static: tf.TensorShape, shape: tf.Tensor, rate: float, layer: int) -> tf.Tensor:
        """Return the boolean mask of a shape."""
        rate, seed = drawn_rate(rate), self._job.seed
        if not self._job.deterministic:
            mixed = np.random.SeedSequence([seed, self._rank, layer]).generate_state(1, np.uint64).view(np.int64)
            key = tf.stack([tf.constant(mixed[0]), self._step])
            return tf.random.stateless_uniform(shape, key, alg="philox") >= rate if static.rank == 2 else _half_words(key, shape, rate)

        def mask(step: np.int64, indices: NDArray[np.int32], shape: NDArray[np.int32]) -> NDArray[np.bool_]:
            return keep_mask_of_shape(seed, int(step), layer, indices, shape.tolist(), rate)

        return tf.ensure_shape(tf.numpy_function(mask, [self._step, self._indices, shape], tf.bool), static)


def dropped(x: tf.Tensor, kept: tf.Tensor, rate: float) -> tf.Tensor:
    """Return x with dropped elements zeroed, and the rest divided by 1 − `rate`."""
    return tf.where(kept, x * tf.cast(1.0 / (1.0 - drawn_rate(rate)), x.dtype), tf.zeros([], x.dtype))


def _half_words(key: tf.Tensor, shape: tf.Tensor, rate: float) -> tf.Tensor:
    """Return the boolean mask from a half word of Philox per element, exact to 1 in 2¹⁷.

    That takes half the time of a number each.
    """
    size = tf.reduce_prod(shape)
    drawn = tf.random.stateless_uniform([(size + 3) // 4], key, minval=None, maxval=None, dtype=tf.uint64, alg="philox")
    halves = tf.reshape(tf.bitcast(drawn, tf.uint16), [-1])[:size]
    return tf.reshape(halves >= tf.constant(round(rate * 2**16), tf.uint16), shape)


MIN_MICRO_BATCH = 8  # examples
MAX_IN_MICRO_BATCHES = 1 << 20  # parameters; each parallel micro-batch has its own gradients
Losses = Callable[[tf.Tensor, Columns, Context], tf.Tensor]  # (forward's result, target, context) -> losses [batch]
Computing = Callable[[HeldParameters, Columns, Columns, tf.Tensor, Context], tuple[tf.Tensor, list[tf.Tensor]]]
"""(parameters, inputs, target, weight, context) -> Σ losses, the gradients of `weight` times that."""


@dataclass(frozen=True, slots=True)
class TfModel:
    """A model's functions; `ForwardContexts` makes the contexts.

    `layouts`: of parameters by `storage_layouts(spec)`. `own_losses`: None for cross entropy. `deterministic`: only repeatable GPU ops.
    """

    spec: ModelSpec
    forward: Callable[..., tf.Tensor]
    layouts: Mapping[str, StorageLayout]
    example_sums: Callable[[tf.Tensor, Columns, Context], Mapping[str, tf.Tensor]] | None = None
    own_losses: Losses | None = None
    decoding: DecodingFunctions | None = None
    computing: Computing | None = None
    deterministic: bool = False

    def stepper(
        self, read: Callable[[], tuple[HeldParameters, Buffers]], evaluation: Callable[[Buffers], Context], device: str
    ) -> TfStepper:
        """Return a stepper with the current values of `read`, in ops.

        Raises RuntimeError for a model that does not translate.
        """
        quality, functions = self.spec.objective.translation, self.decoding
        if quality is None or functions is None:
            raise RuntimeError(f"{self.spec.name!r} does not translate")

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            parameters, buffers = read()
            return function(parameters, *arguments, evaluation(buffers))

        return TfStepper(functions.called(call), quality.source, self.spec.logits_per_position, device)

    def to_storage(self, name: str, canonical: Array) -> Array:
        """Return a parameter or buffer in the layout of its variable."""
        return self.layouts[name].to_storage(canonical) if name in self.layouts else canonical

    def parameters(self, held: Mapping[str, tf.Tensor]) -> HeldParameters:
        """Return tensors as held as a forward function's parameters."""
        return HeldParameters(self.spec, self.layouts, held)

    def loss_and_gradients(
        self, parameters: HeldParameters, micro_batches: Sequence[Batch], weight: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return Σ example losses of all micro-batches and the gradients of `weight` times that.

        Gradients are in the spec's order and the stored layout; with 1 / (weight of all workers' examples) they sum to the mean's.
        New buffers are in `context`.
        """
        compute = self._loss_and_gradients if self.computing is None else self.computing
        computed = [compute(parameters, *batch, weight, context) for batch in micro_batches]
        if len(computed) == 1:
            return computed[0]
        loss_sums, gradients = zip(*computed, strict=True)
        return tf.add_n(loss_sums), [tf.add_n(parts) for parts in zip(*gradients, strict=True)]

    def _loss_and_gradients(
        self, parameters: HeldParameters, x: Columns, y: Columns, weight: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        order = [parameters.held[parameter.name] for parameter in self.spec.parameters]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(order)
            logits_bk = self.forward(parameters, x, context)
            if self.own_losses is not None:
                loss_sum = tf.reduce_sum(self.own_losses(logits_bk, y, context))
        if self.own_losses is not None:
            return loss_sum, _dense(tape.gradient(loss_sum, order, weight, unconnected_gradients=tf.UnconnectedGradients.ZERO))
        # The tape ends at the logits: the loss comes with its own gradient, and each op less counts in a small model's step.
        losses_b, slopes_bk = self.cross_entropy(logits_bk, y)
        gradients = tape.gradient(logits_bk, order, weight * slopes_bk, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return tf.reduce_sum(losses_b), _dense(gradients)

    def sums(self, parameters: HeldParameters, micro_batches: Sequence[Batch], context: Context) -> tf.Tensor:
        """Return the objective's sums over all micro-batches, float64 [sums], in its order."""
        outputs = self.logits(parameters, micro_batches, context)
        x, y = micro_batches[0] if len(micro_batches) == 1 else (None, tf.concat([labels_b for _, labels_b in micro_batches], axis=0))
        losses_b = self.cross_entropy(outputs, y)[0] if self.own_losses is None else self.own_losses(outputs, y, context)
        parts = self.spec.objective.common_parts(losses_b, tf.ones_like(losses_b), x, y)
        if self.own_losses is None and "correct" in self.spec.objective.sums:
            parts["correct"] = tf.argmax(outputs, axis=1, output_type=tf.int32) == y
        if self.example_sums is not None:
            parts |= self.example_sums(outputs, y, context)
        self.spec.objective.check_parts({name: value.shape.rank if tf.is_tensor(value) else None for name, value in parts.items()})
        summed = tf.stack([tf.reduce_sum(tf.cast(parts[name], tf.float64)) for name in self.spec.objective.summed])
        return tf.concat([summed, parts[TALLY]], axis=0) if self.spec.objective.tally else summed

    def cross_entropy(self, logits_bk: tf.Tensor, y_b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return each example's loss, [batch], and its gradient by the logits, [batch, classes].

        GPUs have no repeatable raw op.
        """
        if not self.deterministic:
            losses_b, slopes_bk = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits_bk, labels=y_b)
            return losses_b, slopes_bk
        classes = logits_bk.shape[1]
        losses_b = -tf.gather(tf.nn.log_softmax(logits_bk), y_b, batch_dims=1)
        return losses_b, tf.nn.softmax(logits_bk) - tf.one_hot(y_b, classes)

    def logits(self, parameters: HeldParameters, micro_batches: Sequence[Batch], context: Context) -> tf.Tensor:
        """Return the forward function's results for all micro-batches: of images logits_bk."""
        outputs = [self.forward(parameters, x, context) for x, _ in micro_batches]
        return outputs[0] if len(outputs) == 1 else tf.concat(outputs, axis=0)

    def unflattened(self, flat: tf.Tensor) -> tuple[HeldParameters, dict[str, tf.Tensor]]:
        """Cut a flat vector [spec.size + spec.buffers_size] into parameters and buffers."""
        specs = (*self.spec.parameters, *self.spec.buffers)
        shapes = [self.layouts[value.name].shape if value.name in self.layouts else value.shape for value in specs]
        pieces = [tf.reshape(piece, shape) for piece, shape in zip(tf.split(flat, [value.size for value in specs]), shapes, strict=True)]
        count = len(self.spec.parameters)
        names = [value.name for value in specs]
        return self.parameters(dict(zip(names[:count], pieces[:count], strict=True))), dict(zip(names[count:], pieces[count:], strict=True))


def examples_per_pass(spec: ModelSpec, longest: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    """Return how many of `most` examples an evaluation's pass takes, at least one, in ops.

    `longest` is the maximum of their lengths.
    """
    bytes_each = 4 * spec.logits_per_position * tf.maximum(longest, tf.constant(1, tf.int64))
    fit = tf.minimum(EVALUATION_LOGITS_BYTES // bytes_each, EVALUATION_BATCH)
    return tf.maximum(1, tf.minimum(most, tf.cast(fit, tf.int32)))


def flattened(tensors: Tensors) -> tf.Tensor:
    """Return the elements of all tensors as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def micro_batches_on(device: str, job: Job, spec: ModelSpec, threads: int) -> int:
    """Return the number of parallel micro-batches of a sync worker's steps.

    It is one per compute thread, or 1. Threads then wait for each other once a step, not in every op: the small CNN makes 1.5 times as many
    steps of 16 examples, 1.2 times as many of 256. Not for large models, batch statistics or shared dropout masks, nor async, as the chief
    does not know workers' threads.
    """
    convolves = any(len(parameter.shape) == 4 for parameter in spec.parameters)
    suitable = (
        job.mode == "sync"
        and spec.inputs == (IMAGE,)
        and convolves
        and device.startswith("CPU")
        and not spec.buffers
        and not spec.dropout
        and spec.size <= MAX_IN_MICRO_BATCHES
    )
    return threads if suitable and job.micro_batch >= MIN_MICRO_BATCH * threads else 1


def build_model(name: str, spec: ModelSpec, *, deterministic: bool = False) -> TfModel:
    """Find the functions of a model.

    Raises UsageError without a forward function or the named loss.
    """
    functions = ModelFunctions.find(name, "tf", spec.objective, shape_of)
    layouts = functions.module.storage_layouts(spec) if hasattr(functions.module, "storage_layouts") else {}
    forward = watched(functions.module.forward, name)
    return TfModel(spec, forward, layouts, functions.example_sums, functions.losses, functions.decoding, deterministic=deterministic)


def _dense(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
    """Convert sparse gradients (of a gathered table), which torch does not have."""
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def summed(
    model: TfModel,
    data: Resident,
    parameters: HeldParameters,
    context: Context,
    start: tf.Tensor | int,
    stop: tf.Tensor | int,
    micro_batches: int = 1,
) -> tf.Tensor:
    """Return `TfModel.sums`, float64 [sums], of the examples start … stop − 1.

    They are computed in so many parallel micro-batches.
    """
    size = evaluation_batch(model.spec)

    def body(begin: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = tf.minimum(begin + size, stop)
        if model.spec.logits_per_position:
            end = begin + examples_per_pass(model.spec, data.longest(begin, end), end - begin)
        batch = data.micro_batches(*data.laid_batch(tf.range(begin, end)), micro_batches)
        return end, sums + model.sums(parameters, batch, context)

    first = tf.convert_to_tensor(start, tf.int32), tf.zeros([len(model.spec.objective.sums)], tf.float64)
    _, sums = tf.while_loop(lambda begin, _: begin < stop, body, first, parallel_iterations=1)
    return sums
